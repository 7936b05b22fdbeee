"""Benchmarks run: their stand-ins hold the interfaces they stand in for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_controller_bench_measures_a_small_run(tmp_path: Path) -> None:
    out = tmp_path / "controller.json"
    # The waits of simulated engines are the time that the bench takes.
    sizes = [
        "--concurrent",
        "10",
        "--engines",
        "--group-size",
        "2",
        "--repetitions",
        "1",
        "--seconds-per-token",
        "0.001",
    ]
    command = [
        sys.executable,
        "-m",
        "headway.cli",
        "bench",
        "controller",
        *sizes,
        "--seconds-per-token",
        "0.001",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert out.exists() and json.loads(out.read_text()), done.stdout + done.stderr
