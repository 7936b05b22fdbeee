"""The command line: `headway --help` lists the commands; each imports what it needs when it runs.

Errors written for people are printed as their one sentence; anything else is a bug and keeps its trace.
"""

import asyncio
import errno
import os
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headway import __version__
from headway.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.config import Config
    from headway.monitor.view import View

T = TypeVar("T")
_OVERRIDES: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
"""No bugs: a full, limited, read-only or broken disk, whatever was being written."""

_KNOBS = "Every knob of a config can be given as --section.key=value; `headway knobs [FILTER]` lists them."

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning for language models that reason.",
    epilog=_KNOBS,
)

ConfigPath = Annotated[Path, typer.Argument(help="TOML file of the run", show_default=False)]
RunPath = Annotated[Path, typer.Argument(help="directory of a run", show_default=False)]


@app.callback(invoke_without_command=True)
def headway(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        _print(f"headway {__version__}")
        raise typer.Exit


def main() -> None:
    os.umask(0o077)  # what a run writes holds prompts, completions and weights: it is its owner's alone
    try:
        try:
            app()
        finally:
            _ignore_signals()
    except HeadwayError as error:
        _complain(error)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _OF_A_DISK:
            raise
        said = (
            f"cannot write {error.filename or 'a file'}: {error.strerror}; make room or repair the disk, then try again"
        )
        _complain(HeadwayError(said))
        sys.exit(1)
    except KeyboardInterrupt:  # a further one, while the run was ending
        sys.exit(130)


def _ignore_signals() -> None:
    """From here on the process only says how it ended, and exits: an impatient person's next signal changes neither."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _complain(error: HeadwayError) -> None:
    from rich.console import Console

    from headway.monitor.text import printable

    # Not wrapped: a sentence that a script reads, or a person copies, stays one line. Escaped: it may quote a model.
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)
    console.print("error:", style="bold red", end=" ")
    console.print(printable(error))
    for note in getattr(error, "__notes__", []):
        console.print(printable(note))


def _load(path: Path, context: typer.Context) -> "Config":
    from headway.config import load

    return load(path, context.args)


def _with_view(make: "Callable[[View], Coroutine[Any, Any, T]]") -> T:
    """Run a coroutine that shows itself through a view, and restore the terminal whatever happens."""
    from headway.monitor.view import open_view

    view = open_view(sys.stdout)

    async def run() -> T:
        try:
            return await make(view)
        finally:
            _ignore_signals()

    try:
        return asyncio.run(run())
    finally:
        view.close()


@app.command(context_settings=_OVERRIDES, epilog=_KNOBS)
def train(
    context: typer.Context,
    config: ConfigPath,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in run.dir")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="delete the run that run.dir holds")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything, print the plan, start nothing")] = False,
    from_groups: Annotated[Path | None, typer.Option("--from", help="train on recorded groups (.jsonl) only")] = None,
) -> None:
    """Train a model: generation and training side by side, from nothing or from where a run was interrupted."""
    from headway.algorithm import describe

    loaded = _load(config, context)
    for line in describe(loaded.algorithm):
        _print(line)
    if dry_run:
        _print_plan(loaded, resume, overwrite)
    elif from_groups is not None:
        _train_from(loaded, from_groups)
    else:
        _train(loaded, resume, overwrite)


def _train(loaded: "Config", resume: bool, overwrite: bool) -> None:
    import psutil

    from headway import launch
    from headway.monitor.report import table

    started = psutil.Process().create_time()
    summary = _with_view(lambda view: launch.train(loaded, resume, view, overwrite, started=started))
    _print(table(summary))
    directory = Path(loaded.run.dir)
    _print(f"{launch.saved_models(directory)}; curves: {directory / 'report.png'}")
    _print(f"look inside, down to every token: headway view {shlex.quote(str(directory))}")


def _print_plan(config: "Config", resume: bool, overwrite: bool) -> None:
    from headway.plan import describe, table

    _print(table(describe(config, resume, overwrite)))


def _train_from(config: "Config", path: Path) -> None:
    from headway import launch
    from headway.record.shards import read_jsonl

    reports = _with_view(lambda view: launch.train_from(config, read_jsonl(path), view))
    for report in reports:
        _print(f"step {report['version']:.0f}: loss {report['loss']:.4f}, gradient norm {report['grad_norm']:.3f}")
    _print(f"model saved to {Path(config.run.dir) / 'model'}")


@app.command(context_settings=_OVERRIDES)
def sft(context: typer.Context, config: ConfigPath) -> None:
    """Warm a model up on worked examples; builds a small one from nothing where model.init.alphabet is given."""
    loaded = _load(config, context)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from headway.training.sft import sft as warm_up

    columns = (TextColumn("warming up"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=loaded.sft.steps, loss=float("nan"))

        def report(done: int, total: int, loss: float) -> None:
            bar.update(task, completed=done, loss=loss)
            if not sys.stdout.isatty() and (done % 50 == 0 or done == total):
                _print(f"warming up: step {done}/{total}, loss {loss:.3f}")

        out, _ = warm_up(loaded, report)
    _print(f"model saved to {out}")


@app.command("eval", context_settings=_OVERRIDES)
def evaluate(context: typer.Context, config: ConfigPath) -> None:
    """Held-out accuracy of the model at model.path."""
    from headway import launch
    from headway.rollout.evaluate import table

    loaded = _load(config, context)
    found = _with_view(lambda view: launch.evaluate_only(loaded, view))
    accuracy = "unknown" if found.accuracy is None else f"{found.accuracy:.1%}"
    _print(table(found, loaded.evaluate.samples))
    _print(
        f"accuracy {accuracy} on {found.num} problems "
        f"({found.num_failed} without a verdict), {found.mean_tokens:.0f} tokens each, {found.seconds:.1f} s"
    )
    _print(f"every problem with its completions: {launch.problems_path(loaded)}")


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="transformers directory or hub name")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0 takes a free one")] = 8000,
    key: Annotated[str, typer.Option(help="API key clients have to give; one is made and printed if empty")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    max_context: Annotated[int, typer.Option(min=0, help="longest sequence; 0 takes the model's limit")] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="sequences decoded together")] = 64,
) -> None:
    """Serve a model through the OpenAI API (chat completions, completions) on the embedded engine."""
    from headway.config import EngineSection, ModelSection
    from headway.config import section as make_section
    from headway.rollout.endpoint_serve import serve as serve_model

    engine = make_section(EngineSection, device=device, max_context=max_context, max_num_seqs=max_num_seqs)
    dtype = make_section(ModelSection, path=model, dtype=dtype).dtype

    def tell(url: str, key: str) -> None:
        _print(f"serving {model}: base URL {url}, API key {key} (Ctrl-C stops)")

    with suppress(KeyboardInterrupt):
        asyncio.run(serve_model(model, engine, dtype, host, port, key, tell))


@app.command(context_settings=_OVERRIDES)
def rollout(
    context: typer.Context,
    config: ConfigPath,
    out: Annotated[Path, typer.Option(help="where the groups go (.jsonl)")],
    groups: Annotated[int | None, typer.Option(min=1, help="how many groups; one batch when left out")] = None,
) -> None:
    """Generate and reward groups without training."""
    from headway import launch
    from headway.record.shards import write_jsonl

    loaded = _load(config, context)
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out {out} cannot be written: {out.parent} must be a directory and {out} a file in it")
    made = _with_view(lambda view: launch.rollout_only(loaded, groups or loaded.trainer.batch_groups, view))
    num_written = write_jsonl(out, made)
    rewards = [trajectory.reward for group in made for trajectory in group.trajectories]
    mean = sum(rewards) / max(1, len(rewards))
    _print(f"{num_written} groups with {len(rewards)} trajectories written to {out}; mean reward {mean:.3f}")


@app.command()
def replay(run: RunPath) -> None:
    """Train a recorded run again and see that it leads to identical weights."""
    from headway.control.resume import replay as retrain_run
    from headway.record.events import Event, Retrained

    differing: list[Retrained] = []

    def follow(view: "View") -> Coroutine[Any, Any, tuple[int, str]]:
        def emit(event: Event) -> None:
            if isinstance(event, Retrained):
                differing.append(event)
            view.on_event(event)

        return retrain_run(run, emit)

    version, digest = _with_view(follow)
    if differing:
        norms = [event.relative_norm for event in differing if event.relative_norm is not None]
        largest = f", by up to {max(norms):.1e} of their norm" if norms else ""
        _print(f"replayed {version} training steps: {len(differing)} gave other weights than recorded{largest}")
        return
    _print(f"replayed {version} training steps: every version's weights are identical to the record (last {digest})")


@app.command()
def view(
    runs: Annotated[list[Path], typer.Argument(help="run directories, or directories of runs")],
    port: Annotated[int, typer.Option(help="where to listen on loopback; 0 takes any free port")] = 0,
) -> None:
    """Open finished and live runs in the browser: curves, timeline, completions, and every token's provenance."""
    from headway.monitor.viewer.command import serve

    def announce(url: str) -> None:
        _print(f"open {url} in a browser; the link is the key. Ctrl-C ends the viewer.")

    asyncio.run(serve(runs, port, announce))


@app.command()
def report(run: RunPath) -> None:
    """Make summary.json and report.png of a run again, and print the summary."""
    from headway.monitor.report import table, write_report

    _print(table(write_report(run)))
    _print(f"curves and timeline: {run / 'report.png'}")


@app.command()
def engines(
    run: RunPath, count: Annotated[int, typer.Option(min=1, max=256, help="how many engines it is to have")]
) -> None:
    """Have a run that goes on use more or fewer engines."""
    from headway.control.resize import ask
    from headway.record.log import EVENTS_NAME

    ask(run, EVENTS_NAME, count)
    _print(f"asked for {count} engine{'s' * (count > 1)}; the run tells when they have joined or left")


@app.command()
def show(
    run: RunPath,
    step: Annotated[int | None, typer.Option(min=1, help="training step; the last when left out")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="one group by its id")] = None,
    count: Annotated[int, typer.Option(min=1, help="how many groups")] = 2,
    whole: Annotated[bool, typer.Option("--whole", help="do not cut long texts")] = False,
) -> None:
    """Print prompts with their completions and rewards, of a live or a finished run."""
    from headway.monitor import listing
    from headway.monitor.reader import RunReader

    for line in listing.show(RunReader(run), step, group, count, whole):
        _print(line)


