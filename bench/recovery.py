"""From kill -9 to the next new training step: a real run loses its trainer, an engine, or everything, again and again.

The run is `headway train CONFIG` in a process of its own; knobs (`--run.steps=40`) go to it. At training steps drawn
from the seed, and a random part of a step later, the trainer's ranks, one engine, or the controller with all its
workers get SIGKILL. A run that ended is continued with `--resume`. The clock runs from the kill to the first `trained`
event of a version the log did not have. Where a restored trainer retrained recorded steps to other weights, the
largest relative difference is reported; bit for bit equal ones are "equal". The run directory must not hold a run.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import RESULTS_DIR, Message, Record, versions

from headway.errors import DeadlineExceeded, HeadwayError

if TYPE_CHECKING:
    import psutil
    from rich.console import Console

PACKAGES = ("headway-rl", "torch", "triton", "transformers")
VICTIMS = ("run", "trainer", "engine")
_POLL_S = 0.05


@dataclass
class Recovery:
    """One kill, and what came after it."""

    victim: str
    step: int  # the newest in the log when it was killed
    seconds: float  # to the next new training step
    resumed: bool  # by `--resume`; else by itself
    checkpoint: int | None  # version the trainer came back from; None: it was not killed
    num_retrained: int
    num_differing: int  # retrained steps with other weights than recorded
    relative_norm: float | None  # the largest difference of their weights
    max_abs: float | None


class Log:
    """The event log of a run, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.events: list[Message] = []

    def read(self) -> list[Message]:
        """All events so far; half a line is left for the next time."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self.events.append(json.loads(line))
        return self.events

    @property
    def version(self) -> int:
        """The newest that was trained."""
        return max((event["version"] for event in self.read() if event["kind"] == "trained"), default=0)


class Run:
    """`headway train`, started again with `--resume` whenever it has ended."""

    def __init__(self, options: argparse.Namespace, directory: Path, num_steps: int) -> None:
        self._options, self.num_steps = options, num_steps
        self.log = Log(directory / "events.jsonl")
        self._output = directory.with_name(f"{directory.name}.recovery.log")
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, resume: bool) -> None:
        command = [sys.executable, "-m", "headway.cli", "train", str(self._options.config), *self._options.overrides]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *(["--resume"] if resume else [])], stdout=output, stderr=output, start_new_session=True
            )

    @property
    def code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Until it is true, or the process has ended."""
        deadline = time.monotonic() + self._options.deadline_s
        while not until() and self.code is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"no {what} within --deadline-s {self._options.deadline_s:g}; see {self._output}"
                )
            time.sleep(_POLL_S)

    def kill(self, victim: str, choose: random.Random) -> None:
        import psutil

        assert self._process is not None
        workers = psutil.Process(self._process.pid).children(recursive=True)
        if victim == "run":
            self._process.kill()
            chosen = workers
        else:
            named = [worker for worker in workers if _name(worker).split("-")[0] == victim]
            if not named:
                raise HeadwayError(f"the run has no {victim} to kill; see {self._output}")
            chosen = named if victim == "trainer" else [choose.choice(sorted(named, key=_name))]
        for worker in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended with its controller
                worker.kill()
        if victim == "run":
            self._process.wait()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()


def _name(process: "psutil.Process") -> str:
    """Of a worker; empty for any other process."""
    import psutil

    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    place = words.index("headway.runtime.worker") if "headway.runtime.worker" in words else len(words)
    return words[place + 1] if place + 1 < len(words) else ""


def play(run: Run, victim: str, choose: random.Random) -> Recovery:
    """Kill, bring back, and wait for the next new step."""
    num_before = len(run.log.read())
    killed = time.time()
    run.kill(victim, choose)
    resumed = victim == "run"
    if resumed:
        run.start(resume=True)
    step = run.log.version
    while run.log.version <= step:
        run.wait(lambda: run.log.version > step, f"training step {step + 1} after the {victim} was killed")
        if run.code is not None and run.log.version <= step:
            if resumed and victim != "run":
                raise HeadwayError(f"the run ended twice after its {victim} was killed at step {step}")
            if victim == "run":
                raise HeadwayError(f"the run could not be resumed from step {step}; see its output")
            resumed = True
            run.start(resume=True)
    return _judge(run.log.read()[num_before:], victim, step, killed, resumed)


def _judge(events: list[Message], victim: str, step: int, killed: float, resumed: bool) -> Recovery:
    following = next(event for event in events if event["kind"] == "trained" and event["version"] == step + 1)
    events = events[: events.index(following)]
    restores = [
        int(event["name"].split()[1])
        for event in events
        if event["kind"] == "phase" and event["name"].startswith("retraining") and event["state"] == "finished"
    ]
    differing = [event for event in events if event["kind"] == "retrained"]
    found = {
        name: max((event[name] for event in differing if event[name] is not None), default=None)
        for name in ("relative_norm", "max_abs")
    }
    return Recovery(
        victim=victim,
        step=step,
        seconds=following["time"] - killed,
        resumed=resumed,
        checkpoint=step - restores[-1] if restores else None,
        num_retrained=restores[-1] if restores else 0,
        num_differing=len(differing),
        relative_norm=found["relative_norm"],
        max_abs=found["max_abs"],
    )


