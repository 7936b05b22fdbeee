"""Invariant 14: crash safety, at fifty moments of a run, and whichever worker is killed or falls silent.

Invariant 15: bounded waits: what is silent is found in time, and what is lost too often ends the run with its name.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from system import (
    DEADLINE_S,
    HeadwayProcess,
    check_finished,
    check_record,
    events_of,
    headway,
    make_config,
    run_inline,
    write_config,
)

from headway.config import Config, load
from headway.record.events import Event
from headway.record.log import read
from headway.record.run import fold

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_POINTS = 50
NUM_STEPS = 5

# A server that has everything imported and forks a process for each run: fifty starts would take minutes of imports.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "headway.cli",
        "headway.control.resume",
        "headway.training.trainer",
        "headway.engine.embedded.scheduler",
        "headway.plan",
    ]
)


def run_command(arguments: list[str], output: str) -> None:
    """`headway ARGUMENTS` as the leader of a new process group."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["headway", *arguments]
    from headway.cli import main

    main()


def kill_after(num_events: int, delay_s: float, path: Path, directory: Path) -> list[Event]:
    """Begin a run and kill -9 its process group a little after its k-th event; the events that were written."""
    output = directory.with_name("output.txt")
    process = FORKS.Process(target=run_command, args=(["train", str(path)], str(output)))
    process.start()
    assert process.pid is not None
    started = psutil.Process(process.pid)
    family: set[psutil.Process] = set()
    deadline = time.monotonic() + DEADLINE_S
    while num_lines(directory) < num_events and process.is_alive():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.001)
    time.sleep(delay_s)
    if process.is_alive():
        family |= set(started.children(recursive=True))
        os.killpg(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    _, left = psutil.wait_procs(family, timeout=DEADLINE_S)
    assert not left, f"outlived the run: {[child.cmdline() for child in left]}"
    return read(directory / "events.jsonl")


def num_lines(directory: Path) -> int:
    path = directory / "events.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def config_of(eta: int, directory: Path, model: str) -> tuple[Path, Config]:
    # No looks at the engine but the last: every event is then one that a moment of the run brings about.
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": NUM_STEPS},
        "staleness": {"max_staleness": eta},
        "metrics": {"tensorboard": False, "stats_every_s": 3600.0},
    }
    path = write_config(directory, model, **sections)
    return path, load(path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> tuple[int, str]:
    """How many events a run has, and the weights that every run at η = 0 must come to."""
    _, config = config_of(0, tmp_path_factory.mktemp("uninterrupted"), tiny_model)
    run_inline(config)
    events = events_of(config)
    return len(events), fold(events).digests[NUM_STEPS]


@pytest.mark.parametrize("point", range(NUM_POINTS))
def test_invariant_14_fifty_kill_points_lose_nothing(
    tmp_path: Path, tiny_model: str, uninterrupted: tuple[int, str], point: int
) -> None:
    num_events, expected = uninterrupted
    eta = 2 * (point % 2)
    path, config = config_of(eta, tmp_path, tiny_model)
    after = 1 + point * (num_events - 2) // (NUM_POINTS - 1)
    written = kill_after(after, random.Random(point).uniform(0.0, 0.03), path, Path(config.run.dir))
    state = check_record(config, written)
    assert not state.status or point > 40, "it came to its end before it was killed"
    run_inline(config, resume=True)
    events = events_of(config)
    check_finished(config, events)
    assert events[: len(written)] == written
    if eta == 0:
        assert fold(events).digests[NUM_STEPS] == expected, "killed or not, at η = 0 there is one outcome"


# One worker of a run in processes


def worker(run: HeadwayProcess, name: str) -> psutil.Process:
    return next(
        process for process in run.descendants() if f"headway.runtime.worker {name} " in " ".join(process.cmdline())
    )


def in_training(events: list[Event]) -> bool:
    return any(event.kind == "trained" for event in events)


def local_run(tmp_path: Path, model: str, **sections: dict[str, Any]) -> tuple[Path, Config]:
    task = {"train": f"{tmp_path}/task.py:rows", "verifier": f"{tmp_path}/task.py:slowly"}
    path = write_config(tmp_path, model, task=task, **{"run": {"runtime": "local", "steps": 6}} | sections)
    return path, load(path)


def survived(config: Config, run: HeadwayProcess, names: set[str]) -> list[Event]:
    """The run came to its end, and says whom it lost."""
    assert run.wait() == 0, run.output
    assert not run.descendants()
    assert "Traceback" not in run.output
    events = run.events()
    check_finished(config, events)
    assert {event.worker for event in events if event.kind == "worker_lost"} == names
    assert {event.worker for event in events if event.kind == "worker_restarted"} <= names
    return events


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("name", ["engine", "trainer", "rollout-0", "reward"])
def test_a_worker_that_is_killed_is_replaced_and_the_run_comes_to_its_end(
    tmp_path: Path, tiny_model: str, uninterrupted: tuple[int, str], name: str, eta: int
) -> None:
    path, config = local_run(
        tmp_path, tiny_model, run={"runtime": "local", "steps": NUM_STEPS}, staleness={"max_staleness": eta}
    )
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(in_training, "a training step")
        worker(run, name).kill()
        events = survived(config, run, {name})
    if eta == 0:
        assert fold(events).digests[NUM_STEPS] == uninterrupted[1], "at η = 0 there is one outcome"


@pytest.mark.parametrize("name", ["engine", "trainer", "rollout-0", "reward"])
def test_invariant_15_a_worker_that_falls_silent_is_found_in_time_killed_and_replaced(
    tmp_path: Path, tiny_model: str, name: str
) -> None:
    path, config = local_run(tmp_path, tiny_model, supervise={"health_s": 10.0})
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(in_training, "a training step")
        silent = worker(run, name)
        silent.suspend()
        stopped = time.time()
        events = survived(config, run, {name})
        assert not silent.is_running()
    (lost,) = [event for event in events if event.kind == "worker_lost"]
    assert lost.time - stopped < 10.0 + 2.0
    assert lost.cause.startswith(f"a health check of {name}") and "took longer than" in lost.cause


def test_a_worker_that_is_killed_again_and_again_ends_the_run_with_its_name_and_resume_goes_on(
    tmp_path: Path, tiny_model: str
) -> None:
    path, config = local_run(tmp_path, tiny_model, supervise={"max_failures": 1, "backoff_s": 0.1})
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(in_training, "a training step")
        worker(run, "engine").kill()
        run.wait_until(lambda events: any(event.kind == "worker_restarted" for event in events), "a restart")
        worker(run, "engine").kill()
        assert run.wait() == 1, run.output
        assert not run.descendants()
        assert "error: engine failed more than 1 times" in run.output and "Traceback" not in run.output
    events = run.events()
    assert events[-1].status == "failed" and "worker engine ended" in events[-1].cause
    check_record(config, events)
    run_inline(make_config(tmp_path, tiny_model, **inline_sections(config)), resume=True)
    check_finished(config, run.events())


def inline_sections(config: Config) -> dict[str, dict[str, Any]]:
    values = config.model_dump()
    values["run"]["runtime"] = "inline"
    return values


def test_a_verifier_process_that_is_killed_is_replaced_and_the_run_goes_on(tmp_path: Path, tiny_model: str) -> None:
    path, config = local_run(tmp_path, tiny_model)
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(in_training, "a training step")
        children = worker(run, "reward").children(recursive=True)
        leaf = next(child for child in children if not child.children())
        leaf.kill()
        assert run.wait() == 0, run.output
    events = run.events()
    check_finished(config, events)
    assert not any(event.kind == "dropped" for event in events), "a retry finds another process"


def test_engines_join_and_leave_a_run_by_command(tmp_path: Path, tiny_model: str) -> None:
    path, config = local_run(tmp_path, tiny_model, run={"runtime": "local", "steps": 400})
    directory = Path(config.run.dir)
    with HeadwayProcess("train", path, run=directory) as run:
        run.wait_until(in_training, "a training step")
        assert "asked for 2 engines" in headway("engines", directory, "--count", "2").stdout
        run.wait_until(lambda events: served(events, "engine-1"), "an answer of the second engine")
        assert headway("engines", directory, "--count", "1").returncode == 0
        run.wait_until(lambda events: any(event.kind == "engine_left" for event in events), "a leave")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 1
    events = run.events()
    check_record(config, events)
    assert [event.engine for event in events if event.kind == "engine_joined"] == ["engine-1"]
    assert [event.engine for event in events if event.kind == "engine_left"] == ["engine-1"]
    assert not any(event.kind == "worker_lost" for event in events)
    refused = headway("engines", directory, "--count", "2")
    assert refused.returncode == 1 and "no run is going on" in refused.stderr


def served(events: list[Event], engine: str) -> bool:
    return any(event.kind == "stats" and event.engine == engine and event.generated > 0 for event in events)
