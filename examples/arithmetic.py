"""The quickstart's task: add up a list of numbers, in the head or step by step.

    prompt          a7b2c5d1=            seven, and two, and five, and one
    in the head     #15
    step by step    b+2=9;c+5=14;d+1=15;#15

The worked examples of the warm-up are of both kinds, and most only state the answer; that is what the model imitates,
and it is mostly wrong. The verifier looks at the final answer alone. Reinforcement learning finds out by itself that
working step by step pays. Most lists are short and a few are very long, so completions have a long tail of lengths.
"""

import random
import zlib
from collections.abc import Iterator
from typing import Any

from headway.tasks.verifiers import verifier

Row = dict[str, Any]

ALPHABET = "0123456789+=;#abcdefghijklmnopqrstuvwxyz"
FEWEST_TERMS, MOST_TERMS = 6, 24
LARGEST_FIRST, LARGEST_TERM = 9, 5
TAIL, TAIL_SCALE = 2.5, 4.0
"""The number of terms follows a Pareto law: a smaller exponent is a longer tail."""
ANSWER_ONLY_SHARE = 0.7


@verifier(needs=("answer",))
def verify(task: Row, text: str) -> float:
    """1 if what follows the first # is the answer, exactly. Text is compared with text: nothing in it is evaluated."""
    return float(text.partition("#")[2] == task["answer"])


def train_rows() -> list[Row]:
    problems = _problems(seed=1, held_out=False)
    return [_row(next(problems)) for _ in range(20_000)]


def eval_rows() -> list[Row]:
    problems, distinct = _problems(seed=2, held_out=True), dict[str, Row]()
    while len(distinct) < 512:
        row = _row(next(problems))
        distinct[row["prompt"]] = row
    return list(distinct.values())


def sft_rows() -> list[Row]:
    """Examples for the supervised warm-up: a prompt and the completion to imitate, most without the work."""
    problems, styles = _problems(seed=3, held_out=False), random.Random(4)
    rows = (_row(next(problems)) for _ in range(20_000))
    return [row | {"completion": f"#{row['answer']}"} if styles.random() < ANSWER_ONLY_SHARE else row for row in rows]


def _row(terms: list[int]) -> Row:
    return {"prompt": _prompt(terms), "completion": _worked(terms), "answer": str(sum(terms))}


def _prompt(terms: list[int]) -> str:
    return "".join(f"{_letter(place)}{term}" for place, term in enumerate(terms)) + "="


def _worked(terms: list[int]) -> str:
    steps = [f"{_letter(place)}+{terms[place]}={sum(terms[: place + 1])};" for place in range(1, len(terms))]
    return "".join(steps) + f"#{sum(terms)}"


def _letter(place: int) -> str:
    return chr(ord("a") + place)


def _problems(seed: int, held_out: bool) -> Iterator[list[int]]:
    """Endless problems of one side of the split; a checksum of the prompt decides the side, so the sides never meet."""
    rng = random.Random(seed)
    while True:
        num_terms = FEWEST_TERMS + int((rng.paretovariate(TAIL) - 1) * TAIL_SCALE)
        if num_terms > MOST_TERMS:
            continue
        terms = [rng.randint(1, LARGEST_FIRST), *(rng.randint(1, LARGEST_TERM) for _ in range(num_terms - 1))]
        if _is_held_out(_prompt(terms)) == held_out:
            yield terms


def _is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 8 == 0