def scenario(options: argparse.Namespace, num_steps: int) -> list[tuple[int, str]]:
    """At which step who is killed: every kind as often as any other, or once more."""
    draw = random.Random(options.seed)
    steps = sorted(draw.sample(range(2, num_steps - 1), options.kills))
    victims = list(itertools.islice(itertools.cycle(options.victims), options.kills))
    draw.shuffle(victims)
    return list(zip(steps, victims, strict=True))


def measure(options: argparse.Namespace, run: Run, console: "Console") -> tuple[list[Recovery], Message]:
    choose, found = random.Random(options.seed), list[Recovery]()
    started = time.time()
    run.start(resume=False)
    for step, victim in scenario(options, run.num_steps):
        run.wait(lambda step=step: run.log.version >= step, f"training step {step}")  # type: ignore[misc]
        if run.code is not None:
            raise HeadwayError(f"the run ended at step {run.log.version}, before step {step}; see its output")
        steps_s = [event["seconds"] for event in run.log.events if event["kind"] == "trained"]
        time.sleep(choose.random() * statistics.median(steps_s))
        found.append(play(run, victim, choose))
        console.print(f"{victim} killed at step {found[-1].step}: {found[-1].seconds:.1f} s", highlight=False)
    run.wait(lambda: False, "end of the run")
    events = run.log.read()
    trained = [event for event in events if event["kind"] == "trained"]
    return found, {
        "first_step_s": trained[0]["time"] - started,
        "median_step_s": statistics.median(event["seconds"] for event in trained),
        "last_step": run.log.version,
        "steps": run.num_steps,
        "finished": run.code == 0 and events[-1]["kind"] == "ended" and events[-1]["status"] == "finished",
    }


def show(found: list[Recovery], outcome: Message, console: "Console") -> None:
    from rich.table import Table

    table = Table("killed", "at step", "s to the next", "came back", "retrained", "weights after retraining")
    for each in found:
        weights = "equal" if each.num_retrained else ""
        if each.num_differing:
            norm = "unknown" if each.relative_norm is None else f"{each.relative_norm:.1e}"
            weights = f"{each.num_differing} differ, by up to {norm} of their norm"
        how = "by --resume" if each.resumed else "by itself"
        table.add_row(each.victim, str(each.step), f"{each.seconds:.1f}", how, str(each.num_retrained), weights)
    console.print(table)
    ended = "and the run finished" if outcome["finished"] else "and the run did NOT finish"
    console.print(
        f"first step after {outcome['first_step_s']:.1f} s, median step {outcome['median_step_s']:.2f} s; last step "
        f"{outcome['last_step']} of {outcome['steps']}, {ended}",
        highlight=False,
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headway bench recovery", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("config", type=Path, help="config of the run; knobs of it may follow, as for headway train")
    parser.add_argument("--kills", type=int, default=5, help="how often something is killed")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS, help="who may be killed")
    parser.add_argument("--seed", type=int, default=0, help="of steps and victims")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="longest wait for anything")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "recovery.json", help="where the record goes")
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    return options


def main(arguments: list[str]) -> None:
    from rich.console import Console

    from headway.config import load

    options, record, console = parse(arguments), Record("recovery", arguments), Console()
    config = load(options.config, options.overrides)
    directory = Path(config.run.dir)
    if (directory / "events.jsonl").exists():
        raise HeadwayError(f"{directory} already holds a run; name another with --run.dir")
    if config.run.runtime != "local":
        raise HeadwayError(f"run.runtime = {config.run.runtime}: only workers of this machine can be killed; set local")
    if not 0 < options.kills <= config.run.steps - 3:
        raise HeadwayError(f"--kills {options.kills} do not fit into run.steps = {config.run.steps}; change one")
    run = Run(options, directory, config.run.steps)
    try:
        found, outcome = measure(options, run, console)
    finally:
        run.end()
    figures = outcome | {
        "num_kills": len(found),
        "median_s": statistics.median(each.seconds for each in found),
        "max_s": max(each.seconds for each in found),
        "all_equal": not any(each.num_differing for each in found),
    }
    settings = {
        "kills": options.kills,
        "victims": list(options.victims),
        "seed": options.seed,
        "model": Path(config.model.path).name,
        "dtype": config.model.dtype,
        "trainer": config.trainer.device,
        "engine": config.engine.device,
        "deterministic": config.run.deterministic,
        "checkpoint_every": config.checkpoint.every,
        "batch": [config.trainer.batch_groups, config.rollout.group_size],
    }
    repetitions = [asdict(each) for each in found]
    record.write(options.out, settings=settings, versions=versions(*PACKAGES), figures=figures, repetitions=repetitions)
    show(found, outcome, console)
    console.print(f"written to {options.out}", highlight=False)
    if not outcome["finished"]:
        raise HeadwayError("the run did not reach its last step")


if __name__ == "__main__":
    main(sys.argv[1:])
