"""Rows of a data set, wherever it lies: every row a dict of plain values, or a sentence that says what is wrong.

A reference is a .jsonl, .json, .csv or .parquet file; `hf:NAME`, `hf:NAME:CONFIG` or `hf:NAME:CONFIG@SPLIT` for a
Hugging Face data set by hub name or directory (train is the split where none is named); or `file.py:function` or
`module:function`, a function of the user's that returns or yields rows. One that returns an environment of the package
`verifiers` gives its training rows, and with `@eval` after its name those for evaluation.
"""

import csv
import importlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from headway import codec
from headway.errors import CAUSE, KIND, ConfigError, translated
from headway.tasks import imports

Row = dict[str, Any]

_HF = "hf:"
_SPLITS = {"": "get_dataset", "eval": "get_eval_dataset"}  # of an environment
_LONGEST_CELL = 1 << 30  # of a CSV file; the module's own limit is 128 KiB
FORMS = "a .jsonl, .json, .csv or .parquet file, hf:NAME:CONFIG@SPLIT, or file.py:function"


def load_rows(reference: str, fields: Mapping[str, str] | None = None) -> list[Row]:
    """All rows; `fields` gives some of their fields other names: {"answer": "solution"} reads answer from solution."""
    rows = _reader(reference)(reference)
    if not rows:
        raise ConfigError(f"{reference} has no rows; give at least one")
    for index, row in enumerate(rows):
        for name, source in (fields or {}).items():
            if source not in row:
                known = sorted(row)
                raise ConfigError(
                    f"{reference}, row {index} has no field {source!r}, which task.fields names; it has {known}"
                )
            row[name] = row[source]
    return rows


def check_there(reference: str) -> None:
    """Refuses, before anything is loaded, a file that does not exist and a reference of no known form."""
    if not reference or reference.startswith(_HF):
        return
    if _suffix(reference) in _READERS:
        if not Path(reference).is_file():
            raise ConfigError(f"dataset {reference} does not exist")
    elif ":" not in reference:
        hub = "; a hub name is written hf:" + reference if re.fullmatch(r"[\w.-]+/[\w.-]+", reference) else ""
        raise ConfigError(f"dataset {reference!r} is not {FORMS}{hub}")


def _suffix(reference: str) -> str:
    return Path(reference).suffix.lower()


def _reader(reference: str) -> Callable[[str], list[Row]]:
    check_there(reference)
    if reference.startswith(_HF):
        return _read_hugging_face
    return _READERS.get(_suffix(reference), _call)


# Files


def _text(path: str) -> str:
    with translated(UnicodeDecodeError, ConfigError, f"dataset {path} is not UTF-8 text ({CAUSE})"):
        return Path(path).read_text(encoding="utf-8-sig")


def _read_jsonl(path: str) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            rows.append(_checked(_parse(line, f"{path}, line {number}"), f"{path}, line {number}"))
    return rows


def _read_json(path: str) -> list[Row]:
    rows = _parse(_text(path), path)
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: a list of rows is needed, not {type(rows).__name__}")
    return [_checked(row, f"{path}, row {index}") for index, row in enumerate(rows)]


def _parse(text: str, where: str) -> Any:
    with translated((ValueError, RecursionError), ConfigError, f"{where}: not valid JSON ({CAUSE})"):
        return json.loads(text)


def _read_csv(path: str) -> list[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    # Not splitlines, which also ends a line at characters that a cell may hold, such as U+2028.
    reader = csv.DictReader(io.StringIO(_text(path), newline=""))
    with translated(csv.Error, ConfigError, f"dataset {path} is not readable CSV ({CAUSE})"):
        rows = list(reader)
    for index, row in enumerate(rows):
        if None in row or None in row.values():
            raise ConfigError(f"{path}, row {index}: not as many values as the header {reader.fieldnames} has names")
    return [_checked(row, f"{path}, row {index}") for index, row in enumerate(rows)]


def _read_parquet(path: str) -> list[Row]:
    parquet = _import("pyarrow.parquet", path)
    # A file that only calls itself Parquet is refused by pyarrow in its own words.
    with translated((OSError, ValueError), ConfigError, f"dataset {path} is not readable Parquet ({CAUSE})"):
        rows = parquet.read_table(path).to_pylist()
    return [_checked(row, f"{path}, row {index}") for index, row in enumerate(rows)]


def _read_hugging_face(reference: str) -> list[Row]:
    datasets = _import("datasets", reference)
    place, _, split = reference.removeprefix(_HF).partition("@")
    name, _, config = place.partition(":")
    # The hub, the network, the cache and the data set's own files fail in a dozen ways.
    with translated(Exception, ConfigError, f"dataset {reference} cannot be loaded: {CAUSE}"):
        if (Path(name) / "dataset_info.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(name)
            data = data[split or "train"] if isinstance(data, dict) else data
        else:
            data = datasets.load_dataset(name, config or None, split=split or "train")
    return [_checked(dict(row), f"{reference}, row {index}") for index, row in enumerate(data)]


def _import(module: str, reference: str) -> Any:
    with translated(
        ImportError, ConfigError, f"dataset {reference} needs more packages; pip install 'headway-rl[datasets]'"
    ):
        return importlib.import_module(module)


def _call(reference: str) -> list[Row]:
    place, at, split = reference.partition("@")
    if at and split not in _SPLITS:
        raise ConfigError(
            f"{reference}: there is no @{split}; an environment has @eval, and its training rows without it"
        )
    function = imports.load(place)
    # The function is the user's: whatever it raises becomes one sentence that names it.
    with translated((Exception, SystemExit), ConfigError, f"{reference} raised {KIND}: {CAUSE}"):
        made = imports.call(function)
        getter = getattr(made, _SPLITS.get(split, ""), None)
        rows = [] if made is None else list(getter() if getter else made)
    if made is None:
        raise ConfigError(f"{reference} returned None (is a `return` missing?), not rows")
    if at and not getter:
        raise ConfigError(f"{reference}: {place} returns rows and no environment, so leave @{split} out")
    return [_checked(row, f"{reference}, row {index}") for index, row in enumerate(rows)]


_READERS: dict[str, Callable[[str], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


# Values


def _checked(row: Any, where: str) -> Row:
    """The row with numpy's, Arrow's and datetime's values as plain ones; what cannot travel is refused by its field."""
    if not isinstance(row, dict):
        kind = "a JSON object" if "line" in where else "a dict"
        raise ConfigError(f"{where}: a row is {kind}, not {type(row).__name__}")
    sentence = f"{where}: a value of the row holds itself; write it out"
    with translated(RecursionError, ConfigError, sentence):
        made = {str(name): _plain(value) for name, value in row.items()}
    if problem := codec.check_value(made, f"{where}: the row"):
        raise ConfigError(problem)
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int | float | bytes | None):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def same_prompt_key(prompt: Any) -> str:
    """The text by which two prompts are the same."""
    return json.dumps(prompt, sort_keys=True, default=str, ensure_ascii=False)


def distinct(keys: Iterable[str]) -> list[bool]:
    """For each key, whether it is the first of its kind."""
    seen: set[str] = set()
    first = []
    for key in keys:
        first.append(key not in seen)
        seen.add(key)
    return first
