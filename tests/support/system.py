"""The whole system for tests: a small task and config on disk, runs in this process or as `headway` in its own.

What every run must satisfy, whatever failed in it, is `check_record`: it reads the event log alone, as resume does.
"""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import psutil

from headway import launch
from headway.config import Config, validate
from headway.monitor.report import Summary
from headway.monitor.view import PlainView
from headway.record.events import Event
from headway.record.log import read
from headway.record.run import Run, fold
from headway.record.tokens import TokenAccount
from headway.tasks.prompts import PromptStream

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # in the background or under nohup, and so would be those of a run
        signal.signal(number, usual)

DEADLINE_S = 240.0  # of anything awaited, on a machine that may have much else to do

TASK = '''
import json, os, time
from pathlib import Path

from headway.tasks.verifiers import verifier

def rows():
    return [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(5) for b in range(5)]

def held_out():
    return [{"prompt": f"{a}+{a}=", "answer": str(2 * a % 10)} for a in range(6)]

def one_row():
    return rows()[:1]

def two_rows():
    return rows()[:2]

def no_rows():
    return []

def rows_without_answer():
    return [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2="}]

def full_rows():
    """Prompts that leave a context of 32 tokens room for one more."""
    return [{"prompt": f"{digit}" * 31, "answer": "1"} for digit in range(9)]

def long_rows():
    return [{"prompt": "1" * 32, "answer": "2"}]

@verifier(needs=("answer",))
def verify(task, text):
    return float(task["answer"] in text) + 0.01 * min(len(text), 9)

def always_raises(task, text):
    raise ConnectionError("the judge is away")

def sometimes_raises(task, text):
    if len(text) % 3 == 0:
        raise ValueError("a multiple of three")
    return float(len(text) % 2)

def fails_for_some_prompts(task, text):
    if task["prompt"] in ("0+1=", "2+3=", "4+4="):
        raise ValueError("this prompt has no verdict")
    return float(len(text) % 2)

def hangs_for_one_prompt(task, text):
    if task["prompt"] == "1+3=":
        time.sleep(3600)
    return float(len(text) % 2)

def forks(task, text):
    if os.fork() == 0:
        time.sleep(3600)
    return float(len(text) % 2)

def sometimes_nan(task, text):
    return float("nan") if len(text) % 3 == 0 else float(len(text) % 2)

def sometimes_text(task, text):
    return "good" if len(text) % 3 == 0 else float(len(text) % 2)

def slowly(task, text):
    time.sleep(0.02)
    return verify(task, text)
'''


