"""What does the harm: signals to processes of a run, a plan for harm from inside (`inside/`), damage to its files."""

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from chaos.scenario import NUM_STEPS, Scenario
from headway.control import resize
from headway.record.events import Event
from headway.record.log import EVENTS_NAME, read

INSIDE = Path(__file__).parent / "inside"
TRIGGER, DONE, POISON, FATAL, REACHED = "harm-now", "harm-done", "poison", "fatal", "reached"
OUTAGE, EVALUATING = "outage", "evaluating"
MARK = "HEADWAY_CHAOS"
"""An environment variable that every process of a run inherits: the directory of the run."""
FOUND_S = 180.0
_SLOW_S, _STOPPED_S, _RUNNING_S = 4.0, 0.08, 0.03
_DISK_MB = 24

_FROM_INSIDE = {
    ("engine", "corrupt"): ("engine", "nonsense"),
    ("weights", "corrupt"): ("engine", "flip"),
    ("weights", "cut"): ("trainer", "break"),
    ("verifier", "corrupt"): ("verifier", "nonsense"),
    ("trainer", "memory"): ("trainer", "memory"),
}

SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "hangup": signal.SIGHUP}
"""What ends a run in order."""

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
    """Whatever runs in the run's directory, on whichever node, or was started by the run, wherever it went."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and (
                process.cwd() == str(directory) or process.environ().get(MARK) == str(directory)
            ):
                found.append(process)
    return found


def unused(segments: list[str]) -> list[str]:
    """The shared-memory segments that no process has mapped or open: nobody will remove them."""
    if not segments:
        return []
    seen = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            seen |= {path for path in segments if path in Path(f"/proc/{process.pid}/maps").read_text()}
            seen |= {Path(file.path).name for file in process.open_files() if file.path.startswith("/dev/shm/")}
    return [f"/dev/shm/{path}" for path in segments if path not in seen and Path("/dev/shm", path).exists()]


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
    if (by := from_inside(scenario)) is not None:
        fit = newest_fit(directory, run)
        done = _trigger(*by, scenario, directory, alive)
        return _kill_after_memory(scenario, directory, run, alive, fit) if scenario.fault == "memory" else done
    if scenario.fault in _AT_LENGTH:
        return _AT_LENGTH[scenario.fault](scenario, directory, run, alive)
    if scenario.moment:
        _await_moment(scenario, directory, run, alive, health_s)
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
    if scenario.way == "kill":
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    elif scenario.fault in SIGNALS:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(SIGNALS[scenario.fault])
            if scenario.draw % 3 == 0:  # an impatient person
                time.sleep(random.Random(scenario.draw).uniform(0.0, 1.0))
                process.send_signal(SIGNALS[scenario.fault])
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


def _trigger(worker: str, what: str, scenario: Scenario, directory: Path, alive: Callable[[], bool]) -> str:
    """Have a worker harm itself; returns when it has begun to."""
    (directory / DONE).unlink(missing_ok=True)
    plan = {"worker": worker, "harm": what, "draw": scenario.draw, "number": scenario.number}
    (directory / "plan").write_text(json.dumps(plan))
    (directory / "plan").rename(directory / TRIGGER)
    try:
        _await((directory / DONE).exists, alive)
    except NotDone:
        (directory / TRIGGER).unlink(missing_ok=True)
        raise
    return f"{what} inside {worker}"


def _await(happened: Callable[[], object], alive: Callable[[], bool], seconds: float = FOUND_S) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if not alive() or time.monotonic() > deadline:
            raise NotDone
        time.sleep(0.01)


# At a moment


def _await_moment(scenario: Scenario, directory: Path, run: Path, alive: Callable[[], bool], health_s: float) -> None:
    rng = random.Random(scenario.draw)
    if scenario.moment in ("starting", "resuming"):
        wait_for(lambda: find(scenario, directory), alive)
        time.sleep(rng.choice((0.0, rng.uniform(0.0, 2 * health_s))))
    elif scenario.moment == "saving":
        # Its file is there and its description is not, or the older slot is gone and the new one has no name.
        place = rng.choice(("controller", worker_name(scenario, "trainer")))
        _trigger(place, "linger", scenario, directory, alive)
    elif scenario.moment == "evaluating":
        (directory / EVALUATING).unlink(missing_ok=True)
        _await((directory / EVALUATING).exists, alive)
    elif scenario.moment == "ending" and scenario.is_last:
        _await(lambda: any(event.kind == "trained" and event.version == NUM_STEPS for event in _log(run)), alive)
    elif scenario.moment == "ending":
        wait_for(lambda: _named(directory, "controller"), alive).terminate()
        time.sleep(rng.uniform(0.0, 1.0))


def _log(run: Path) -> list[Event]:
    return read(run / EVENTS_NAME) if (run / EVENTS_NAME).exists() else []


# In several acts


def newest_fit(directory: Path, run: Path) -> float:
    """Into how many tokens the micro-batches of the newest training step fit; before the first, the config's."""
    steps = [event for event in _log(run) if event.kind == "trained"]
    configured = tomllib.loads((directory / "config.toml").read_text())["trainer"]["token_budget"]
    return float(steps[-1].metrics["token_budget"] if steps else configured)


