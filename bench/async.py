"""Asynchronous training against the same work at η = 0, in wall time, on the cores of this machine.

Both arms are `headway train` of one config with the same model, seed, steps and batches; they differ in max_staleness
and in their threads, which a short calibration chooses for each arm by itself: at η = 0 engine and trainer take turns
and may each want every core. Evaluation is off. Time runs from the first admission to the end of the last training
step; starting processes and loading models is left out, for both. Arms take turns, best is compared with best, and
the ratio of each pair of neighbours shows the spread.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common import RESULTS_DIR, Message, Record, available_cores, versions

if TYPE_CHECKING:
    from rich.console import Console

    from headway.config import Config

FIGURES = (
    *("wall_s", "steps", "tokens_trained", "tokens_generated", "goodput", "staleness_mean", "staleness_max"),
    *("engine_busy_share", "trainer_busy_share", "pause_ms_mean", "reward_first", "reward_last"),
)
ROWS = (
    *("threads, engine + trainer", "best wall s", "median", "worst", "tokens trained", "tokens/s", "goodput"),
    *("mean staleness", "busy, engine + trainer"),
)


@dataclass
class Contestant:
    """One arm: its bound η, the threads it was found to like best, what it measured."""

    eta: int
    threads: tuple[int, int] = (1, 1)  # engine, trainer
    calibration: list[Message] = field(default_factory=list)
    repetitions: list[Message] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"η = {self.eta}"

    @property
    def settings(self) -> list[str]:
        engine, trainer = self.threads
        staleness = f"--staleness.max_staleness={self.eta}"
        return [staleness, f"--engine.threads={engine}", f"--trainer.threads={trainer}"]

    @property
    def walls_s(self) -> list[float]:
        return sorted(float(repetition["wall_s"]) for repetition in self.repetitions)

    @property
    def best(self) -> Message:
        return min(self.repetitions, key=lambda repetition: float(repetition["wall_s"]))


class Runs:
    """Starts `headway train` in a process of its own, in a new run directory each time."""

    def __init__(self, options: argparse.Namespace, directory: Path):
        self._options, self._directory = options, directory
        self._names = itertools.count()

    def train(self, settings: list[str], num_steps: int) -> Message:
        """One run; the figures of its summary."""
        run = self._directory / str(next(self._names))
        overrides = [*self._options.overrides, *settings, "--task.eval=", "--evaluate.every=0"]
        overrides += [f"--run.steps={num_steps}", f"--run.dir={run}"]
        self._execute(overrides, log=run.with_suffix(".log"))
        summary = json.loads((run / "summary.json").read_text())
        if summary["status"] != "finished" or summary["steps"] != num_steps:
            raise AssertionError(f"a run of {num_steps} steps is {summary['status']} after {summary['steps']}")
        figures = {name: summary[name] for name in FIGURES}
        return {**figures, "tokens_per_s": summary["tokens_trained"] / summary["wall_s"]}

    def _execute(self, overrides: list[str], log: Path) -> None:
        from headway.errors import DeadlineExceeded, RunFailed

        command = [sys.executable, "-m", "headway.cli", "train", str(self._options.config), *overrides]
        # A wide terminal, so that an error stays the one line it is.
        environment = {**os.environ, "COLUMNS": "1000"}
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=self._options.deadline_s
                )
            except subprocess.TimeoutExpired:
                raise DeadlineExceeded(f"a run took more than {self._options.deadline_s:g} s: {command}") from None
        if done.returncode:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            cause = next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "no output")
            raise RunFailed(f"headway train ended with exit code {done.returncode}: {cause.removeprefix('error: ')}")


def calibrate(arm: Contestant, runs: Runs, options: argparse.Namespace, console: "Console") -> None:
    """Try every pair of thread counts for a few steps and keep the fastest."""
    for engine, trainer in itertools.product(options.threads, repeat=2):
        arm.threads = (engine, trainer)
        with console.status(f"calibrating {arm.name}: {threads_text(arm)}"):
            figures = runs.train(arm.settings, options.calibration_steps)
        arm.calibration.append({"threads": arm.threads, **figures})
        speed = f"{figures['wall_s']:.1f} s, {figures['tokens_per_s']:.0f} tokens/s"
        console.print(f"calibration of {arm.name}, {threads_text(arm)}: {speed}", highlight=False)
    # Tokens a second and not seconds: over so few steps the lengths of completions differ by chance.
    arm.threads = max(arm.calibration, key=lambda figures: float(figures["tokens_per_s"]))["threads"]


def threads_text(arm: Contestant) -> str:
    return f"threads {arm.threads[0]} + {arm.threads[1]}"


def take_turns(arms: tuple[Contestant, Contestant], num_repetitions: int) -> Iterator[tuple[int, Contestant]]:
    """The order turns round with each repetition, so that neither arm always follows the other."""
    for repetition in range(1, num_repetitions + 1):
        for arm in arms if repetition % 2 else reversed(arms):
            yield repetition, arm


def compare(asynchronous: Contestant, synchronous: Contestant) -> Message:
    pairs = [
        float(sync["wall_s"] / ours["wall_s"])
        for sync, ours in zip(synchronous.repetitions, asynchronous.repetitions, strict=True)
    ]
    return {
        "ratio": synchronous.walls_s[0] / asynchronous.walls_s[0],
        "ratio_of_medians": statistics.median(synchronous.walls_s) / statistics.median(asynchronous.walls_s),
        "ratio_of_tokens_per_s": asynchronous.best["tokens_per_s"] / synchronous.best["tokens_per_s"],
        "ratios_of_pairs": pairs,
    }


def show(arms: tuple[Contestant, Contestant], figures: Message, num_steps: int, console: "Console") -> None:
    from rich.table import Table

    table = Table("", title=f"{num_steps} training steps on {len(available_cores())} cores")
    for arm in arms:
        table.add_column(arm.name, justify="right")
    for name, *cells in zip(ROWS, *(describe(arm) for arm in arms), strict=True):
        table.add_row(name, *cells)
    console.print(table)
    pairs = figures["ratios_of_pairs"]
    spread = f"pairs {min(pairs):.2f}–{max(pairs):.2f}, median {statistics.median(pairs):.2f}"
    console.print(f"{arms[0].name} is {figures['ratio']:.2f}× as fast as {arms[1].name} ({spread})", highlight=False)
    console.print(f"in tokens trained a second, {figures['ratio_of_tokens_per_s']:.2f}×", highlight=False)


def describe(arm: Contestant) -> list[str]:
    """The cells of one arm, in the order of `ROWS`: its walls, and what its best repetition did."""
    walls_s, best = arm.walls_s, arm.best
    return [
        f"{arm.threads[0]} + {arm.threads[1]}",
        *(f"{wall_s:.1f}" for wall_s in (walls_s[0], statistics.median(walls_s), walls_s[-1])),
        f"{best['tokens_trained']:,}",
        f"{best['tokens_per_s']:,.0f}",
        percent(best["goodput"]),
        "-" if best["staleness_mean"] is None else f"{best['staleness_mean']:.2f}",
        f"{percent(best['engine_busy_share'])} + {percent(best['trainer_busy_share'])}",
    ]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def parse(arguments: list[str]) -> tuple[argparse.Namespace, "Config"]:
    from headway.config import load
    from headway.errors import ConfigError

    parser = argparse.ArgumentParser(
        prog="headway bench async",
        description=(__doc__ or "").splitlines()[0],
        epilog="Any --section.key=value is given to both arms.",
    )
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"), help="TOML file of the run")
    parser.add_argument("--max-staleness", type=int, help="η of the asynchronous arm; the config's own if not given")
    parser.add_argument("--steps", type=int, default=24, help="training steps of each run")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each arm")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts the calibration tries")
    parser.add_argument("--calibration-steps", type=int, default=8, help="training steps of each calibrating run")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="longest any one run may take")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "async.json", help="where the record goes")
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    config = load(options.config, overrides)
    if options.max_staleness is None:
        options.max_staleness = config.staleness.max_staleness
    counts = (options.max_staleness, options.steps, options.repetitions, *options.threads, options.calibration_steps)
    if min(counts) < 1:
        raise ConfigError("--max-staleness, --steps, --repetitions, --threads and --calibration-steps are 1 or more")
    return options, config


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console = Console()
    options, config = parse(arguments)
    record = Record("async", arguments)
    arms = Contestant(options.max_staleness), Contestant(0)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        runs = Runs(options, Path(directory))
        for arm in arms:
            calibrate(arm, runs, options, console)
        for repetition, arm in take_turns(arms, options.repetitions):
            with console.status(f"repetition {repetition} of {options.repetitions}: {arm.name}"):
                arm.repetitions.append(runs.train(arm.settings, options.steps))
            speed = f"{arm.repetitions[-1]['wall_s']:.1f} s, {arm.repetitions[-1]['tokens_per_s']:.0f} tokens/s"
            console.print(f"repetition {repetition}: {arm.name}: {speed}", highlight=False)
    figures = compare(*arms)
    record.write(
        options.out,
        versions=versions("headway-rl", "torch", "transformers"),
        config=config.model_dump(),
        settings={arm.name: arm.settings for arm in arms},
        figures=figures,
        repetitions={arm.name: arm.repetitions for arm in arms},
        calibration={arm.name: arm.calibration for arm in arms},
    )
    show(arms, figures, options.steps, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
