"""What a newcomer's first runs are like: odd rows, broken code, models of NaN, interrupts; each says what to do."""

import asyncio
import io
import re
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import Command
from safetensors.torch import load_file, save_file
from system import DEADLINE_S, check_finished, events_of, make_config, run_inline, task_of, write_config

from headway import launch
from headway.errors import RunFailed
from headway.monitor.view import PlainView
from headway.record.events import Event, Trained

ROWS = """
import asyncio
import datetime
import numpy as np

def rows():
    odd = [1, float("nan"), {"a": [{"b": (1, 2)}], 3: "x"}, datetime.datetime(2020, 1, 1), np.array([1, 2]),
           np.int64(3), datetime.date(2020, 1, 1), None, b"bytes", np.float32(2.5)]
    return [{"prompt": f"{n}+1=", "answer": str(n), "odd": value} for n, value in enumerate(odd)]

def verify(task, text):
    return float(len(text) + ("odd" in task))

class Broken:
    async def run(self, episode):
        return {}["tool"]

class Exiting:
    async def run(self, episode):
        raise SystemExit("enough")

class Cancelled:
    async def run(self, episode):
        raise asyncio.CancelledError("by a task of its own")

class Forgetful:
    async def run(self, episode):
        await episode.generate(episode.prompt.tokens)
"""


def odd(tmp_path: Path, name: str) -> str:
    path = tmp_path / "odd.py"
    path.write_text(ROWS)
    return f"{path}:{name}"


def test_rows_of_every_kind_that_can_travel_reach_the_verifier(tmp_path: Path, tiny_model: str) -> None:
    task = {"train": odd(tmp_path, "rows"), "verifier": odd(tmp_path, "verify"), "eval": ""}
    config = make_config(tmp_path, tiny_model, task=task, run={"steps": 4})
    run_inline(config)
    assert not check_finished(config, events_of(config)).failures


@pytest.mark.parametrize(
    ("workflow", "sentence"),
    [
        ("Broken", r"'workflow: KeyError at odd.py:16: 'tool''; check the verifier and the workflow"),
        ("Exiting", r"'workflow: SystemExit at odd.py:20: enough'; check the verifier"),
        ("Cancelled", r"'workflow: CancelledError at odd.py:24: by a task of its own'; check the verifier"),
        ("Forgetful", r"run\(episode\) returned None \(is a `return` missing\?\), not a Trajectory"),
    ],
)
def test_a_workflow_that_fails_is_named_with_file_and_line(
    tmp_path: Path, tiny_model: str, workflow: str, sentence: str
) -> None:
    with pytest.raises(RunFailed, match=sentence):
        run_inline(make_config(tmp_path, tiny_model, rollout={"workflow": odd(tmp_path, workflow)}, task={"eval": ""}))


def test_a_model_that_gives_nan_is_refused_at_once_in_a_sentence_that_says_so(tmp_path: Path, tiny_model: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tensors = load_file(model / "model.safetensors")
    large = {name: torch.full_like(tensor, 3e38) for name, tensor in tensors.items() if "norm" in name}
    save_file(tensors | large, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFailed, match=r"the model of version 0 gives the probe NaN as log-prob in float32: its num"):
        run_inline(make_config(tmp_path, str(model)))


def test_failures_that_count_as_zero_are_a_metric_and_a_warning(tmp_path: Path, tiny_model: str) -> None:
    make_config(tmp_path, tiny_model)
    task = {"verifier": task_of(tmp_path, "sometimes_raises"), "eval": ""}
    config = make_config(tmp_path, tiny_model, task=task, reward={"on_error": "zero", "retries": 0})
    summary, seen = run_inline(config)
    shares = [event.metrics["verifier_failed_share"] for event in events_of(config) if isinstance(event, Trained)]
    assert max(shares) > 0.1 and not summary.failures
    assert "of the rewards of the last" in seen and "are 0 because the verifier failed: repair it, or set" in seen
    assert "verifier failed" in summary.warnings


def test_the_latest_and_the_best_model_are_written_and_the_last_lines_say_where(
    tmp_path: Path, tiny_model: str, command: Command
) -> None:
    path = write_config(tmp_path, tiny_model, evaluate={"every": 1}, checkpoint={"every": 1})
    code, out, error = command("train", path)
    assert code == 0, error
    run = tmp_path / "run"
    told = f"the model is in {run}/model, the best evaluated one in {run}/model-best; curves: {run}/report.png"
    assert out.splitlines()[-2:] == [told, f"look inside, down to every token: headway view {run}"]
    for name in ("model", "model-best"):
        assert (run / name / "model.safetensors").exists() and (run / name / "tokenizer.json").exists()
    made = [file for file in [run, *run.rglob("*")] if stat.S_IMODE(file.stat().st_mode) & 0o077]
    assert not made, "files of a run are their owner's alone"


def test_an_interrupt_leaves_the_model_and_says_where(tmp_path: Path, tiny_model: str) -> None:
    stopping = launch.Stopping()

    class Impatient(PlainView):
        def on_event(self, event: Event) -> None:
            super().on_event(event)
            if isinstance(event, Trained) and event.version == 2:
                stopping.ask()

    config = make_config(tmp_path, tiny_model, run={"steps": 200}, checkpoint={"every": 100}, task={"eval": ""})
    view = Impatient(io.StringIO())
    train = launch.train(config, False, view, stopping=stopping)
    with pytest.raises(RunFailed, match=rf"--resume` goes on from .*; the model is in {config.run.dir}/model"):
        asyncio.run(asyncio.wait_for(train, DEADLINE_S))
    view.close()
    assert (Path(config.run.dir) / "model" / "model.safetensors").exists()


def test_a_disk_that_is_full_from_the_start_is_a_sentence(tmp_path: Path, tiny_model: str) -> None:
    """No file may be longer than a hundred bytes."""
    path = write_config(tmp_path, tiny_model)
    found = subprocess.run(
        [sys.executable, "-m", "headway.cli", "train", path],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert re.search(r"error: cannot write .*run/.*: File too large; make room or repair the disk", found.stderr)
