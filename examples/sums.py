"""Sums of two digits, asked in words: the task of configs/smollm2.toml, checked by headway.tasks.verifiers.number."""

from typing import Any

Row = dict[str, Any]


def train_rows() -> list[Row]:
    return [row for row in _rows() if not row["held_out"]]


def eval_rows() -> list[Row]:
    return [row for row in _rows() if row["held_out"]]


def _rows() -> list[Row]:
    """All hundred sums; every third is held out, by a rule that spreads over small and large ones."""
    return [
        {
            "prompt": f"What is {a} + {b}? Answer with the number only.",
            "answer": a + b,
            "held_out": (a + 2 * b) % 3 == 0,
        }
        for a in range(10)
        for b in range(10)
    ]
