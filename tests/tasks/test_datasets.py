import datetime
import decimal
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.tasks import datasets
from headway.tasks.datasets import check_there, load_rows

ROWS: list[dict[str, Any]] = [{"question": "1+1", "answer": "2"}, {"question": "a,b\n", "answer": ""}]


def test_rows_of_a_jsonl_file_come_in_order_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n\n{"prompt": "2", "deep": {"a": [1]}}\n', encoding="utf-8")
    assert load_rows(str(path)) == [{"prompt": "1"}, {"prompt": "2", "deep": {"a": [1]}}]


def test_a_line_separator_inside_a_json_string_does_not_end_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert load_rows(str(path)) == [{"prompt": "a\u2028b"}]


def test_a_csv_cell_may_hold_line_separators_and_be_long(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    cells = ["a\u2028b\x0cc", "x" * 200_000, "two\nlines"]
    path.write_text("prompt,answer\n" + "".join(f'"{cell}",1\n{cell.split(chr(10))[0]},2\n' for cell in cells))
    assert [row["prompt"] for row in load_rows(str(path))][::2] == cells
    assert [row["answer"] for row in load_rows(str(path))] == ["1", "2"] * 3


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{oops", "line 3: not valid JSON"),
        ("[1]", "line 3: a row is a JSON object, not list"),
        ("[" * 100_000, "line 3: not valid JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"{path}, {sentence}"):
        load_rows(str(path))


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=f"{path} is not UTF-8"):
        load_rows(str(path))


def test_a_missing_dataset_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl does not exist"):
        load_rows(str(tmp_path / "nowhere.jsonl"))


def test_28_a_row_that_holds_itself_is_refused_by_its_number(tmp_path: Path) -> None:
    text = "endless = []\nendless.append(endless)\ndef rows():\n    return [{'prompt': 'b', 'c': endless}]"
    (tmp_path / "data.py").write_text(text)
    with pytest.raises(ConfigError, match="row 0: a value of the row holds itself; write it out"):
        load_rows(f"{tmp_path}/data.py:rows")


def test_a_dataset_of_zero_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "data.py").write_text("def rows():\n    return []\n")
    for reference in ("empty.jsonl", "data.py:rows"):
        with pytest.raises(ConfigError, match="has no rows"):
            load_rows(f"{tmp_path}/{reference}")


def test_rows_come_from_a_function_even_if_it_yields_them(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("def rows():\n    for i in range(3):\n        yield {'prompt': str(i)}\n")
    assert [row["prompt"] for row in load_rows(f"{tmp_path}/data.py:rows")] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise RuntimeError('no network')", "rows raised RuntimeError at data.py:2: no network"),
        ("return ['1+1=']", "row 0: a row is a dict, not str"),
        ("[]", "rows returned None"),
    ],
)
def test_a_function_that_gives_no_rows_is_one_sentence(tmp_path: Path, body: str, sentence: str) -> None:
    (tmp_path / "data.py").write_text(f"def rows():\n    {body}\n")
    with pytest.raises(ConfigError, match=sentence):
        load_rows(f"{tmp_path}/data.py:rows")


def test_json_csv_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text('\ufeffquestion,answer\n1+1,2\n"a,b\n",\n', encoding="utf-8")
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.csv", "rows.parquet"):
        assert load_rows(f"{tmp_path}/{name}") == ROWS, name


def test_a_saved_hugging_face_data_set_is_read_by_its_path_and_split(tmp_path: Path) -> None:
    hf = pytest.importorskip("datasets")
    one = hf.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    hf.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(str(tmp_path / "both"))
    assert load_rows(f"hf:{tmp_path}/one") == ROWS
    assert load_rows(f"hf:{tmp_path}/both@test") == ROWS[1:]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert load_rows(f"hf:{tmp_path}/files") == ROWS
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_rows(f"hf:{tmp_path}/both@dev")


def test_a_missing_package_is_one_sentence_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib, "import_module", refuse)
    for reference in (f"{tmp_path}/rows.parquet", "hf:someone/something"):
        with pytest.raises(ConfigError, match=r"pip install 'headway-rl\[datasets\]'"):
            load_rows(reference)


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n1\n")
    (tmp_path / "rows.json").write_text('{"a": 1}')
    for name, sentence in {
        "rows.parquet": "is not readable Parquet",
        "rows.csv": "row 1: not as many values",
        "rows.json": "a list of rows is needed, not dict",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            load_rows(f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("openai/gsm8k", "a hub name is written hf:openai/gsm8k"),
        ("rows.txt", r"is not a \.jsonl, \.json, \.csv or \.parquet file"),
        ("nowhere.parquet", r"nowhere\.parquet does not exist"),
    ],
)
def test_a_reference_of_no_known_form_says_what_the_forms_are(reference: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_there(reference)


def test_fields_are_given_other_names_and_a_missing_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"problem": "p", "solution": "s"}]))
    rows = load_rows(f"{tmp_path}/rows.json", {"prompt": "problem", "answer": "solution"})
    assert rows == [{"problem": "p", "solution": "s", "prompt": "p", "answer": "s"}]
    with pytest.raises(ConfigError, match=r"row 0 has no field 'key', which task\.fields names"):
        load_rows(f"{tmp_path}/rows.json", {"answer": "key"})


def test_values_of_numpy_and_of_tables_become_plain_ones() -> None:
    row = {"a": np.int64(3), "b": np.array([1.5]), "c": datetime.date(2026, 1, 2), "d": decimal.Decimal("1.10")}
    made = datasets._checked(row, "here, row 0")
    assert made == {"a": 3, "b": [1.5], "c": "2026-01-02", "d": "1.10"}
    assert type(made["a"]) is int


@pytest.mark.parametrize("value", [10**25, {1, 2}, object(), [{"deep": {3}}]])
def test_a_value_that_cannot_travel_is_refused_by_row_and_field_before_the_run(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"here, row 7: the row\['odd'\].* is an? "):
        datasets._checked({"fine": 1, "odd": value}, "here, row 7")