def make_values(directory: Path, model: str, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small run of everything, in one process, with `sections` on top of it."""
    task = directory / "task.py"
    if not task.exists():
        task.write_text(TASK)
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory / "run"), "steps": 4, "runtime": "inline", "deterministic": True, "seed": 3},
        "model": {"path": model},
        "task": {"train": f"{task}:rows", "eval": f"{task}:held_out", "verifier": f"{task}:verify"},
        "sampling": {"max_tokens": 12},
        "rollout": {"group_size": 3},
        "engine": {"max_num_seqs": 12, "max_context": 32, "kv_tokens": 4096, "prefill_chunk": 16},
        "staleness": {"max_staleness": 2},
        "trainer": {"batch_groups": 3, "lr": 3e-3, "token_budget": 128, "threads": 1},
        "checkpoint": {"every": 2},
        "metrics": {"tensorboard": False, "stats_every_s": 0.05},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return values


def make_config(directory: Path, model: str, /, **sections: dict[str, Any]) -> Config:
    return validate(make_values(directory, model, **sections))


def write_config(directory: Path, model: str, /, **sections: dict[str, Any]) -> Path:
    """The same as a TOML file, for the command line."""
    path = directory / "config.toml"
    write_toml(path, make_values(directory, model, **sections))
    return path


def write_toml(path: Path, values: dict[str, dict[str, Any]]) -> None:
    lines: list[str] = []
    for name, section in values.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section.items())]
    path.write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def task_of(directory: Path, function: str) -> str:
    return f"{directory / 'task.py'}:{function}"


# Runs in this process


def run_inline(config: Config, resume: bool = False) -> tuple[Summary, str]:
    """`headway train` without its process: the summary, and what a person would have seen."""
    seen = io.StringIO()
    view = PlainView(seen)
    try:
        summary = asyncio.run(asyncio.wait_for(launch.train(config, resume, view), DEADLINE_S))
    finally:
        view.close()
    return summary, seen.getvalue()


def events_of(config: Config) -> list[Event]:
    return read(Path(config.run.dir) / "events.jsonl")


# Runs in processes of their own


class HeadwayProcess:
    """`headway ARGUMENTS` in a process group of its own, watched through its event log."""

    def __init__(
        self, *arguments: str | Path, run: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.events_path = run / "events.jsonl"
        self._output = open(run.parent / f"{run.name}.output", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli", *map(str, arguments)],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(env or {})},
        )
        self._family: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._output.close()

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def events(self) -> list[Event]:
        return read(self.events_path) if self.events_path.exists() else []

    def descendants(self) -> set[psutil.Process]:
        """Every process it started, at any depth, that still lives."""
        with suppress(psutil.NoSuchProcess):
            self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return {process for process in self._family if _lives(process)}

    def wait_until(self, moment: Callable[[list[Event]], bool], what: str) -> list[Event]:
        """Watch the log until `moment` is true of it; the events then."""
        deadline = time.monotonic() + DEADLINE_S
        size = -1
        while time.monotonic() < deadline:
            found = self.events_path.stat().st_size if self.events_path.exists() else -1
            if found != size and moment(events := self.events()):
                return events
            size = found
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output}"
            time.sleep(0.002)
        raise AssertionError(f"no {what} within {DEADLINE_S:g} s:\n{self.output}")

    def kill_at(self, moment: Callable[[list[Event]], bool], what: str, everything: bool = True) -> list[Event]:
        """Kill -9 the run at a moment of its log; the events that were written.

        An observer is late: so the controller, which alone writes the log, is stopped first, and goes on
        where the moment has passed meanwhile.
        """
        while True:
            self.wait_until(moment, what)
            self.descendants()
            os.kill(self.process.pid, signal.SIGSTOP)
            if moment(self.events()):
                self.kill(everything)
                return self.events()
            os.kill(self.process.pid, signal.SIGCONT)

    def kill(self, everything: bool = True) -> None:
        """Kill -9 the process group, and with `everything` all that it started; either way nothing may be left."""
        started = self.descendants()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in started if everything else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(started, timeout=DEADLINE_S)
        assert not left, f"outlived their controller: {[process.cmdline() for process in left]}"

    def wait(self) -> int:
        """Its exit code, when it has ended by itself."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            self.descendants()
            assert time.monotonic() < deadline, f"did not end within {DEADLINE_S:g} s:\n{self.output}"
            time.sleep(0.05)
        return self.process.returncode


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def headway(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "headway.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


# What holds of every run


def check_record(config: Config, events: list[Event]) -> Run:
    """Invariants 1, 2 and 14 as the log of any run shows them, however often it was killed and resumed."""
    state = fold(events)  # raises where a group leaves twice, is trained untaken, or a version goes back
    check_admissions(config, events)
    check_prompts(config, events)
    check_versions(config, events)
    check_fates(events)
    return state


def check_finished(config: Config, events: list[Event]) -> Run:
    """A run that came to its end: also, everything admitted has left."""
    state = check_record(config, events)
    assert state.status == "finished", state.cause
    assert state.num_trained == config.run.steps
    trained = [group for _, groups in state.batches for group in groups]
    assert sorted([*trained, *state.dropped]) == list(range(len(state.groups)))
    assert len(trained) == config.run.steps * config.trainer.batch_groups
    return state


def check_admissions(config: Config, events: list[Event]) -> None:
    """Eq. 3 at every admission, by the version that every engine which served had then confirmed."""
    eta, batch = config.staleness.max_staleness, config.trainer.batch_groups
    num_admitted, dropped, confirmed = 0, set[int](), dict[str, int]()
    admitted, too_old, newest = dict[int, int](), set[int](), 0
    for event in events:
        if event.kind == "resumed":
            confirmed = {}
        elif event.kind in ("worker_lost", "engine_left"):
            confirmed.pop(getattr(event, "worker", getattr(event, "engine", None)), None)
        elif event.kind == "swapped":
            if event.engine in confirmed or event.version == newest:  # it begins to serve at the newest version only
                confirmed[event.engine] = event.version
        elif event.kind == "trained":
            newest = event.version
        elif event.kind == "eta_changed":
            assert event.before == eta
            eta = event.after
        elif event.kind in ("dropped", "skipped"):
            dropped |= set(event.groups)
        elif event.kind == "admitted":
            assert event.eta == eta
            assert 0 <= event.version <= min(confirmed.values())
            assert num_admitted - len(dropped) < (event.version + eta + 1) * batch
            num_admitted += 1
            admitted[event.group] = event.version
        elif event.kind == "finished" and event.oldest is not None and event.oldest < admitted[event.group]:
            too_old.add(event.group)
    assert too_old <= dropped, "a group met weights older than those it was admitted at"


def check_prompts(config: Config, events: list[Event]) -> None:
    """The stream of prompts is used in order, each place of it once."""
    stream = PromptStream(launch.prepare(config).prompts, config.run.seed)
    admitted = [event for event in events if event.kind == "admitted"]
    assert [event.group for event in admitted] == list(range(len(admitted)))
    streamed = [event.prompt for event in admitted if event.repeats is None]
    assert streamed == [stream[place].index for place in range(len(streamed))]
    rows = {event.group: event.prompt for event in admitted}
    requeued = [group for event in events if event.kind == "requeued" for group in event.groups]
    repeated = [event.repeats for event in admitted if event.repeats is not None]
    assert len(set(repeated)) == len(repeated) and set(repeated) <= set(requeued)
    assert all(event.prompt == rows[event.repeats] for event in admitted if event.repeats is not None)


def check_versions(config: Config, events: list[Event]) -> None:
    """Versions never go back, each is made once and swapped in, and no batch is older than the bound."""
    made = [event.version for event in events if event.kind == "trained"]
    assert made == list(range(1, len(made) + 1))
    for engine in {event.engine for event in events if event.kind == "swapped"}:
        own = [event for event in events if engine in (getattr(event, "engine", ""), getattr(event, "worker", ""))]
        # From one swap to the next one version at a time, unless it was away in between.
        changes = ("swapped", "worker_lost", "engine_joined", "engine_left")
        pairs = pairwise(event for event in own if event.kind in changes)
        swaps = [(one.version, other.version) for one, other in pairs if one.kind == other.kind == "swapped"]
        assert all(before <= after <= before + 1 for before, after in swaps), swaps
    worst = next(event.worst_staleness for event in events if event.kind == "run_started")
    if worst is not None:
        assert all(event.staleness_max <= worst for event in events if event.kind == "trained")


def check_fates(events: list[Event]) -> TokenAccount:
    """Every generated token has one fate: generated = trained + waiting + in flight + dropped + lost."""
    run = fold(events)
    run.check_tokens()
    fates = run.tokens
    parts = fates.trained + fates.waiting + fates.in_flight + fates.dropped.total() + fates.lost
    assert fates.generated == parts, fates.counts()
    assert fates.trained == sum(event.tokens for event in events if event.kind == "trained")
    return fates
