"""What does the harm: signals to processes of a run, a plan for harm from inside (`inside/`), damage to its files."""

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from chaos.scenario import Scenario

INSIDE = Path(__file__).parent / "inside"
TRIGGER, DONE = "harm-now", "harm-done"
FOUND_S = 60.0
_SLOW_S, _STOPPED_S, _RUNNING_S = 4.0, 0.08, 0.03
_DISK_MB = 24

_FROM_INSIDE = {
    ("engine", "corrupt"): ("engine", "nonsense"),
    ("weights", "corrupt"): ("engine", "flip"),
    ("weights", "cut"): ("trainer", "break"),
    ("verifier", "corrupt"): ("verifier", "nonsense"),
}

_KIND_OF_WORKER = {"rank": "trainer", "verifier": "reward", "driver": "ray", "server": "engine", "keeper": "rollout"}
"""Which worker is the victim, or has it below or above itself, where the word is another."""


class NotDone(Exception):
    """The run was over before the fault could happen."""


def from_inside(scenario: Scenario) -> tuple[str, str] | None:
    """Which worker harms itself, and how, if the fault is of that kind."""
    if scenario.fault in ("partition", "deaf", "cut") and scenario.victim != "weights":
        return worker_name(scenario), scenario.fault
    if (found := _FROM_INSIDE.get((scenario.victim, scenario.fault))) is None:
        return None
    # A verifier is no worker; the task of these runs knows the word.
    return (found[0] if found[0] == "verifier" else worker_name(scenario, found[0])), found[1]


def worker_name(scenario: Scenario, kind: str = "") -> str:
    """The name under which a run has the victim."""
    kind = kind or scenario.victim
    run = scenario.run
    counts = {"engine": run.engines, "server": run.engines, "trainer": run.ranks, "rank": run.ranks}
    kind_name = _KIND_OF_WORKER.get(kind, kind)
    if kind in ("rollout", "keeper"):
        return f"{kind_name}-{scenario.draw % run.rollouts}"
    if counts.get(kind, 1) > 1:
        return f"{kind_name}-{scenario.draw % counts[kind]}"
    return kind_name


# Processes


def processes_in(directory: Path) -> list[psutil.Process]:
    """Whatever runs in the run's directory, on whichever node: every process of a run is started there."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def find(scenario: Scenario, directory: Path) -> psutil.Process | None:
    """The process to be hit."""
    name = worker_name(scenario)
    for process in processes_in(directory):
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if scenario.victim == "controller" and "headway.cli" in command:
                return process
            if f"headway.runtime.worker {name} " in command:
                return _at_or_below(scenario, process)
    return None


def _at_or_below(scenario: Scenario, worker: psutil.Process) -> psutil.Process | None:
    """A worker has a reaper on Ray (the same command line, its child): the worker is meant."""
    parent = worker.parent()
    if parent is not None and parent.cmdline() == worker.cmdline():
        worker = parent
    if scenario.victim == "verifier":
        leaves = [child for child in worker.children(recursive=True) if not child.children()]
        return leaves[0] if leaves else None
    if scenario.victim == "server":
        servers = [child for child in worker.children(recursive=True) if "serve" in child.cmdline()]
        return servers[scenario.draw % len(servers)] if servers else None
    return worker.parent() if scenario.victim == "keeper" else worker


def wait_for(found: Callable[[], psutil.Process | None], alive: Callable[[], bool]) -> psutil.Process:
    deadline = time.monotonic() + FOUND_S
    while time.monotonic() < deadline:
        if (process := found()) is not None:
            return process
        if not alive():
            break
        time.sleep(0.02)
    raise NotDone


def slow_down(process: psutil.Process, seconds: float = _SLOW_S) -> None:
    """It runs for a fraction of the time."""
    with suppress(psutil.NoSuchProcess):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            process.suspend()
            time.sleep(_STOPPED_S)
            process.resume()
            time.sleep(_RUNNING_S)


def stand_still(process: psutil.Process, seconds: float) -> None:
    """And then go on as if nothing had been."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        time.sleep(seconds)
        process.resume()


