"""The code verifier on right and wrong programs, for each kind of row. Attacks on the sandbox are in test_escapes."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headway.tasks.sandbox.pool import Limits
from headway.tasks.verifiers.code import CodeVerifier, find_program

DOUBLE = {"test_list": ["assert double(2) == 4", "assert double('a') == 'aa'"]}
SUM = {"cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9"}]}


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    made = CodeVerifier(Limits(wall_s=5.0, cpu_s=2))
    yield made
    made.close()


HUMAN_EVAL = {
    "prompt": "from typing import List\n\ndef rev(x: List[int]) -> List[int]:\n    '''Turned round.'''\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 1]\n    assert candidate([]) == []\n",
    "entry_point": "rev",
}
UNITTEST = {
    "test": "import unittest\nfrom solution import half\n\nclass T(unittest.TestCase):\n"
    "    def test_a(self): self.assertEqual(half(4), 2)\n"
    "    def test_b(self):\n        with self.assertRaises(ValueError): half('x')\n"
}
FUNCTIONS = {"test": "def test_one():\n    assert inc(1) == 2\n\ndef test_two():\n    assert inc(-1) == 0\n"}
OBJECTS = {
    "test_list": ["assert area(Box(2, 3)) == 6", "assert Box(1, 1).w == 1", "assert [b.w for b in boxes(2)] == [0, 1]"]
}
IN_PLACE = {"test_list": ["x = [2, 1]\nturn(x)\nassert x == [1, 2]", "assert apply(lambda v: v + 1, 2) == 3"]}
TREE = {"test_setup_code": "root = Node(1)\nroot.left = Node(2)", "test_list": ["assert depth(root) == 2"]}
SHADOW = {"test_list": ["assert sum(10, 15) == 6"]}
MODULES = {"test_list": ["assert math.isclose(third(), 1 / 3)", "assert list(gen()) == [1, 2]"]}

BOXES = "class Box:\n  def __init__(self, w, h): self.w, self.h = w, h\ndef area(b): return b.w * b.h\n"
NODES = (
    "class Node:\n  def __init__(self, v): self.v, self.left = v, None\n"
    "def depth(n): return 1 + depth(n.left) if n else 0"
)

RIGHT: list[tuple[str, dict[str, Any], str]] = [
    ("asserts", DOUBLE, "def double(x): return x * 2"),
    ("in a fence", DOUBLE, "So:\n```python\ndef double(x): return x + x\n```\nDone."),
    ("example after it", DOUBLE, "```python\ndef double(x): return 2 * x\n```\nUse:\n```python\nprint(double(2))\n```"),
    ("unclosed fence", DOUBLE, "```py\ndef double(x): return x + x\n"),
    ("prints", DOUBLE, "print('hello')\ndef double(x):\n    print(x)\n    return x + x"),
    ("human eval body", HUMAN_EVAL, "    return x[::-1]\n"),
    ("human eval whole", HUMAN_EVAL, "```python\ndef rev(x: List[int]) -> List[int]:\n    return x[::-1]\n```"),
    ("unittest", UNITTEST, "def half(x):\n    if isinstance(x, str): raise ValueError('text')\n    return x / 2"),
    ("test functions", FUNCTIONS, "inc = lambda x: x + 1"),
    ("objects", OBJECTS, BOXES + "def boxes(n): return [Box(i, 1) for i in range(n)]"),
    ("in place", IN_PLACE, "def turn(x): x.reverse()\ndef apply(f, x): return f(x)"),
    ("setup", TREE, NODES),
    ("a built-in name", SHADOW, "def sum(a, b): return 6"),
    ("modules", MODULES, "import math\ndef third(): return 1 / 3\ndef gen():\n    yield 1\n    yield 2"),
    ("standard input", SUM, "a, b = map(int, input().split())\nprint(a + b)"),
    ("exits well", SUM, "import sys\nprint(sum(map(int, sys.stdin.read().split())), '  ')\nexit()"),
]

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("nothing", DOUBLE, ""),
    ("prose", DOUBLE, "The answer is to multiply by two."),
    ("one test fails", DOUBLE, "def double(x): return 4"),
    ("raises", DOUBLE, "def double(x): raise AssertionError"),
    ("another name", DOUBLE, "def twice(x): return x * 2"),
    ("syntax", DOUBLE, "def double(x) return x * 2"),
    ("null byte", DOUBLE, "def double(x): return x * 2\x00"),
    ("surrogate", DOUBLE, "def double(x): return '\ud800'"),
    ("human eval", HUMAN_EVAL, "    return x\n"),
    ("unittest", UNITTEST, "def half(x): return x // 2 if isinstance(x, int) else 0"),
    ("its own test case", UNITTEST, "import unittest\nclass T: pass\nhalf = 3"),
    (
        "module replaced",
        MODULES,
        "class math:\n  isclose = lambda *a: True\ndef third(): return 7\ndef gen(): return [1, 2]",
    ),
    ("wrong output", SUM, "print(3)"),
    ("right output and a crash", SUM, "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(3)"),
    ("asks for more", SUM, "input(); input()"),
    ("output without end", SUM, "while True: print('x' * 1000)"),
]


@pytest.mark.parametrize(("row", "text"), [pytest.param(row, text, id=name) for name, row, text in RIGHT])
def test_a_right_program_passes(verifier: CodeVerifier, row: dict[str, Any], text: str) -> None:
    assert verifier(row, text) == 1.0, verifier.outcome(row, text)


@pytest.mark.parametrize(("row", "text"), [pytest.param(row, text, id=name) for name, row, text in WRONG])
def test_a_wrong_program_scores_nothing(verifier: CodeVerifier, row: dict[str, Any], text: str) -> None:
    assert verifier(row, text) == 0.0


def test_a_failure_says_what_went_wrong(verifier: CodeVerifier) -> None:
    assert "test 1: ZeroDivisionError: division by zero" in verifier.outcome(DOUBLE, "def double(x): 1 / 0").failure
    assert "wrong output" in verifier.outcome(SUM, "print(3)").failure
    assert "SyntaxError" in verifier.outcome(DOUBLE, "def").failure


def test_the_share_of_tests_passed_is_a_score_too() -> None:
    share = CodeVerifier(share=True)
    assert share(DOUBLE, "def double(x): return 4") == 0.5
    assert share(SUM, "print(3)") == 0.5
    share.close()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "none of the fields"),
        ({"test_list": []}, "no assertion"),
        ({"test_list": ["print(1)"]}, "no assertion"),
        ({"test_list": ["assert ("]}, "never closed"),
        ({"test": 3}, "tests are text"),
        ({"cases": []}, "at least one pair"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ],
)
def test_a_row_no_program_could_be_tried_with_is_refused(row: dict[str, Any], reason: str) -> None:
    verifier = CodeVerifier()
    assert reason in verifier.check_row(row)
    with pytest.raises(ValueError, match=reason):
        verifier(row, "def double(x): return x")
    assert not any(map(verifier.check_row, (DOUBLE, SUM, HUMAN_EVAL, UNITTEST, FUNCTIONS, TREE)))


def test_a_hanging_program_costs_its_deadline_and_holds_up_no_other() -> None:
    verifier = CodeVerifier(Limits(wall_s=1.5, cpu_s=1))
    hang = "import time\ndef double(x): time.sleep(60)"
    with ThreadPoolExecutor(20) as threads:
        started = time.monotonic()
        hung = [threads.submit(verifier, DOUBLE, hang) for _ in range(10)]
        good = [threads.submit(verifier, DOUBLE, "def double(x): return x + x") for _ in range(10)]
        assert [verdict.result() for verdict in good] == [1.0] * 10
        assert [verdict.result() for verdict in hung] == [0.0] * 10
        assert time.monotonic() - started < 15
    verifier.close()


def test_without_isolation_the_verdict_is_the_same_and_the_process_still_cannot_be_multiplied() -> None:
    plain = CodeVerifier(Limits(wall_s=5.0), isolated=False)
    assert plain(DOUBLE, "def double(x): return x + x") == 1.0
    assert plain(DOUBLE, "import os\nos.fork()\ndef double(x): return x + x") == 0.0
    plain.close()


def test_a_machine_without_isolation_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.errors import ConfigError
    from headway.tasks.sandbox import isolation

    monkeypatch.setattr(isolation, "bubblewrap", lambda: "/bin/false")
    with pytest.raises(ConfigError, match=r"offers no isolation .*:verify_without_isolation"):
        CodeVerifier().warm_up()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\na\n```\n```json\nb\n```", "a\n"),
        ("```python\ndef f(): 1\n```\n```python\nf()\n```", "def f(): 1\n"),
        ("- so:\n  ```python\n  if x:\n    y\n  ```", "if x:\n  y\n"),
        ("```python\n    return 1\n```", "    return 1\n"),
        ("Here: ```python\nx\n```\nbye", "x\n"),
        ("Call ```f()``` as in:\n```python\nx\n```", "x\n"),
        ("<think>```python\ndef f(): 0\n```</think>\n```python\ndef f(): 1\n```", "def f(): 1\n"),
        ("```js\nx\n```", "```js\nx\n```"),
    ],
)
def test_the_program_is_found_in_its_text(text: str, program: str) -> None:
    assert find_program(text, ("f",)) == program
