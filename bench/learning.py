"""Does training on stale data learn as well as on fresh data? Many short runs of the quickstart's task, with seeds.

    headway bench learning staleness      η × objective: naive PPO, decoupled PPO, decoupled PPO with masks
    headway bench learning presets        every preset of `headway algorithms` that needs no critic, at η = 4

Each run is `headway train` in a process of its own and takes minutes; its figures are kept beside its record, so that
a bench which was interrupted goes on where it stopped, and `--only` does some runs now and the others later. Runs that
are compared have the same steps, batches and hyper-parameters, and start from the same warmed-up model.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import RESULTS_DIR, Message, Record, versions

if TYPE_CHECKING:
    from rich.console import Console

CONFIG = Path("configs/quickstart.toml")
UNBOUNDED = 1_000_000
ETAS = (0, 1, 4, 16, UNBOUNDED)
PRESETS = ("areal", "grpo", "dapo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo")

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


def warmed_up(root: Path) -> Path:
    """The model that all runs start from, made once."""
    model = root / "warmup" / "model"
    if not (model / "config.json").is_file():
        _headway("sft", str(CONFIG), f"--sft.out={model}", f"--run.dir={root / 'warmup' / 'run'}")
    return model


def play(run: Run, options: argparse.Namespace, model: Path) -> Message:
    """The figures of a run, from disk where it was played before; one that was interrupted is played again."""
    directory = run.directory(options.root)
    kept = directory / "figures.json"
    settings = [
        *("--metrics.tensorboard=false", "--checkpoint.every=1000", f"--evaluate.every={options.evaluate_every}"),
        *(f"--run.steps={options.steps}", f"--run.seed={run.seed}", f"--evaluate.limit={options.limit}"),
        *(f"--trainer.batch_groups={options.batch_groups}", f"--model.path={model}", f"--run.dir={directory / 'run'}"),
    ]
    asked = [*run.settings, *settings[:-2], *options.overrides]
    if kept.is_file() and (found := json.loads(kept.read_text()))["settings"] == asked:
        return dict(found)
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    _headway("train", str(CONFIG), *settings, *run.settings, *options.overrides)
    found = {"arm": run.arm, "seed": run.seed, "settings": asked, **figures(directory / "run")}
    kept.write_text(json.dumps(found))
    return found


def _headway(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "headway.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


def figures(run: Path) -> Message:
    """Accuracy by version and by second, and of the training steps what stale data did to them."""
    from headway.record.events import Evaluated
    from headway.record.run import Run

    folded = Run.read(run)
    trained = [step.event for step in folded.steps]
    started, ended = folded.clock.training()[0]
    wall_s = ended - started

    def mean(name: str) -> float:
        values = [float(value) for event in trained if (value := event.metrics.get(name)) is not None]
        return statistics.mean(values)

    return {
        "accuracies": [
            [event.version, round(event.time - started, 2), event.accuracy] for event in folded.all(Evaluated)
        ],
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
    parser.add_argument("what", choices=("staleness", "presets"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-groups", type=int, default=32)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--limit", type=int, default=256, help="held-out problems of an evaluation")
    parser.add_argument("--only", default="", help="play runs whose name contains this; the record has what is there")
    parser.add_argument("--root", type=Path, default=Path("runs/learning"), help="where runs and their figures go")
    parser.add_argument("--out", type=Path, help="where the record goes")
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    options.out = options.out or RESULTS_DIR / f"learning_{options.what}.json"
    options.root = options.root / options.what
    return options


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options = Console(), parse(arguments)
    record = Record("learning", arguments)
    runs = staleness_runs(options.seeds) if options.what == "staleness" else preset_runs(options.seeds)
    model = warmed_up(options.root.parent)
    found = []
    for run in runs:
        if options.only in run.name:
            found.append(play(run, options, model))
            console.print(f"{run.name}: {found[-1]['accuracies'][-1][2]:.1%}, {found[-1]['wall_s']:.0f} s")
        elif (kept := run.directory(options.root) / "figures.json").is_file():
            found.append(json.loads(kept.read_text()))
    arms = summary(found)
    record.write(options.out, versions=versions("torch", "transformers"), figures=arms, runs=found)
    draw(found, options.out.with_suffix(".png"))
    show(arms, console)
    console.print(f"written to {options.out}, curves beside it", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