# Files


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system of a few megabytes; only root can have one."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "chaos", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def can_mount(scratch: Path) -> bool:
    try:
        with small_disk(scratch / "mount"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        with suppress(OSError):
            (scratch / "mount").rmdir()


def fill(directory: Path) -> Path:
    """Not a byte is left on the disk of this directory."""
    ballast = directory / "ballast"
    with suppress(OSError), open(ballast, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return ballast


def tear(run: Path) -> None:
    """What a crash in the middle of two writes leaves: half a line in the log, bytes in a shard that no event names."""
    with open(run / "events.jsonl", "ab") as log:
        log.write(b'{"seq": 999, "time": 1.0, "ki')
    for shard in sorted((run / "record").glob("*"))[-1:]:
        with open(shard, "ab") as file:
            file.write(b"\xff" * 100)


def damage_checkpoint(run: Path, draw: int, torn: bool) -> str:
    """The newest slot: one byte of its largest file is another, or the file ends early; which file, or nothing."""
    slots = [slot for slot in (run / "checkpoint").glob("[ab]") if slot.is_dir()]
    if not slots:
        return ""
    newest = max(slots, key=lambda slot: slot.stat().st_mtime)
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    if torn:
        os.truncate(largest, draw % size)
    else:
        with open(largest, "r+b") as file:
            file.seek(draw % size)
            byte = file.read(1)
            file.seek(draw % size)
            file.write(bytes([byte[0] ^ 0x10]))
    return str(largest)


# All together


def harm(scenario: Scenario, directory: Path, run: Path, alive: Callable[[], bool], health_s: float) -> str:
    """Do it; returns what was done. What lasts for a while goes on in a thread."""
    if from_inside(scenario) is not None:
        return _trigger(scenario, directory, alive)
    if scenario.victim == "disk":
        fill(run.parent)
        return "filled the disk"
    victim = scenario.victim
    if victim in ("checkpoint", "record"):
        # With whom it is read again: the trainer, or the controller and a resume.
        by_trainer = victim == "checkpoint" and scenario.draw % 2
        damaged = damage_checkpoint(run, scenario.draw, scenario.fault == "torn") if victim == "checkpoint" else ""
        process = wait_for(
            lambda: _named(directory, worker_name(scenario, "trainer") if by_trainer else "controller"), alive
        )
        process.kill()
        if victim == "record":
            while alive():  # its parent reaps it, and nobody else
                time.sleep(0.01)
            tear(run)
        return f"killed {'trainer' if by_trainer else 'controller'}, damaged {damaged or 'what was half-written'}"
    process = wait_for(lambda: find(scenario, directory), alive)
    return _signal(scenario, process, health_s)


def _named(directory: Path, name: str) -> psutil.Process | None:
    pattern = "headway.cli" if name == "controller" else f"headway.runtime.worker {name} "
    for process in processes_in(directory):
        with suppress(psutil.Error):
            if pattern in " ".join(process.cmdline()):
                return process
    return None


def _signal(scenario: Scenario, process: psutil.Process, health_s: float) -> str:
    what = f"{worker_name(scenario)} ({process.pid})"
    lasting: tuple[Callable[..., None], tuple[object, ...]] | None = None
    if scenario.fault == "kill":
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    elif scenario.fault == "hang" and scenario.victim != "controller":
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    elif scenario.fault == "hang":
        lasting = stand_still, (process, random.Random(scenario.draw).uniform(0.5, 1.5) * health_s)
    elif scenario.fault == "slow":
        lasting = slow_down, (process,)
    elif scenario.fault == "full":
        lasting = _no_room, (process,)
    if lasting is not None:
        threading.Thread(target=lasting[0], args=lasting[1], daemon=True).start()
    return f"{scenario.fault} {what}"


def _no_room(process: psutil.Process, seconds: float = _SLOW_S) -> None:
    """For a while, no file of this process may grow: every write of it fails."""
    with suppress(psutil.NoSuchProcess):
        process.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
        time.sleep(seconds)
        process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


def _trigger(scenario: Scenario, directory: Path, alive: Callable[[], bool]) -> str:
    """Have a worker harm itself; returns when it has begun to."""
    found = from_inside(scenario)
    assert found is not None
    (directory / DONE).unlink(missing_ok=True)
    plan = {"worker": found[0], "harm": found[1], "draw": scenario.draw}
    (directory / "plan").write_text(json.dumps(plan))
    (directory / "plan").rename(directory / TRIGGER)
    deadline = time.monotonic() + FOUND_S
    while not (directory / DONE).exists():
        if not alive() or time.monotonic() > deadline:
            (directory / TRIGGER).unlink(missing_ok=True)
            raise NotDone
        time.sleep(0.01)
    return f"{found[1]} inside {found[0]}"


def repair(scenario: Scenario, run: Path) -> None:
    """What a person would do: a disk that stays full ends a run sooner or later."""
    if scenario.victim == "disk":
        (run.parent / "ballast").unlink(missing_ok=True)


def names_cause(scenario: Scenario, cause: str) -> bool:
    """Whether a sentence says who or what was the trouble."""
    words = {
        "weights": "version|weights|engine",
        "disk": "cannot write|could not be written|No space",
        "trainer": "trainer|checkpoint|could not be written",
        "rank": "trainer",
        "server": "engine|server",
        "driver": "ray|Ray|worker",
        "keeper": "rollout",
        "verifier": "reward|verifier",
    }.get(scenario.victim, scenario.victim)
    return re.search(words, cause) is not None


def lost_worker(scenario: Scenario) -> str:
    """Whose loss the controller must notice and tell; nobody's where the fault may pass unnoticed."""
    if scenario.victim in ("engine", "rollout", "reward", "trainer", "rank", "server", "keeper"):
        noticed = ("kill", "hang", "partition", "deaf", "corrupt")
        name = worker_name(scenario)
        name = "trainer" if name.startswith("trainer") else name
        return name if scenario.fault in noticed else ""
    return ""
