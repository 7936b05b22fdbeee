"""`headway show`, `runs`, `compare` and `export` on recorded runs: what they say, and that hostile text stays text."""

import io
import json
import os
from pathlib import Path

import pytest
from recorded import RecordedRun, write_tokenizer
from rich.console import Console

from headway.config import MetricsSection
from headway.errors import HeadwayError
from headway.monitor import listing
from headway.monitor.export import export_completions, export_model, model_card
from headway.monitor.metrics import Metrics
from headway.monitor.reader import RunReader
from headway.monitor.samples import COLUMNS, SampleRow, markdown
from headway.record.log import EVENTS_NAME, scan
from headway.record.run import Run

HOSTILE = "<script>alert(1)</script> #\x1b31m\u202e"
CONFIG = {
    "run": {"steps": 2},
    "model": {"path": "some/base`|\n---"},
    "task": {"train": "hf:openai/gsm8k:main@train", "verifier": "mine.py:verify"},
    "trainer": {"batch_groups": 2, "lr": 1e-6},
    "rollout": {"group_size": 2},
    "staleness": {"max_staleness": 4},
    "algorithm": {"objective": "decoupled"},
    "sampling": {"temperature": 1.0},
}


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path / "runs" / "one", batch=2, size=2, prompts=3)
    write_tokenizer(tmp_path / "runs" / "one" / "model")
    run.step()
    run.step()
    run.flush()
    return run


def shown(table: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def show(run: RecordedRun, **options: object) -> str:
    settings = {"step": None, "group": None, "count": 2, "whole": False, **options}
    return "\n".join(listing.show(RunReader(run.directory), **settings))  # type: ignore[arg-type]


def test_show_prints_the_last_steps_prompts_with_completions_and_rewards(recorded: RecordedRun) -> None:
    text = show(recorded, count=1)
    assert text.startswith("group 2 · prompt row 2 · trained · step 2 · staleness 1\n    what is 2?\n  #0 reward 1")
    assert "the answer is 2" in text and "version 0 to 1" in text and "step 2 has 1 more" in text
    assert show(recorded, step=1, count=1).startswith("group 0 · ")
    assert show(recorded, group=1).startswith("group 1 · ")
    with pytest.raises(HeadwayError, match="has no training step 9"):
        show(recorded, step=9)


def test_hostile_and_endless_text_is_shown_as_text(recorded: RecordedRun) -> None:
    recorded.finish_group(texts=[HOSTILE, "a" * 1_000_000], failure=HOSTILE, asked=HOSTILE)
    recorded.flush()
    text = show(recorded, group=4)
    assert "\x1b" not in text and "\u202e" not in text and r"\x1b31m\u202e" in text
    assert "998,000 more characters" in text and len(text) < 5_000
    assert len(show(recorded, group=4, whole=True)) > 1_000_000


def test_runs_lists_the_latest_first_from_summary_or_log(recorded: RecordedRun, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "two"
    other.mkdir()
    (other / EVENTS_NAME).write_bytes((recorded.directory / EVENTS_NAME).read_bytes())
    (other / "summary.json").write_text(json.dumps({"status": "finished", "steps": 7, "eval_latest": 0.5}))
    os.utime(recorded.directory / EVENTS_NAME, (1000, 1000))
    os.utime(other / EVENTS_NAME, (2000, 2000))
    rows = shown(listing.runs_table(listing.runs(tmp_path), now=2060.0)).splitlines()[1:]
    assert [row.split()[1:] for row in rows] == [
        ["finished", "7", "50.0%", "60", "s", "ago"],
        ["interrupted", "2", "–", "18", "min", "ago"],
    ]
    with pytest.raises(HeadwayError, match="there is no run in"):
        listing.runs(recorded.directory / "model")


def test_compare_shows_the_knobs_that_differ_and_both_results(recorded: RecordedRun, tmp_path: Path) -> None:
    one, other = RunReader(recorded.directory), RunReader(recorded.directory)
    other.run.config = {**one.config, "trainer": {"lr": 0.5}, "run": {**one.config["run"], "dir": "elsewhere"}}
    knobs, results = map(shown, listing.compare([one, other]))
    assert "trainer.lr" in knobs and "0.5" in knobs and "run." not in knobs
    assert "training steps" in results and "held-out accuracy" in results
    assert "none differs" in shown(listing.compare([one, one])[0])


def test_the_model_card_holds_facts_of_the_record_and_no_markup_of_others(recorded: RecordedRun) -> None:
    run = RunReader(recorded.directory)
    run.run.config = CONFIG
    card = model_card(run, None)
    front = card.split("---\n")[1]
    assert "base_model" not in front, "a name that was not fetched from a hub is not called one"
    assert 'datasets: ["openai/gsm8k"]' in front and 'tags: ["headway", "reinforcement-learning"]' in front
    assert card.count("\n---\n") == 1, "a line in the model's name does not end the front matter"
    assert "| staleness bound η | 4 |" in card and "| training steps of the run | 2 |" in card
    assert "not measured" in card and "not verified" in card


def test_export_copies_the_model_once_and_refuses_to_write_over_one(recorded: RecordedRun, tmp_path: Path) -> None:
    run = RunReader(recorded.directory)
    with pytest.raises(HeadwayError, match="holds no saved model"):
        export_model(run, tmp_path / "out")
    (recorded.directory / "model" / "config.json").write_text("{}")
    run.run.config = CONFIG
    assert export_model(run, tmp_path / "out") is None, "no weights, so no version"
    assert {"README.md", "config.json", "headway_config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    with pytest.raises(HeadwayError, match="exists; name a directory that does not"):
        export_model(run, tmp_path / "out")


def test_completions_are_exported_to_parquet_with_rewards(recorded: RecordedRun, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    recorded.finish_group(texts=[HOSTILE, "plain"])
    recorded.flush()
    path = tmp_path / "completions.parquet"
    assert export_completions(RunReader(recorded.directory), path) == 10
    rows = parquet.read_table(path).to_pylist()
    assert [row["group"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert rows[8]["completion"] == HOSTILE and rows[4]["reward"] == 1.0 and rows[4]["step"] == 2
    assert not list(tmp_path.glob("*.partial"))


def test_a_table_of_samples_is_text_in_markdown() -> None:
    row = SampleRow(3, 1, 0.5, "stop", "a|b\n# c", f"{HOSTILE} [x](y)")
    table = markdown([row])
    assert len(table.splitlines()) == 3 and table.splitlines()[2].count("|") == len(COLUMNS) + 1
    assert "<" not in table and "\x1b" not in table and "&#60;script&#62;" in table and "#%" not in table


def test_samples_reach_the_terminal_and_tensorboard_at_the_steps_asked_for(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, said = Run(), list[str]()
    section = MetricsSection(tensorboard=True, samples_every=2)
    metrics = Metrics(recorded.directory, section, run, complain=said.append)
    for event in scan(recorded.directory / EVENTS_NAME):
        run.on_event(event)
        metrics.on_event(event)
    metrics.close()
    assert len(said) == 2 and said[0].startswith("sample (step 2, group 2, reward 1.00, stop): what is 2? → the answer")
    accumulator = EventAccumulator(str(recorded.directory / "tensorboard"))
    accumulator.Reload()
    (point,) = accumulator.Tensors("samples")
    assert point.step == 2 and b"the answer is 2" in point.tensor_proto.string_val[0]
