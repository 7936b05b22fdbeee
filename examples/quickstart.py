"""The quickstart: build a small model, warm it up, improve it by asynchronous RL, and compare with η = 0.

    make quickstart          (or: python examples/quickstart.py [--section.key=value ...])

Everything it does is a `headway` command of its own: `headway sft`, `headway train`, and `headway train` once more
with staleness.max_staleness = 0 for a few steps from the same weights, to see what asynchrony is worth here.
"""

import asyncio
import os
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headway import launch
from headway.config import Config, load
from headway.errors import HeadwayError
from headway.monitor.report import Summary, table, write_report
from headway.monitor.view import open_view
from headway.record.log import EVENTS_NAME
from headway.record.run import Run

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
SYNC_STEPS = 15
# The config's threads, one of the engine and two of the trainer, are as fast as any at η = 0 (`headway bench async`).
SYNC_SETTINGS = ["--staleness.max_staleness=0", "--task.eval="]


def warm_up(config: Config, console: Console) -> None:
    """`headway sft`: skipped where the model is there already."""
    from headway.training.sft import sft

    if (Path(config.model.path) / "config.json").is_file():
        console.print(f"1. the warmed-up model is in {config.model.path}")
        return
    console.print(f"1. warming up a new model on worked examples, {config.sft.steps} steps")
    columns = (TextColumn("  "), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as bar:
        task = bar.add_task("", total=config.sft.steps, loss=float("nan"))
        sft(config, lambda done, total, loss: bar.update(task, completed=done, loss=loss))


def train(config: Config) -> Summary:
    """`headway train`, resumed where an earlier attempt was interrupted."""
    begun = (Path(config.run.dir) / EVENTS_NAME).exists()
    view = open_view(sys.stdout)
    try:
        return asyncio.run(launch.train(config, resume=begun, view=view))
    finally:
        view.close()


def wall_of_first(directory: Path, num_steps: int) -> float:
    """Seconds from the first admission to the end of the given training step."""
    run = Run.read(directory)
    started = run.clock.incarnations[0].training_start
    assert started is not None
    return run.steps[num_steps - 1].event.time - started


def compare(config: Config, arguments: list[str]) -> dict[str, float]:
    """The first steps once more, at η = 0, from the same weights and prompts."""
    run = Path(config.run.dir)
    num_steps = min(SYNC_STEPS, config.run.steps)
    sync_run = run / "sync"
    synchronous = load(CONFIG, [*arguments, *SYNC_SETTINGS, f"--run.dir={sync_run}", f"--run.steps={num_steps}"])
    if not (sync_run / "summary.json").exists():
        train(synchronous)
    measured_sync, measured_async = wall_of_first(sync_run, num_steps), wall_of_first(run, num_steps)
    return {
        "sync_steps": num_steps,
        "sync_measured_s": round(measured_sync, 2),
        "async_measured_s": round(measured_async, 2),
    }


def main() -> None:
    console, arguments = Console(highlight=False), sys.argv[1:]
    config = load(CONFIG, arguments)
    run = Path(config.run.dir)
    warm_up(config, console)
    if (run / EVENTS_NAME).exists() and Run.read(run).status == "finished":
        console.print(f"2. {run} is finished already; remove it to train again")
    else:
        console.print(f"2. asynchronous training, {config.run.steps} steps, η = {config.staleness.max_staleness}")
        train(config)
    console.print(f"3. the first {min(SYNC_STEPS, config.run.steps)} steps again, synchronously (η = 0)")
    measured = compare(config, arguments)
    ratio = measured["sync_measured_s"] / measured["async_measured_s"]
    wall_s = write_report(run).wall_s
    summary = write_report(run, measured | {"speedup": round(ratio, 3), "wall_s_sync": round(wall_s * ratio, 2)})
    console.print(table(summary))
    console.print(f"curves and timeline: {run / 'report.png'}   figures: {run / 'summary.json'}")
    headway = "headway" if shutil.which("headway") else os.path.relpath(Path(sys.executable).with_name("headway"))
    console.print(f"look inside, down to every token: {headway} view {run}")


if __name__ == "__main__":
    try:
        main()
    except HeadwayError as error:
        sys.exit(f"error: {error}")
