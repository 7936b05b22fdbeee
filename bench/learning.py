"""Does training on stale data learn as well as on fresh data? Many runs of one job, with seeds.

    headway bench learning bounds         η from 0 to 16 with one optimizer step a batch, as most configs train
    headway bench learning staleness      η × objective: naive PPO, decoupled PPO, decoupled PPO with masks
    headway bench learning presets        every preset of `headway algorithms` at η = 4
    headway bench learning interruption   running sequences at a swap: keep, recompute or drain, at η = 4
    headway bench learning adaptive       η fixed at either bound, and η that moves between them
    headway bench learning real           a real model on one GPU, η = 0, 4 and 8; give --model, and --config for a job

All but the last train a model of 0.1M parameters on the quickstart's task, each run within one process. Runs that are
compared have the same steps, batches and hyper-parameters, and start from the same model.

A record at `--out` is extended by the runs that it lacks, so a bench killed anywhere goes on where it stopped, and so
does the training run that was going on. `--only` chooses runs by name, `--budget-s` begins none after that time,
and `--minutes` ends each run after that much training. `real` evaluates the whole held-out split before and after
training, greedily and by the mean of 8 samples. What the bench does not know goes to `headway` as it is, such as
--tasks.gsm8k.train=FILE.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

from common import RESULTS_DIR, Message, Record, shown, versions

if TYPE_CHECKING:
    from rich.console import Console

CONFIG = Path("configs/quickstart.toml")
UNBOUNDED = 1_000_000
ETAS = (0, 1, 4, 16, UNBOUNDED)
PRESETS = ("areal", "grpo", "dapo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "ppo")
REAL_CONFIG, REAL_ETAS = Path("configs/gsm8k_qwen.toml"), (0, 4, 8)
BEFORE = "before training"
LOOK_S, END_S = 2.0, 240.0

MODEL = (
    *("--model.init.hidden_size=64", "--model.init.num_layers=2", "--model.init.intermediate_size=192"),
    *("--model.init.num_heads=2", "--model.init.num_kv_heads=2", "--sft.steps=800", "--trainer.threads=1"),
)
SMALL = (
    *("--run.runtime=inline", "--trainer.threads=1", "--engine.threads=1", "--checkpoint.every=1000"),
    "--trainer.batch_groups=16",
)
REAL = ("--checkpoint.every=50",)
WAYS = {"greedy": (), "mean of 8": ("--evaluate.temperature=1", "--evaluate.samples=8")}

MILD = ("--trainer.lr=3e-4", "--trainer.warmup_steps=3")
# Where stale data hurts: several optimizer steps a batch, each larger than the quickstart's.
HARD = ("--trainer.minibatches=4", "--trainer.lr=3e-4", "--trainer.warmup_steps=3")
GENTLE = ("--trainer.minibatches=2", "--trainer.lr=3e-4", "--trainer.warmup_steps=3", "--algorithm.critic_lr=1e-3")
OBJECTIVES = {
    "naive": ("--algorithm.objective=naive",),
    "decoupled": ("--algorithm.objective=decoupled",),
    "masked": (
        "--algorithm.behaviour_cap=5",
        "--algorithm.behaviour_cap_mode=truncate",
        "--algorithm.mask_sequence_low=0.8",
        "--algorithm.mask_sequence_high=1.25",
        "--algorithm.mask_negative_kl=0.1",
    ),
}


@dataclass(frozen=True)
class Run:
    arm: str
    seed: int
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    def directory(self, root: Path) -> Path:
        return root / f"{self.arm.replace(' ', '-').replace('=', '')}-{self.seed}"


def bound(eta: int) -> tuple[str, tuple[str, ...]]:
    """A staleness bound's name and settings; without one, the oldest finished group is taken first."""
    if eta == UNBOUNDED:
        return "eta=none", (f"--staleness.max_staleness={eta}", "--staleness.window=-1")
    return f"eta={eta}", (f"--staleness.max_staleness={eta}",)


