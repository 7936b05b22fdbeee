"""Which runs a directory may be resumed, replaced or refused for, and what a resume may change."""

import asyncio
import datetime
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from system import check_finished, events_of, make_config, run_inline, task_of

from headway import launch
from headway.control.resume import replay
from headway.control.run_directory import changes, changes_arithmetic, plain
from headway.errors import ConfigError
from headway.monitor.view import PlainView
from headway.record.run import fold


def test_12_a_resume_takes_other_knobs_and_replay_honours_them(tmp_path: Path, tiny_model: str) -> None:
    run_inline(make_config(tmp_path, tiny_model, run={"steps": 3}))
    again: dict[str, dict[str, Any]] = {
        "run": {"steps": 5},
        "trainer": {"lr": 1e-3, "token_budget": 256},
        "engine": {"kv_tokens": 1024, "count": 2},
        "reward": {"deadline_s": 20.0},
    }
    config = make_config(tmp_path, tiny_model, **again)
    run_inline(config, resume=True)
    events = events_of(config)
    state = check_finished(config, events)
    (changed,) = [event for event in events if event.kind == "config_changed"]
    assert changed.version == 3 and changed.changes["trainer.lr"] == (3e-3, 1e-3)
    assert {"engine.count", "reward.deadline_s", "run.steps"} <= {*changed.changes}
    version, digest = asyncio.run(replay(Path(config.run.dir), lambda event: None))
    assert (version, digest) == (5, state.digests[5])


@pytest.mark.parametrize(("schedule", "is_retrained"), [("constant", False), ("cosine", True)])
def test_12_more_steps_change_how_the_record_was_trained_only_where_the_rate_falls(
    tmp_path: Path, schedule: str, is_retrained: bool
) -> None:
    before, now = (
        make_config(tmp_path, "model", run={"steps": steps}, trainer={"lr_schedule": schedule}) for steps in (2, 3)
    )
    assert changes_arithmetic(changes(plain(before), now)) == is_retrained


def test_29_a_date_in_a_config_is_recorded_and_is_no_change_at_resume(tmp_path: Path, tiny_model: str) -> None:
    task = {"eval": "", "template": {"today": datetime.date(2026, 1, 1)}}
    run_inline(make_config(tmp_path, tiny_model, task=task, run={"steps": 1}))
    config = make_config(tmp_path, tiny_model, task=task, run={"steps": 2})
    run_inline(config, resume=True)
    check_finished(config, events_of(config))


@pytest.mark.parametrize(
    ("section", "knob", "value", "old"),
    [
        ("trainer", "batch_groups", 4, "3"),
        ("sampling", "temperature", 0.5, "1.0"),
        ("rollout", "group_size", 4, "3"),
        ("staleness", "max_staleness", 1, "2"),
    ],
)
def test_12_a_resume_names_the_knob_that_would_change_the_meaning_of_the_record(
    tmp_path: Path, one_step: Path, tiny_model: str, section: str, knob: str, value: Any, old: str
) -> None:
    config = copied(one_step, tmp_path, tiny_model, **{section: {knob: value}})
    with pytest.raises(ConfigError, match=rf"{section}.{knob} = {value} differs from the {old} of the run in"):
        run_inline(config, resume=True)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    home = tmp_path_factory.mktemp("one_step")
    run_inline(make_config(home, tiny_model, run={"steps": 1}, task={"eval": ""}))
    return home


def copied(home: Path, into: Path, model: str, **sections: Any) -> Any:
    shutil.copytree(home / "run", into / "run")
    config = make_config(home, model, **sections, task={"eval": ""})
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(into / "run"), "steps": 2})})


@pytest.mark.parametrize(("split", "name"), [("train", "rows"), ("eval", "held-out rows")])
def test_20_rows_that_were_reordered_are_noticed_at_resume(
    tmp_path: Path, tiny_model: str, split: str, name: str
) -> None:
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(4)]
    paths = {split: tmp_path / f"{split}.jsonl" for split in ("train", "eval")}
    for path in paths.values():
        path.write_text("\n".join(rows) + "\n")
    task = {split: str(path) for split, path in paths.items()} | {"verifier": task_of(tmp_path, "verify")}
    run_inline(make_config(tmp_path, tiny_model, task=task, run={"steps": 1}))
    paths[split].write_text("\n".join(reversed(rows)) + "\n")
    with pytest.raises(ConfigError, match=rf"the {name} of the run in .* were edited or reordered"):
        run_inline(make_config(tmp_path, tiny_model, task=task, run={"steps": 2}), resume=True)


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}])
def test_20_a_model_that_was_trained_further_is_noticed_at_resume(
    tmp_path: Path, tiny_model: str, lora: dict[str, Any]
) -> None:
    """An adapter would go on with another base, and a reference policy would be another one."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    run_inline(
        make_config(tmp_path, str(model), run={"steps": 1}, task={"eval": ""}, model={"path": str(model)} | lora)
    )
    weights = load_file(model / "model.safetensors")
    trained = {name: tensor + 1e-4 for name, tensor in weights.items()}
    save_file(trained, model / "model.safetensors", metadata={"format": "pt"})
    config = make_config(tmp_path, str(model), run={"steps": 2}, task={"eval": ""}, model={"path": str(model)} | lora)
    with pytest.raises(ConfigError, match=rf"the weights in model.path = {model} have changed since the run in"):
        run_inline(config, resume=True)
    with pytest.raises(ConfigError, match=r"the weights in model.path = .* have changed"):
        asyncio.run(replay(Path(config.run.dir), lambda event: None))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    run_inline(config, resume=True)


def test_20_a_row_that_was_changed_in_the_log_is_noticed_at_resume(
    tmp_path: Path, one_step: Path, tiny_model: str
) -> None:
    config = copied(one_step, tmp_path, tiny_model)
    log = tmp_path / "run" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    admitted = next(event for event in events if event["kind"] == "admitted" and event["group"] == 1)
    admitted["prompt"] = (admitted["prompt"] + 1) % 25
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(ConfigError, match=f"group 1 was admitted with row {admitted['prompt']}, and the order of the"):
        run_inline(config, resume=True)


def test_20_a_checkpoint_newer_than_the_log_is_never_loaded(tmp_path: Path, tiny_model: str) -> None:
    config = make_config(tmp_path, tiny_model, task={"eval": ""}, checkpoint={"every": 1}, run={"steps": 8})
    run_inline(config)
    log = Path(config.run.dir) / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if '"kind":"checkpointed"' in line)
    log.write_text("".join(lines[: cut + 1]))
    _, seen = run_inline(config, resume=True)
    check_finished(config, events_of(config))
    assert re.search(r"is of version [78], and the log ends at [1-4]", seen)


def test_29_a_run_that_never_trained_is_replaced_and_others_only_when_told(
    tmp_path: Path, one_step: Path, tiny_model: str
) -> None:
    config = copied(one_step, tmp_path, tiny_model)
    assert not list(one_step.rglob("model-candidate")), "a run without evaluations has no candidate"
    with pytest.raises(ConfigError, match=r"already holds a run of 1 steps; add --resume .* --overwrite"):
        run_inline(config)
    log = tmp_path / "run" / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]))
    run_inline(config)
    assert fold(events_of(config)).num_trained == 2
    view = PlainView(io.StringIO())
    asyncio.run(launch.train(config, False, view, overwrite=True))
    assert fold(events_of(config)).num_trained == 2
