"""MBPP's problems as prompts: the task in words and its asserts, which name the function. See configs/mbpp.toml.

The data set's files are data/mbpp/train.jsonl and data/mbpp/test.jsonl, as its authors publish them: a line has `text`,
`test_list` and `test_setup_code`. headway.tasks.verifiers.code runs what the model wrote against the asserts.
"""

from typing import Any

from headway.tasks.datasets import load_rows

Row = dict[str, Any]


def train_rows() -> list[Row]:
    return _rows("data/mbpp/train.jsonl")


def eval_rows() -> list[Row]:
    return _rows("data/mbpp/test.jsonl")


def _rows(path: str) -> list[Row]:
    return [row | {"prompt": _prompt(row)} for row in load_rows(path)]


def _prompt(row: Row) -> str:
    tests = "\n".join(row["test_list"])
    return f"{row['text'].strip()}\n\nThe solution has to pass these tests:\n```python\n{tests}\n```"