def staleness_runs(seeds: int) -> list[Run]:
    runs = []
    for seed in range(seeds):
        for eta in ETAS:
            name, settings = bound(eta)
            runs += [Run(f"{kind} {name}", seed, (*HARD, *settings, *own)) for kind, own in OBJECTIVES.items()]
    return runs


def bound_runs(seeds: int) -> list[Run]:
    arms = dict(bound(eta) for eta in (0, 1, 4, 8, 16))
    return [Run(arm, seed, (*MILD, *settings)) for seed in range(seeds) for arm, settings in arms.items()]


def preset_runs(seeds: int) -> list[Run]:
    _, settings = bound(4)
    shared = (*GENTLE, *settings)
    return [Run(preset, seed, (*shared, f"--algorithm.preset={preset}")) for seed in range(seeds) for preset in PRESETS]


def interruption_runs(seeds: int) -> list[Run]:
    _, settings = bound(4)
    kinds = ("recompute", "keep", "drain")
    return [
        Run(kind, seed, (*GENTLE, *settings, f"--engine.kv_on_swap={kind}")) for seed in range(seeds) for kind in kinds
    ]


def adaptive_runs(seeds: int) -> list[Run]:
    arms = {"eta=1": bound(1)[1], "eta=8": bound(8)[1]}
    arms["eta from 1 to 8"] = (*arms["eta=8"], "--staleness.min_staleness=1", "--staleness.min_ess=0.9")
    return [Run(arm, seed, (*HARD, *settings)) for seed in range(seeds) for arm, settings in arms.items()]


def real_runs(seeds: int) -> list[Run]:
    return [Run(*bound(eta)[:1], seed, bound(eta)[1]) for seed in range(seeds) for eta in REAL_ETAS]


RUNS = {
    "bounds": bound_runs,
    "staleness": staleness_runs,
    "presets": preset_runs,
    "interruption": interruption_runs,
    "adaptive": adaptive_runs,
    "real": real_runs,
}


def model_of(options: argparse.Namespace) -> Path:
    """The model that all runs start from; the small one is made once."""
    if options.model is not None:
        return Path(options.model)
    root: Path = options.root.parent
    model = root / "warmup" / "model"
    if not (model / "config.json").is_file():
        _headway("sft", str(CONFIG), *MODEL, f"--sft.out={model}", f"--run.dir={root / 'warmup' / 'run'}")
    return model


def settings_of(run: Run, options: argparse.Namespace) -> list[str]:
    shared = [
        *("--metrics.tensorboard=false", *(REAL if options.what == "real" else SMALL)),
        *(f"--evaluate.every={options.evaluate_every}", f"--evaluate.limit={options.limit}"),
        *(f"--run.steps={options.steps}", f"--run.seed={run.seed}"),
    ]
    return [*shared, *run.settings, *options.overrides]


def play(run: Run, options: argparse.Namespace, model: Path) -> Message:
    """Train to the end, from where an earlier attempt was ended if there was one."""
    directory = run.directory(options.root) / "run"
    asked, settings = json.dumps(settings_of(run, options)), directory.parent / "settings.json"
    if settings.is_file() and settings.read_text() != asked:
        sys.exit(f"{directory} holds a run with other settings; name another --root")
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(asked)
    resumed = ["--resume"] if (directory / "events.jsonl").is_file() else []
    limit_s = 60 * options.minutes or float("inf")
    if not resumed or not _is_over(directory, limit_s):
        placed = [f"--model.path={model}", f"--run.dir={directory}", *resumed]
        _headway(
            "train",
            str(options.config),
            *settings_of(run, options),
            *placed,
            is_over=lambda: _is_over(directory, limit_s),
        )
    if not _is_over(directory, limit_s):
        sys.exit(f"{directory} was ended before its time; the same command goes on with it")
    return figures(directory)


