"""A real training run on a GPU for a number of minutes, through `headway train`, and what the GPU did meanwhile.

The run is that of a config; it is ended by an interrupt when its time is over, as a person would end it, unless its
steps end before. Recorded are its summary with the start-up by phase, each evaluation with its seconds and versions,
each checkpoint with the time it stalled training, rewards, and, where there is nvidia-smi, the GPU's own account of
itself, taken every second while the run trains. With `--minutes 0` a run that was made before is read.
"""

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common import RESULTS_DIR, Message, Record, versions

if TYPE_CHECKING:
    from rich.console import Console

    from headway.record.run import Run

QUERY = ("utilization.gpu", "memory.used", "power.draw")
END_S = 120.0
EVALUATION, CHECKPOINT = ("label", "version", "version_last", "num", "seconds"), ("version", "seconds", "stall_s")
STEP = ("seconds", "wait_s", "tokens", "reward")


@contextlib.contextmanager
def gpu_log(path: Path) -> Iterator[None]:
    """While it lasts, a line a second of what `QUERY` names."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", "-l", "1"]
    with path.open("w") as out:
        process = subprocess.Popen(command, stdout=out)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def train(options: argparse.Namespace, log: Path) -> None:
    """Run, and interrupt when the time is over; what the run prints goes to the screen and tells how it fares."""
    command = [sys.executable, "-m", "headway.cli", "train", str(options.config), f"--run.dir={options.run}"]
    with gpu_log(log):
        process = subprocess.Popen([*command, *options.overrides])
        try:
            process.wait(60 * options.minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):  # what it recorded until then counts
                process.wait(END_S)
        finally:
            process.kill()


def gpu_figures(log: Path, seconds_trained: float) -> Message:
    """Means over the time in which the run trained, which is the last of the log."""
    if not log.exists():
        return {}
    rows = [[float(value) for value in line.split(",")] for line in log.read_text().splitlines() if line.strip()]
    kept = rows[-int(seconds_trained) :]
    busy, memory, power = ([row[place] for row in kept] for place in range(3))
    return {
        "utilization_percent": statistics.mean(busy),
        "power_w": statistics.mean(power),
        "memory_gib": max(memory) / 1024,
        "seconds": len(kept),
    }


def figures(run: Path, log: Path) -> Message:
    from headway.monitor.report import write_report
    from headway.record.events import Checkpointed, Evaluated
    from headway.record.run import Run

    summary = write_report(run)
    found = Run.read(run)
    accuracies = [(event.version, event.accuracy, event.num) for event in found.all(Evaluated)]
    return {
        "summary": json.loads((run / "summary.json").read_text()) | {"run_dir": run.name},
        "accuracies": accuracies,
        "evaluations": [{key: getattr(event, key) for key in EVALUATION} for event in found.all(Evaluated)],
        "checkpoints": [{key: getattr(event, key) for key in CHECKPOINT} for event in found.all(Checkpointed)],
        "gpu": gpu_figures(log, summary.wall_s),
        "tokens_per_s": summary.tokens_trained / summary.wall_s,
        "steps": steps_of(found),
    }


def steps_of(run: "Run") -> list[list[float]]:
    """Of each training step: when it was done, what it took, how long it had waited for its batch, tokens, reward."""
    begun = run.clock.training()[0][0]
    events = [step.event for step in run.steps]
    return [[round(value, 4) for value in (e.time - begun, *(getattr(e, key) for key in STEP))] for e in events]


def show(found: Message, console: "Console") -> None:
    from rich.table import Table

    summary, gpu = found["summary"], found["gpu"]
    table = Table(show_header=False)
    table.add_row("steps, minutes trained", f"{summary['steps']}, {summary['wall_s'] / 60:.1f}")
    table.add_row("held-out accuracy", ", ".join(f"{share:.1%} at {step}" for step, share, _ in found["accuracies"]))
    table.add_row("tokens trained a second", f"{found['tokens_per_s']:,.0f}")
    table.add_row("of those generated, trained", f"{summary['goodput']:.1%}")
    table.add_row("start-up until the first step", f"{summary['startup'].get('in all', 0.0):.1f} s")
    spans = [f"{each['version']}-{each['version_last']} in {each['seconds']:.1f} s" for each in found["evaluations"]]
    table.add_row("evaluations, by versions", ", ".join(spans))
    mean_s, longest_s = summary["checkpoint_stall_s"]
    stalls = f"{mean_s:.2f} s, at most {longest_s:.2f} s"
    table.add_row(f"{len(found['checkpoints'])} checkpoints stalled training", stalls)
    if gpu:
        table.add_row("GPU busy, power", f"{gpu['utilization_percent']:.0f}%, {gpu['power_w']:.0f} W")
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench real_run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="the run; further arguments are its overrides")
    parser.add_argument("--minutes", type=float, default=8.0, help="0 reads the run of --run as it is")
    parser.add_argument("--run", type=Path, default=Path("runs/real_run"), help="its run directory")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "real_run.json", help="where the record goes")
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    return options


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options = Console(), parse(arguments)
    record = Record("real_run", arguments)
    log = options.out.with_suffix(".gpu.csv")
    log.parent.mkdir(parents=True, exist_ok=True)
    if options.minutes:
        train(options, log)
    found = figures(options.run, log)
    record.write(options.out, versions=versions("torch", "triton", "transformers"), figures=found)
    show(found, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
