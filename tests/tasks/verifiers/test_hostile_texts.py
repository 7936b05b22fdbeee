"""Hostile texts through every verifier. Invariant 10: no crash, no score beyond 0 to 1, no error scored as a reward."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headway.tasks.sandbox.pool import Limits
from headway.tasks.verifiers import choice, form, gym, match, math_answer, number, schema
from headway.tasks.verifiers.bounded import Bounded
from headway.tasks.verifiers.code import CodeVerifier

PIECES = [
    *(
        "\\boxed{",
        "}",
        "{",
        "####",
        "answer:",
        "answer is",
        "$",
        "\\(",
        "\\)",
        "\\frac",
        "\\sqrt",
        "^",
        "_",
        "\\pm",
        "\\cup",
    ),
    *(
        "\\left(",
        "\\right]",
        "(",
        ")",
        "[",
        "]",
        ",",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "&",
        "\\\\",
        "\\text{",
        "%",
    ),
    *(
        "9",
        "10^{10}",
        "1e999999",
        "0/0",
        "-",
        "+",
        "\\infty",
        "\\int",
        "\\sum_{k=1}^{10^9}",
        "!",
        "x",
        "sin",
        "\\pi",
        "=",
        "<",
    ),
    *(
        "\x00",
        "\ud800",
        "🙂",
        "٤",
        "\u202e",
        "\n",
        "\t",
        " ",
        "```python\n",
        "```",
        "import os\n",
        "os._exit(0)\n",
        "while 1: 0\n",
    ),
    *(
        "def answer(x):\n",
        "    return 4\n",
        "class Y:\n",
        "lambda: 0",
        "exit()\n",
        '{"n": 3}',
        "[" * 50,
        "A",
        "(B)",
        "<answer>",
    ),
    *(
        "</answer>",
        "<think>",
        "__import__('os')",
        "nan",
        "inf",
        "1_000",
        "0x1f",
        "SCORE: 10",
        "a" * 200,
        "\\ud83d",
        "\r\n",
        "\\",
    ),
]
GYM = gym.rows("chain_sum", size=1, seed=1)[0]
CODE = {"test_list": ["assert answer(2) == 'a value no text can guess'"]}


def hostile(draw: random.Random) -> str:
    pieces = [draw.choice(PIECES) for _ in range(draw.choice((1, 3, 10, 40)))]
    text = "".join(piece * draw.choice((1, 1, 1, 2, 30)) for piece in pieces)
    return text[draw.randrange(10) :] if draw.random() < 0.2 else text


def quick_verifiers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[str], float]]:
    """Every verifier that needs no sandbox, on a row whose answer no text has; comparisons are cut short."""
    monkeypatch.setattr(math_answer, "_EQUAL", Bounded(math_answer._compare, 0.3, prepare=math_answer._load))
    rows: list[tuple[str, Any, dict[str, Any]]] = [
        ("number", number.verify, {"answer": 918273645}),
        ("math", math_answer.verify, {"answer": "\\sqrt{918273645} + q"}),
        ("math tuple", math_answer.verify, {"answer": "(\\sqrt{918273645}, q)"}),
        ("choice", choice.verify, {"answer": "Q"}),
        ("match", match.verify, {"answer": "a string that is in no text"}),
        ("pattern", match.verify_regex, {"pattern": "in no (text|word)+$"}),
        ("schema", schema.verify, {"schema": {"const": "in no text"}}),
        ("gym", gym.verify, GYM),
    ]
    return {name: lambda text, verify=verify, row=row: verify(row, text) for name, verify, row in rows}


def play(seed: int, count: int, verifiers: dict[str, Callable[[str], float]]) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        text = hostile(draw)
        for name, verify in verifiers.items():
            score = verify(text)
            assert isinstance(score, float) and score < 0.5, f"{name} gave {score} to {text!r}"
        for rate in (form.verify_tags, form.verify_boxed, schema.verify_parses, form.Length(50, 10)):
            assert 0.0 <= rate({}, text) <= 1.0


def play_code(seed: int, count: int) -> None:
    draw, verifier = random.Random(seed), CodeVerifier(Limits(wall_s=1.0, cpu_s=1, memory_mb=128), spares=4)
    with ThreadPoolExecutor(8) as threads:
        scores = list(threads.map(lambda text: verifier(CODE, text), [hostile(draw) for _ in range(count)]))
    verifier.close()
    assert scores == [0.0] * count


def test_hostile_texts_are_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    play(1, 80, quick_verifiers(monkeypatch))


def test_hostile_programs_are_wrong_answers() -> None:
    play_code(1, 25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_hostile_texts_are_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    play(2, 10_000, quick_verifiers(monkeypatch))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_hostile_programs_are_wrong_answers() -> None:
    play_code(2, 10_000)
