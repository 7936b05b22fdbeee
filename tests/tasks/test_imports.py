"""References in a config: what they find, and the sentence a user gets when they find nothing."""

import sys
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.tasks import imports


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def sentence_of(reference: str) -> str:
    with pytest.raises(ConfigError) as caught:
        imports.load(reference)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_a_file_is_found_relative_to_the_working_directory_and_imported_once(working_directory: Path) -> None:
    (working_directory / "tasks").mkdir()
    (working_directory / "tasks" / "mine.py").write_text("made = object()\nother = 2\n")
    made = imports.load("tasks/mine.py:made")
    assert imports.load("./tasks/mine.py:made") is made
    assert imports.load(f"{working_directory}/tasks/mine.py:made") is made
    assert imports.load("tasks/mine.py:other") == 2


def test_two_files_of_one_name_are_two_modules(working_directory: Path) -> None:
    for folder in ("a", "b"):
        (working_directory / folder).mkdir()
        (working_directory / folder / "reward.py").write_text(f"name = {folder!r}\n")
    assert imports.load("a/reward.py:name") == "a"
    assert imports.load("b/reward.py:name") == "b"


def test_a_file_finds_its_neighbours_and_never_shadows_the_standard_library(working_directory: Path) -> None:
    (working_directory / "neighbour_of_mine.py").write_text("value = 7\n")
    (working_directory / "fractions.py").write_text("raise RuntimeError('shadowed')\n")
    (working_directory / "mine.py").write_text("import fractions\nfrom neighbour_of_mine import value\n")
    assert imports.load("mine.py:value") == 7


def test_a_module_is_found_installed_or_in_the_working_directory(working_directory: Path) -> None:
    (working_directory / "found_here.py").write_text("value = 3\n")
    assert imports.load("found_here:value") == 3
    assert imports.load("headway.errors:ConfigError") is ConfigError


def test_a_dataclass_in_a_file_can_look_up_its_own_module(working_directory: Path) -> None:
    (working_directory / "nouns.py").write_text(
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Row:\n    a: int\n"
    )
    assert imports.load("nouns.py:Row")(4).a == 4


@pytest.mark.parametrize("reference", ["", ":", "file.py", "file.py:", ":name", "a/b:name", "a-b:name", "file.py:a.b"])
def test_a_wrong_form_is_said_with_the_right_ones(reference: str) -> None:
    assert "is not of the form path/to/file.py:name or package.module:name" in sentence_of(reference)


def test_a_missing_file_is_named_with_the_place_it_was_looked_for(working_directory: Path) -> None:
    sentence = sentence_of("gone.py:verify")
    assert "file gone.py does not exist" in sentence and str(working_directory) in sentence


def test_a_missing_module_is_named_and_told_from_a_missing_import_inside_it(working_directory: Path) -> None:
    assert "there is no module no_such_package;" in sentence_of("no_such_package.verify:verify")
    (working_directory / "lacks.py").write_text("import no_such_dependency\n")
    assert (
        "lacks does not import: ModuleNotFoundError at lacks.py:1: No module named 'no_such_dependency'"
        in sentence_of("lacks:f")
    )


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("1 / 0\n", "ZeroDivisionError at broken.py:1: division by zero"),
        ("def broken(:\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("import sys\nsys.exit('no')\n", "SystemExit at broken.py:2: no"),
    ],
)
def test_a_file_that_does_not_import_is_said_with_its_cause_and_is_tried_anew(
    working_directory: Path, source: str, cause: str
) -> None:
    (working_directory / "broken.py").write_text(source)
    assert f"broken.py does not import: {cause}" in sentence_of("broken.py:verify")
    (working_directory / "broken.py").write_text("verify = 'mended, and of another length'\n")
    assert imports.load("broken.py:verify").startswith("mended")


def test_a_missing_name_is_answered_with_the_nearest_one(working_directory: Path) -> None:
    (working_directory / "mine.py").write_text("def verify_number(): ...\n")
    assert sentence_of("mine.py:verify_numbr").endswith("mine.py has no verify_numbr; did you mean verify_number?")
    assert sentence_of("mine.py:zzz").endswith("mine.py has no zzz")