def accuracies_of(model: Path, directory: Path, options: argparse.Namespace) -> Message:
    """Of a model on the whole held-out split, each way; kept in a file each, so that no way is measured twice."""
    found = {}
    for way, knobs in WAYS.items():
        kept = directory / f"{way.replace(' ', '-')}.json"
        if not kept.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            asked = [*knobs, *options.overrides, f"--model.path={model}", f"--run.dir={directory / 'eval'}"]
            _headway("eval", str(options.config), "--evaluate.limit=1000000", *asked)
            kept.write_text(json.dumps(_shares(directory / "eval" / "eval" / "problems.jsonl")))
        found[way] = json.loads(kept.read_text())
    return found


def check_model(run: Path) -> None:
    """End unless the model in the run directory is that of its last step: a full disk leaves an older one, or none."""
    from headway.record.events import Warned
    from headway.record.run import Run

    folded = Run.read(run)
    lost = f"the model of version {folded.num_trained} was not written"
    if any(lost in event.message for event in folded.all(Warned)) or not (run / "model").is_dir():
        sys.exit(f"{run}: {lost}; make room on the disk and name another --root")


def _shares(problems: Path) -> Message:
    """Of each task the mean score of its problems, and how many there are."""
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row["completions"]:
            own = statistics.mean(completion["score"] for completion in row["completions"])
            scores.setdefault(row["task"], []).append(own)
    return {task: {"accuracy": statistics.mean(own), "num": len(own)} for task, own in scores.items()}


def _is_over(run: Path, limit_s: float) -> bool:
    """Whether it has trained all its steps, or this long."""
    from headway.record.run import Run

    if not (run / "events.jsonl").is_file():
        return False
    folded = Run.read(run)
    return folded.status == "finished" or sum(end - begin for begin, end in folded.clock.training()) >= limit_s


def _headway(*arguments: str, is_over: Callable[[], bool] = lambda: False) -> None:
    """Run a command; once it `is_over`, or this process is to end, it is interrupted as a person would, and ends in
    order, with a checkpoint."""
    # Processes with everything imported, because a small run spends a quarter of its time on imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headway.training.trainer", "headway.engine.embedded.service", "headway.launch"])
    process = context.Process(target=_command, args=(arguments,))
    process.start()
    assert process.pid is not None
    interrupted = False
    try:
        while process.is_alive():
            process.join(LOOK_S)
            if process.is_alive() and not interrupted and is_over():
                interrupted = True
                os.kill(process.pid, signal.SIGINT)
    finally:
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)
            process.join(END_S)
        process.kill()
    if process.exitcode and not interrupted:
        raise subprocess.CalledProcessError(process.exitcode, ["headway", *arguments])