def _kill_after_memory(scenario: Scenario, directory: Path, run: Path, alive: Callable[[], bool], fit: float) -> str:
    """Once training goes on in smaller micro-batches, the process that knows their size is killed."""
    _await(lambda: newest_fit(directory, run) < fit, alive)
    name = "controller" if scenario.draw % 2 else worker_name(scenario, "trainer")
    wait_for(lambda: _named(directory, name), alive).kill()
    return f"ran out of memory, killed {name}"


def _join(scenario: Scenario, directory: Path, run: Path, alive: Callable[[], bool]) -> str:
    """One engine more is asked for; when it starts, or as it begins to serve, an engine is killed."""
    kinds = [event.kind for event in _log(run)]
    this_life = kinds[len(kinds) - kinds[::-1].index("resume_started") :] if "resume_started" in kinds else kinds
    count = scenario.run.engines + this_life.count("engine_joined") - this_life.count("engine_left")
    resize.ask(run, EVENTS_NAME, count + 1)
    joiner = f"engine-{count}"
    if scenario.draw % 3:
        num_joined = kinds.count("engine_joined")
        _await(lambda: sum(event.kind == "engine_joined" for event in _log(run)) > num_joined, alive)
    process = wait_for(lambda: _named(directory, joiner), alive)
    if scenario.draw % 3 != 2:
        process = wait_for(lambda: find(scenario, directory), alive)
    time.sleep(random.Random(scenario.draw).choice((0.0, 0.05, 0.5)))
    with suppress(psutil.NoSuchProcess):
        process.kill()
    return f"{joiner} joined, killed {joiner if scenario.draw % 3 == 2 else worker_name(scenario)}"


def _outage(scenario: Scenario, directory: Path, run: Path, alive: Callable[[], bool]) -> str:
    """No verdict succeeds until the run has said that it admits the failed prompts again, and a little longer."""
    num_before = sum(event.kind == "requeued" for event in _log(run))
    (directory / OUTAGE).touch()
    try:
        with suppress(NotDone):  # a run without a single verdict yet may end instead
            _await(lambda: sum(event.kind == "requeued" for event in _log(run)) > num_before, alive)
            time.sleep(random.Random(scenario.draw).uniform(0.0, 4.0))
    finally:
        (directory / OUTAGE).unlink()
    return "every verdict failed for a while"


def _harm_group(scenario: Scenario, directory: Path, run: Path, alive: Callable[[], bool]) -> str:
    """A group that is still to come, on whichever engine and rollout worker."""
    (directory / REACHED).unlink(missing_ok=True)
    newest = max((event.group for event in _log(run) if event.kind == "admitted"), default=-1)
    plan = {"group": newest + 4 + scenario.draw % 5, "trajectory": scenario.draw % 3}
    (directory / "plan").write_text(json.dumps(plan))
    (directory / "plan").rename(directory / scenario.fault)
    _await((directory / REACHED).exists, alive)
    _await(lambda: _has_left(plan["group"], _log(run)), alive)
    if scenario.fault == FATAL:
        return f"group {plan['group']} ended whatever rollout worker ran it"
    return f"no log-prob of trajectory {plan['trajectory']} of group {plan['group']} was a number"


def _has_left(group: int, events: list[Event]) -> bool:
    return any(
        (event.kind == "finished" and event.group == group) or (event.kind == "dropped" and group in event.groups)
        for event in events
    )


_AT_LENGTH = {"join": _join, "outage": _outage, POISON: _harm_group, FATAL: _harm_group}


def repair(scenario: Scenario, run: Path) -> None:
    """What a person would do: a disk that stays full ends a run sooner or later."""
    if scenario.victim == "disk":
        (run.parent / "ballast").unlink(missing_ok=True)


def names_cause(scenario: Scenario, cause: str) -> bool:
    """Whether a sentence says who or what was the trouble."""
    is_stopped = scenario.fault in SIGNALS or scenario.moment == "ending"
    if is_stopped and "stopped after" in cause:
        return True
    words = {
        "weights": "version|weights|engine",
        "disk": "cannot write|could not be written|No space",
        "trainer": "trainer|checkpoint|could not be written",
        "rank": "trainer",
        "server": "engine|server",
        "driver": "ray|Ray|worker",
        "keeper": "rollout",
        "reward": "reward|verifier",
        "verifier": "reward|verifier",
        "workflow": "rollout|workflow",
    }.get(scenario.victim, scenario.victim)
    return re.search(words, cause) is not None


def lost_worker(scenario: Scenario) -> str:
    """Whose loss the controller must notice and tell; nobody's where the fault may pass unnoticed."""
    if scenario.victim in ("engine", "rollout", "reward", "trainer", "rank", "server", "keeper"):
        noticed = ("kill", "hang", "partition", "deaf", "corrupt")
        name = worker_name(scenario)
        name = "trainer" if name.startswith("trainer") else name
        return name if scenario.way in noticed and scenario.moment != "ending" else ""
    return ""