@app.command()
def runs(folder: Annotated[Path, typer.Argument(help="a folder of run directories")] = Path("runs")) -> None:
    """List runs: status, training step, held-out accuracy, and how long ago they wrote."""
    from headway.monitor import listing

    _print(listing.runs_table(listing.runs(folder)))


@app.command()
def compare(compared: Annotated[list[Path], typer.Argument(metavar="RUN RUN …", help="directories of runs")]) -> None:
    """Print the knobs in which runs differ, and their results side by side."""
    from headway.monitor import listing
    from headway.monitor.reader import RunReader

    if len(compared) < 2:
        raise ConfigError("compare needs two run directories or more")
    for table in listing.compare([RunReader(run) for run in compared]):
        _print(table)


@app.command()
def export(
    run: RunPath,
    to: Annotated[Path | None, typer.Option(help="write the trained model with its card to this directory")] = None,
    completions: Annotated[Path | None, typer.Option(help="write every completion to this .parquet file")] = None,
) -> None:
    """Export the model as a Hugging Face directory with a model card, or the completions as Parquet."""
    from headway.monitor.export import export_completions, export_model
    from headway.monitor.reader import RunReader

    if to is None and completions is None:
        raise ConfigError("name what to export: --to DIR for the model, --completions FILE.parquet for the texts")
    reader = RunReader(run)
    if to is not None:
        version = export_model(reader, to)
        known = f"version {version} by checksum" if version is not None else "version not verified by checksum"
        _print(f"model written to {to} ({known}); its card is {to / 'README.md'}")
    if completions is not None:
        _print(f"{export_completions(reader, completions):,} completions written to {completions}")