def _command(arguments: tuple[str, ...]) -> None:
    # In a session of its own, so that a signal to the bench's group reaches it once, from the bench.
    os.setsid()
    threading.Thread(target=_end_with_bench, daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from headway import cli

    sys.argv = ["headway", *arguments]
    cli.main()


def _end_with_bench() -> None:
    """A bench that was killed leaves no run behind that goes on: it ends as by an interrupt, with a checkpoint."""
    bench = multiprocessing.parent_process()
    assert bench is not None
    bench.join()
    os.kill(os.getpid(), signal.SIGINT)


def figures(run: Path) -> Message:
    """Accuracy by version and by second, and of the training steps what stale data did to them."""
    from headway.record.events import EtaChanged, Evaluated
    from headway.record.run import Run

    folded = Run.read(run)
    trained = [step.event for step in folded.steps]
    spans = folded.clock.training()
    started, wall_s = folded.clock.at(spans[0][0]), sum(end - begin for begin, end in spans)

    def mean(name: str) -> float:
        values = [float(value) for event in trained if (value := event.metrics.get(name)) is not None]
        return statistics.mean(values)

    return {
        "status": folded.status,
        "steps": len(trained),
        "accuracies": [
            [event.version, round(folded.clock.at(event.time) - started, 2), event.accuracy]
            for event in folded.all(Evaluated)
        ],
        "etas": [[event.version, event.after] for event in folded.all(EtaChanged)],
        "rewards": [event.reward for event in trained],
        "wall_s": wall_s,
        "tokens_per_s": sum(event.tokens for event in trained) / wall_s,
        "staleness_mean": statistics.mean(event.staleness_mean for event in trained),
        "staleness_max": max(event.staleness_max for event in trained),
        "effective_sample_size": mean("effective_sample_size"),
        "behaviour_kl": mean("behaviour_kl"),
        "clip_fraction": mean("clip_fraction"),
    }


def summary(found: list[Message]) -> dict[str, Message]:
    """Of each arm the mean over its seeds, and of the accuracy the smallest and largest."""
    arms = dict.fromkeys(one["arm"] for one in found)
    return {arm: _of_arm([one for one in found if one["arm"] == arm]) for arm in arms}


def last_accuracy(one: Message) -> float:
    """After training, on the whole split of the first task, if that was measured; else of the last evaluation."""
    if "after" in one:
        return float(next(iter(one["after"]["greedy"].values()))["accuracy"])
    return float(one["accuracies"][-1][2])


def _of_arm(own: list[Message]) -> Message:
    last = [last_accuracy(one) for one in own]
    names = ("wall_s", "tokens_per_s", "staleness_mean", "effective_sample_size", "behaviour_kl")
    means = {name: statistics.mean(one[name] for one in own) for name in names}
    accuracy = {"mean": statistics.mean(last), "least": min(last), "most": max(last)}
    return {"num_seeds": len(own), "accuracy": accuracy, **means}


def draw(found: list[Message], out: Path) -> None:
    """Held-out accuracy by training step, a panel for each arm: its seeds over the means of the other arms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = {arm: [one["accuracies"] for one in found if one["arm"] == arm] for arm in summary(found)}
    num_columns = min(len(arms), 3 if len(arms) % 3 == 0 else 4)
    num_rows = -(-len(arms) // num_columns)
    size = (2.7 * num_columns, 2.1 * num_rows + 0.4)
    figure, grid = pyplot.subplots(
        num_rows, num_columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (arm, curves) in zip(grid.flat, arms.items(), strict=False):
        for other in arms.values():
            axes.plot(*_mean_curve(other), color="#d5d5d5", linewidth=1)
        for curve in curves:
            axes.plot([point[0] for point in curve], [point[2] for point in curve], color="#8fb4e3", linewidth=1)
        steps, means = _mean_curve(curves)
        axes.plot(steps, means, color="#1d5fb4", linewidth=2)
        axes.annotate(f"{means[-1]:.0%}", (steps[-1], means[-1]), xytext=(3, 3), textcoords="offset points", fontsize=9)
        axes.set_title(arm.replace("eta=", "η = ").replace("eta ", "η "), loc="left", fontsize=10)
        for side in ("right", "top"):
            axes.spines[side].set_visible(False)
    for axes in list(grid.flat)[len(arms) :]:
        axes.set_visible(False)
    figure.supxlabel("training step", fontsize=10)
    figure.supylabel("held-out accuracy", fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _mean_curve(curves: list[list[list[float]]]) -> tuple[list[float], list[float]]:
    """The mean over runs, as far as all of them go."""
    points = list(zip(*curves, strict=False))
    return [point[0][0] for point in points], [statistics.mean(one[2] for one in point) for point in points]


def show(arms: dict[str, Message], console: "Console") -> None:
    from rich.table import Table

    table = Table("arm", "seeds", "accuracy", "least to most", "seconds", "tokens/s", "staleness", "ESS", "KL")
    for arm, one in arms.items():
        accuracy = one["accuracy"]
        table.add_row(
            *(arm, str(one["num_seeds"]), f"{accuracy['mean']:.1%}", f"{accuracy['least']:.1%}–{accuracy['most']:.1%}"),
            *(f"{one['wall_s']:.0f}", f"{one['tokens_per_s']:,.0f}", f"{one['staleness_mean']:.1f}"),
            *(f"{one['effective_sample_size']:.2f}", f"{one['behaviour_kl']:.4f}"),
        )
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench learning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=tuple(RUNS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="training steps of a run: 24, for real 100")
    parser.add_argument("--evaluate-every", type=int, help="steps between evaluations: 8, for real none")
    parser.add_argument("--limit", type=int, default=256, help="held-out problems of an evaluation during a run")
    parser.add_argument("--only", action="append", help="run only what has this in its name, such as 'eta=4, seed 1'")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no run after this many seconds")
    parser.add_argument("--minutes", type=float, default=0.0, help="end each run after this many minutes; 0: never")
    parser.add_argument("--model", type=Path, help="directory of the model; without it the small one is made")
    parser.add_argument("--config", type=Path, help="the job; without it the quickstart's, for real GSM8K's")
    parser.add_argument("--root", type=Path, default=Path("runs/learning"), help="where runs and their figures go")
    parser.add_argument("--out", type=Path, help="where the record goes")
    options, overrides = parser.parse_known_args(arguments)
    options.overrides, options.only = overrides, options.only or [""]
    options.out = options.out or RESULTS_DIR / f"learning_{options.what}.json"
    options.root = options.root / options.what
    options.config = options.config or (REAL_CONFIG if options.what == "real" else CONFIG)
    if options.steps is None:
        options.steps = 100 if options.what == "real" else 24
    if options.evaluate_every is None:
        options.evaluate_every = 0 if options.what == "real" else 8
    if options.what == "real" and options.model is None:
        parser.error("real needs --model, the directory of the model")
    return options


def _terminated(*_: object) -> None:
    """A training run that is going on writes its checkpoint before this process ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` signals this process, and then its group
    sys.exit("terminated; the same command goes on from here")


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options = Console(), parse(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    record, model, began = Record("learning", arguments), model_of(options), time.monotonic()
    kept: Message = json.loads(options.out.read_text()) if options.out.is_file() else {}
    before, found = kept.get("before"), list[Message](kept.get("runs", []))

    def write() -> None:
        """After each part, so that nothing is lost when the next one is killed."""
        fields = {"before": before} if before else {}
        names = [run.name for run in RUNS[options.what](max(options.seeds, *(1 + one["seed"] for one in found), 1))]
        found.sort(key=lambda one: names.index(f"{one['arm']}, seed {one['seed']}"))
        made = versions("torch", "transformers")
        record.write(options.out, versions=made, **fields, figures=summary(found), runs=found)

    wanted = [run for run in RUNS[options.what](options.seeds) if any(part in run.name for part in options.only)]
    if not wanted:
        sys.exit(f"no run has {' or '.join(options.only)} in its name")
    for run in wanted:
        asked = [*map(shown, settings_of(run, options))]
        known = next((one for one in found if (one["arm"], one["seed"]) == (run.arm, run.seed)), None)
        if known and known["settings"] != asked:
            sys.exit(f"{options.out} has {run.name} with other settings; name another --out")
        is_done = known and ("after" in known or options.what != "real")
        if is_done or time.monotonic() - began > options.budget_s:
            continue
        directory = run.directory(options.root)
        if options.what == "real" and not before:
            before = accuracies_of(model, options.root / "before", options)
        if not known:
            known = {"arm": run.arm, "seed": run.seed, "settings": asked, **play(run, options, model)}
            found.append(known)
            write()
        if options.what == "real":
            check_model(directory / "run")
            known["after"] = accuracies_of(directory / "run" / "model", directory, options)
            write()
            rmtree(directory / "run" / "checkpoint", ignore_errors=True)  # tens of gigabytes, and nothing is resumed
        console.print(f"{run.name}: {last_accuracy(known):.1%}, {known['wall_s']:.0f} s", highlight=False)
    draw(found, options.out.with_suffix(".png"))
    show(summary(found), console)
    console.print(f"written to {options.out}, curves next to it", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
