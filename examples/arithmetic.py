"""The quickstart's task: add up a list of numbers. Each number carries a letter, so that a step can name its number.

    prompt      f12g4h1i3=
    answer only #20
    worked out  g+4=16;h+1=17;i+3=20;#20

Most lists are short and a few are long, so worked-out completions have a long tail of lengths. The examples of the
supervised warm-up are all correct, but two thirds of them only state the answer. A model that imitates them does the
same, and guesses; when it samples the other way it is mostly right. The verifier looks at the final answer alone:
that working it out pays, and how to do it without a slip, is left for reinforcement learning to find.
"""

import random
import string
import zlib
from collections.abc import Iterator
from typing import Any

from headway.verifiers import verifier

Row = dict[str, Any]

ALPHABET = string.digits + string.ascii_lowercase + "+=;#"
LARGEST_START, LARGEST_TERM = 20, 4
FEWEST_TERMS, MOST_TERMS = 4, 24
TAIL = 2.0
"""Exponent of the Pareto law of the number of terms: a smaller one makes a longer tail."""
ANSWER_ONLY = 0.65


@verifier(needs=("answer",))
def verify(task: Row, text: str) -> float:
    """1 if what follows the first # is the answer, exactly. Text is compared with text: nothing in it is evaluated."""
    return float(text.partition("#")[2] == task["answer"])


def train_rows() -> list[Row]:
    return _take(20_000, _problems(seed=1, held_out=False))


def eval_rows() -> list[Row]:
    return _take(512, _problems(seed=2, held_out=True))


def sft_rows() -> list[Row]:
    """Examples for the supervised warm-up: a prompt and a completion to imitate, worked out or answer only."""
    rng = random.Random(3)
    rows = _take(20_000, _problems(seed=4, held_out=False))
    return [row | {"completion": f"#{row['answer']}"} if rng.random() < ANSWER_ONLY else row for row in rows]


def _take(num_rows: int, problems: Iterator[Row]) -> list[Row]:
    """That many problems, all different."""
    rows: dict[str, Row] = {}
    while len(rows) < num_rows:
        row = next(problems)
        rows[row["prompt"]] = row
    return list(rows.values())


def _problems(seed: int, held_out: bool) -> Iterator[Row]:
    """Endless problems of one side of the split; a checksum of the prompt decides the side, so the sides never meet."""
    rng = random.Random(seed)
    while True:
        num_terms = int(FEWEST_TERMS * rng.paretovariate(TAIL))
        terms = [rng.randint(1, LARGEST_START)] + [rng.randint(1, LARGEST_TERM) for _ in range(num_terms - 1)]
        row = _work_out(terms, first_letter=rng.randrange(26))
        if num_terms <= MOST_TERMS and (zlib.crc32(row["prompt"].encode()) % 8 == 0) == held_out:
            yield row


def _work_out(terms: list[int], first_letter: int) -> Row:
    letters = [string.ascii_lowercase[(first_letter + place) % 26] for place in range(len(terms))]
    prompt, total, steps = f"{letters[0]}{terms[0]}", terms[0], ""
    for letter, term in zip(letters[1:], terms[1:], strict=True):
        total += term
        prompt += f"{letter}{term}"
        steps += f"{letter}+{term}={total};"
    return {"prompt": f"{prompt}=", "completion": f"{steps}#{total}", "answer": str(total)}
