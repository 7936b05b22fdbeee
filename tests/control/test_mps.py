"""The service that lets processes share a GPU: when it is started, what workers see of it, and that it ends."""

import os
from pathlib import Path

import psutil
import pytest

from headway.config import Config, validate
from headway.control.mps import CONTROL, shares_gpu, side_by_side

SERVICE = """#!/bin/sh
# Stands in for the control program: -f serves until it is asked to quit, by its other self, through a file.
if [ "$1" = -f ]; then
    {fail}
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do sleep 0.05; done
    exit 0
fi
read word rest
[ "$word" = quit ] && touch "$CUDA_MPS_PIPE_DIRECTORY/quit"
"""


def colocated(engine: str, trainer: str, **run: str) -> Config:
    return validate(
        {
            "model": {"path": "model"},
            "task": {"train": "rows.jsonl", "verifier": "a:b"},
            "engine": {"device": engine, "count": len(engine.split(","))},
            "trainer": {"device": trainer},
            "run": run,
        }
    )


@pytest.mark.parametrize(
    ("engine", "trainer", "expected"),
    [
        ("cpu", "cpu", False),
        ("cuda", "cpu", False),
        ("cuda", "cuda:0", True),
        ("cuda:1", "cuda:0", False),
        ("cuda:1,cuda:1", "cpu", True),
        ("cuda:0,cuda:1", "cuda:1", True),
    ],
)
def test_a_gpu_is_shared_where_two_processes_name_it(engine: str, trainer: str, expected: bool) -> None:
    assert shares_gpu(colocated(engine, trainer)) is expected
    assert not shares_gpu(colocated(engine, trainer, runtime="inline"))


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, fail: str = "") -> None:
    program = directory / CONTROL
    program.write_text(SERVICE.format(fail=fail))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)


def children() -> list[str]:
    return [" ".join(child.cmdline()) for child in psutil.Process().children() if CONTROL in " ".join(child.cmdline())]


def test_the_service_runs_while_it_is_needed_in_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    with side_by_side(colocated("cuda", "cuda")):
        pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert (pipe / "control").exists() and pipe.parent.stat().st_mode & 0o077 == 0
        assert len(children()) == 1
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not pipe.exists() and not children()


def test_a_service_that_does_not_start_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, fail="exit 1")
    with side_by_side(colocated("cuda", "cuda")):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "take turns" in caplog.text


def test_a_service_that_is_there_already_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, fail="exit 1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "somewhere")
    with side_by_side(colocated("cuda", "cuda")):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "somewhere" and not children()
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "somewhere"


def test_nothing_is_started_where_nothing_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, fail="exit 1")
    with side_by_side(colocated("cuda", "cpu")):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
