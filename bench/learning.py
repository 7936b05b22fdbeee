"""Does training on stale data learn as well as on fresh data? Many short runs of the quickstart's task, with seeds.

    headway bench learning staleness      η × objective: naive PPO, decoupled PPO, decoupled PPO with masks
    headway bench learning presets        every preset of `headway algorithms` at η = 4
    headway bench learning interruption   running sequences at a swap: keep, recompute or drain, at η = 4
    headway bench learning adaptive       η fixed at either bound, and η that moves between them
    headway bench learning real           a real model on one GPU: η = 0, 4 and 8 on GSM8K; give --model

Each run is `headway train` in a process of its own. What a record at `--out` already holds is not run again, so a bench
goes on where it stopped, on any machine: `--only` chooses runs by name, `--budget-s` begins none after that many
seconds, and `--minutes` ends each run in order after that time, at its last step. Runs that are compared have the same
steps, batches and hyper-parameters, and start from the same model.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import RESULTS_DIR, Message, Record, versions

if TYPE_CHECKING:
    from rich.console import Console

CONFIG = Path("configs/quickstart.toml")
UNBOUNDED = 1_000_000
ETAS = (0, 1, 4, 16, UNBOUNDED)
PRESETS = ("areal", "grpo", "dapo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "ppo")
REAL_CONFIG, REAL_ETAS = Path("configs/gsm8k_qwen.toml"), (0, 4, 8)
END_S = 120.0

# Where stale data hurts: several optimizer steps a batch, and steps ten times as large as the quickstart's would be.
HARD = ("--trainer.minibatches=4", "--trainer.lr=6e-4", "--trainer.warmup_steps=3")
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


def preset_runs(seeds: int) -> list[Run]:
    _, settings = bound(4)
    shared = (*settings, "--trainer.minibatches=2", "--trainer.lr=2e-4")
    return [Run(preset, seed, (*shared, f"--algorithm.preset={preset}")) for seed in range(seeds) for preset in PRESETS]


def interruption_runs(seeds: int) -> list[Run]:
    _, settings = bound(4)
    kinds = ("recompute", "keep", "drain")
    return [Run(kind, seed, (*settings, f"--engine.kv_on_swap={kind}")) for seed in range(seeds) for kind in kinds]


def adaptive_runs(seeds: int) -> list[Run]:
    arms = {"eta=1": bound(1)[1], "eta=8": bound(8)[1]}
    arms["eta from 1 to 8"] = (*arms["eta=8"], "--staleness.min_staleness=1", "--staleness.min_ess=0.9")
    return [Run(arm, seed, (*HARD, *settings)) for seed in range(seeds) for arm, settings in arms.items()]


def real_runs(seeds: int) -> list[Run]:
    return [Run(*bound(eta)[:1], seed, bound(eta)[1]) for seed in range(seeds) for eta in REAL_ETAS]


RUNS = {
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
        _headway("sft", str(CONFIG), f"--sft.out={model}", f"--run.dir={root / 'warmup' / 'run'}")
    return model


def settings_of(run: Run, options: argparse.Namespace) -> list[str]:
    shared = [
        *("--metrics.tensorboard=false", "--checkpoint.every=1000", f"--evaluate.every={options.evaluate_every}"),
        *(f"--run.steps={options.steps}", f"--run.seed={run.seed}", f"--evaluate.limit={options.limit}"),
        f"--trainer.batch_groups={options.batch_groups}",
    ]
    return [*shared, *run.settings, *options.overrides]


def play(run: Run, options: argparse.Namespace, model: Path) -> Message:
    directory = run.directory(options.root)
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    asked, places = settings_of(run, options), (f"--model.path={model}", f"--run.dir={directory / 'run'}")
    _headway("train", str(options.config), *asked, *places, seconds=60 * options.minutes)
    return {"arm": run.arm, "seed": run.seed, "settings": asked, **figures(directory / "run")}


def _headway(*arguments: str, seconds: float = 0.0) -> None:
    """Run a command; after this many seconds it is interrupted once, as a person would, and ends in order."""
    process = subprocess.Popen([sys.executable, "-m", "headway.cli", *arguments], stdout=subprocess.DEVNULL)
    try:
        code = process.wait(seconds or None)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        code = process.wait(END_S) * 0
    finally:
        process.kill()
    if code:
        raise subprocess.CalledProcessError(code, process.args)


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


def _of_arm(own: list[Message]) -> Message:
    last = [one["accuracies"][-1][2] for one in own]
    names = ("wall_s", "tokens_per_s", "staleness_mean", "effective_sample_size", "behaviour_kl")
    means = {name: statistics.mean(one[name] for one in own) for name in names}
    accuracy = {"mean": statistics.mean(last), "least": min(last), "most": max(last)}
    return {"num_seeds": len(own), "accuracy": accuracy, **means}


def draw(found: list[Message], out: Path) -> None:
    """Held-out accuracy by training step: a line for each arm's mean, a band for its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for arm in dict.fromkeys(one["arm"] for one in found):
        curves = [one["accuracies"] for one in found if one["arm"] == arm]
        steps = [point[0] for point in curves[0]]
        heights = list(zip(*([point[2] for point in curve] for curve in curves), strict=False))
        steps = steps[: len(heights)]
        (line,) = axes.plot(steps, [statistics.mean(height) for height in heights], label=arm)
        low, high = [min(height) for height in heights], [max(height) for height in heights]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    axes.set_xlabel("training step")
    axes.set_ylabel("held-out accuracy")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


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
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-groups", type=int, default=32)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--limit", type=int, default=256, help="held-out problems of an evaluation")
    parser.add_argument("--only", default="", help="run only what has this in its name, such as 'eta=4, seed 1'")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no run after this many seconds")
    parser.add_argument("--minutes", type=float, default=0.0, help="end each run after this many minutes; 0: never")
    parser.add_argument("--model", type=Path, help="directory of the model; without it the small one is made")
    parser.add_argument("--root", type=Path, default=Path("runs/learning"), help="where runs and their figures go")
    parser.add_argument("--out", type=Path, help="where the record goes")
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    options.out = options.out or RESULTS_DIR / f"learning_{options.what}.json"
    options.root = options.root / options.what
    options.config = CONFIG
    if options.what == "real":
        options.config = REAL_CONFIG
        if options.model is None:
            parser.error("real needs --model, the directory of the model")
    return options


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options = Console(), parse(arguments)
    record = Record("learning", arguments)
    model, began = model_of(options), time.monotonic()
    found: list[Message] = json.loads(options.out.read_text())["runs"] if options.out.is_file() else []
    for run in RUNS[options.what](options.seeds):
        known = [one for one in found if (one["arm"], one["seed"]) == (run.arm, run.seed)]
        if known and known[0]["settings"] != settings_of(run, options):
            sys.exit(f"{options.out} has {run.name} with other settings; name another --out")
        if known or options.only not in run.name or time.monotonic() - began > options.budget_s:
            continue
        found.append(play(run, options, model))
        console.print(f"{run.name}: {found[-1]['accuracies'][-1][2]:.1%}, {found[-1]['wall_s']:.0f} s")
        # After each run, so that nothing is lost when the next one is killed.
        record.write(options.out, versions=versions("torch", "transformers"), figures=summary(found), runs=found)
    if not found:
        sys.exit(f"no run has {options.only!r} in its name")
    draw(found, options.out.with_suffix(".png"))
    show(summary(found), console)
    console.print(f"written to {options.out}, curves beside it", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