@app.command()
def init(
    config: Annotated[Path, typer.Argument(help="TOML file to write", show_default=False)],
    task: Annotated[str, typer.Option(help="own, math, code or choice")] = "own",
    model: Annotated[str, typer.Option(help="directory or hub name")] = "HuggingFaceTB/SmolLM2-135M-Instruct",
    gpu: Annotated[bool, typer.Option("--gpu", help="put engine and trainer onto a GPU")] = False,
) -> None:
    """Write a first config for a task and a model, with a comment on every knob."""
    from headway.starter import write_starter

    written = " and ".join(map(str, write_starter(config, task, model, gpu)))
    _print(f"wrote {written}; check it with `headway train {config} --dry-run`")


@app.command()
def knobs(words: Annotated[str, typer.Argument(metavar="[FILTER]", help="only knobs that mention this")] = "") -> None:
    """List the knobs of a config by section: type, default, choices, and a sentence each."""
    from headway import knobs as all_knobs
    from headway.config import Config

    found = all_knobs.describe(Config, words)
    if not found:
        raise ConfigError(f"no knob mentions {words!r}; `headway knobs` lists all")
    _print(all_knobs.table(found))


@app.command()
def algorithms() -> None:
    """List the presets of algorithm.preset with what each sets."""
    from headway.algorithm import listing

    for line in listing():
        _print(line)


@app.command(context_settings=_OVERRIDES)
def bench(
    context: typer.Context, name: Annotated[str, typer.Argument(help="a file in bench/, without its ending")]
) -> None:
    """Run a benchmark of the source tree; arguments go to it."""
    directory = Path(__file__).resolve().parent.parent / "bench"
    script = directory / f"{name}.py"
    if not directory.is_dir():
        raise HeadwayError("benchmarks are in the source tree only: run `headway bench` from an environment made in it")
    known = sorted({path.stem for path in directory.glob("*.py")} - {"common", "shapes", "vllm_env"})
    if not script.is_file():
        raise HeadwayError(f"there is no benchmark {name}; the source tree has {', '.join(known)}")
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(directory))
    runpy.run_path(str(script), run_name="__main__")


def _print(what: Any) -> None:
    from rich.console import Console

    from headway.monitor.text import printable

    console = Console(highlight=False, emoji=False, markup=False)
    console.print(printable(what) if isinstance(what, str) else what, soft_wrap=isinstance(what, str))


if __name__ == "__main__":
    main()
