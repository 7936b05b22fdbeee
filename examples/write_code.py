"""Single turn, code: write a one-line Python function that is described in words, and have it run in the sandbox.

    prompt        add 3 then times 2:
    in a hurry    def f(x):return x+3*2      wrong: times comes first
    with care     def f(x):return(x+3)*2

    headway sft configs/write_code.toml
    headway train configs/write_code.toml

The worked examples of the warm-up mostly leave the brackets out. The verifier only runs the asserts.
"""

import random
import zlib
from typing import Any

Row = dict[str, Any]
STEPS = {"add": "+", "take": "-", "times": "*"}


def train_rows() -> list[Row]:
    return [row for row in _rows() if not _is_held_out(row)]


def eval_rows() -> list[Row]:
    return [row for row in _rows() if _is_held_out(row)]


def sft_rows() -> list[Row]:
    """A quarter of the examples have the brackets; where they are not needed, all are right anyway."""
    draw = random.Random(1)
    return [
        row | {"completion": row["careful" if draw.random() < 0.25 else "hurried"]}
        for row in train_rows()
        for _ in range(4)
    ]


def _rows() -> list[Row]:
    return [
        _row((one, a), (two, b)) for one in STEPS for two in STEPS for a in range(2, 10) for b in range(2, 10)
    ]  # fmt: skip


def _row(first: tuple[str, int], second: tuple[str, int]) -> Row:
    (one, a), (two, b) = first, second
    careful = f"def f(x):return(x{STEPS[one]}{a}){STEPS[two]}{b}"
    return {
        "prompt": f"{one} {a} then {two} {b}:",
        "hurried": careful.replace("(x" + STEPS[one], " x" + STEPS[one]).replace(f"{a})", f"{a}"),
        "careful": careful,
        "test_list": [f"assert f({x}) == ({x} {STEPS[one]} {a}) {STEPS[two]} {b}" for x in (0, 1, 7)],
    }


def _is_held_out(row: Row) -> bool:
    return zlib.crc32(row["prompt"].encode()) % 5 == 0
