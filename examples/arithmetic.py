"""The quickstart's task: add up a list of numbers, step by step.

    prompt      8+5+9+3=
    completion  8+5=13;13+9=22;22+3=25;#25

Most sums are short, a few are very long, so the lengths of the answers have a long tail. Each step is easy; a long sum
is right only if every step is, which is what reinforcement learning gets to improve: the verifier looks at the final
answer alone, and every step on the way is the model's own.
"""

import random
import zlib
from collections.abc import Iterator
from typing import Any

from headway.verifiers import verifier

Row = dict[str, Any]

ALPHABET = "0123456789+=;#"
LARGEST_TERM = 9
FEWEST_TERMS, MOST_TERMS = 3, 24
TAIL = 1.6
"""Smaller is a longer tail: the number of terms follows a Pareto law with this exponent."""


@verifier(needs=("answer",))
def verify(task: Row, text: str) -> float:
    """1 if what follows the first # is the answer, exactly. Text is compared with text: nothing in it is evaluated."""
    return float(text.partition("#")[2] == task["answer"])


def train_rows() -> list[Row]:
    return _take(_problems(seed=1, held_out=False), 20_000)


def eval_rows() -> list[Row]:
    return _take(_problems(seed=2, held_out=True), 512)


def sft_rows() -> list[Row]:
    """Worked examples for the supervised warm-up: a prompt and the completion to imitate."""
    return _take(_problems(seed=3, held_out=False), 8_000)


def _take(problems: Iterator[list[int]], num_rows: int) -> list[Row]:
    return [_row(next(problems)) for _ in range(num_rows)]


def _row(terms: list[int]) -> Row:
    return {"prompt": _prompt(terms), "completion": _worked(terms), "answer": str(sum(terms))}


def _prompt(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def _worked(terms: list[int]) -> str:
    total, steps = terms[0], ""
    for term in terms[1:]:
        steps += f"{total}+{term}={total + term};"
        total += term
    return f"{steps}#{total}"


def _problems(seed: int, held_out: bool) -> Iterator[list[int]]:
    """Endless problems of one side of the split; a checksum of the prompt decides the side, so the sides never meet."""
    rng = random.Random(seed)
    while True:
        num_terms = FEWEST_TERMS + int(3 * rng.paretovariate(TAIL)) - 3
        terms = [rng.randint(1, LARGEST_TERM) for _ in range(num_terms)]
        if num_terms <= MOST_TERMS and _is_held_out(_prompt(terms)) == held_out:
            yield terms


def _is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 8 == 0
