"""The quickstart made short enough to be run four ways, and how far its accuracy spreads over seeds.

    python tests/support/four_ways.py    (from the checkout: a run for each seed, then four_ways.json next to this file)

Model, warm-up and task are those of configs/quickstart.toml. Twenty training steps at η = 0, with a higher learning
rate, are enough to see whether a run learns.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from system import write_toml

from headway.launch import hardware
from headway.record.events import Event
from headway.record.log import read

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")
SEEDS = range(5)
DEADLINE_S = 900.0  # of a run, on a machine that may have much else to do

SHORT: dict[str, dict[str, Any]] = {
    "run": {"steps": 20, "deterministic": True},
    "staleness": {"max_staleness": 0},
    "trainer": {"lr": 3e-4, "threads": 1},
    "evaluate": {"every": 0},
    "metrics": {"tensorboard": False},
}


def write_short(directory: Path) -> Path:
    """The config file; its model is made by `warm_up`."""
    values = tomllib.loads((ROOT / "configs/quickstart.toml").read_text())
    for name, section in SHORT.items():
        values[name] = values.get(name, {}) | section
    values["model"]["path"] = values["sft"]["out"] = str(directory / "model")
    path = directory / "four_ways.toml"
    write_toml(path, values)
    return path


def warm_up(path: Path) -> None:
    command("sft", path, f"--run.dir={path.parent / 'sft'}")


def train(path: Path, run: Path, *overrides: str) -> list[Event]:
    command("train", path, f"--run.dir={run}", *overrides)
    return read(run / "events.jsonl")


def command(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headway.cli", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def accuracy(events: list[Event], label: str) -> float:
    (found,) = [event.accuracy for event in events if event.kind == "evaluated" and event.label == label]
    return float(found)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write_short(Path(directory))
        warm_up(path)
        runs = [train(path, Path(directory) / str(seed), f"--run.seed={seed}") for seed in SEEDS]
    record = {
        "command": "python tests/support/four_ways.py",
        "hardware": hardware(),
        "before": accuracy(runs[0], "before"),
        "after": [accuracy(events, "after") for events in runs],
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(RECORD.read_text())  # noqa: T201


if __name__ == "__main__":
    main()
