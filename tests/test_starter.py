"""`headway init` and `headway knobs`: every config that is written loads, and every knob is described."""

from itertools import pairwise
from pathlib import Path

import pytest

from headway import knobs
from headway.config import Config, all_keys, load
from headway.errors import ConfigError
from headway.starter import STARTERS, write_starter
from headway.tasks import imports
from headway.tasks.datasets import load_rows


@pytest.mark.parametrize("task", STARTERS)
@pytest.mark.parametrize("gpu", [False, True])
def test_every_config_that_init_writes_loads_and_comments_each_knob(tmp_path: Path, task: str, gpu: bool) -> None:
    path = tmp_path / "my-run.toml"
    write_starter(path, task, 'a "model"', gpu)
    config = load(path)
    assert config.model.path == 'a "model"' and config.engine.device == ("cuda" if gpu else "cpu")
    lines = path.read_text().splitlines()
    assert all(before.startswith("# ") for before, line in pairwise(lines) if " = " in line[:20])


def test_init_writes_a_task_of_ones_own_that_works(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sums.toml"
    assert write_starter(path, "own", "model", False) == [path, tmp_path / "new" / "sums_task.py"]
    config = load(path)
    rows = load_rows(config.task.train)
    assert imports.load(config.task.verifier)(rows[0], "It is 0") == 1.0


@pytest.mark.parametrize(
    ("name", "task", "sentence"),
    [
        ("run.toml", "nothing", "--task nothing is not known; choose own, math, code, choice"),
        ("run.yaml", "own", "is not the name of a TOML file"),
        ("there.toml", "own", "exists; name another file"),
    ],
)
def test_init_refuses_in_one_sentence_and_writes_nothing(tmp_path: Path, name: str, task: str, sentence: str) -> None:
    (tmp_path / "there_task.py").write_text("mine")
    with pytest.raises(ConfigError, match=sentence):
        write_starter(tmp_path / name, task, "model", False)
    assert [path.name for path in tmp_path.iterdir()] == ["there_task.py"]
    assert (tmp_path / "there_task.py").read_text() == "mine"


def test_every_knob_has_a_type_a_default_and_its_choices() -> None:
    found = {knob.key: knob for knob in knobs.describe(Config)}
    assert found.keys() == all_keys().keys() and all(knob.type for knob in found.values())
    assert found["engine.kind"].choices == ("embedded", "vllm", "fake") and found["engine.kind"].default == '"embedded"'
    assert found["model.path"].default == "" and found["trainer.lr"].type == "number"
    assert {knob.key.split(".")[0] for knob in knobs.describe(Config, "ENGINE.")} == {"engine"}
