"""The examples that learn on a CPU, one run each: how reward and held-out accuracy grow, and what it took.

Each is warmed up and trained by the two commands that its config names, with the overrides given here. A run that is
finished already is read and not repeated, so that examples can be run one by one.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from common import RESULTS_DIR, Message, Record, versions

EXAMPLES = ("write_code", "guess_number", "use_calculator", "agent")


def run(name: str, overrides: list[str]) -> None:
    """Warm up and train, where that is still to do."""
    headway = [sys.executable, "-m", "headway.cli"]
    config = f"configs/{name}.toml"
    if not Path(f"runs/{name}-warmup/model").is_dir():
        subprocess.run([*headway, "sft", config, *overrides], check=True)
    if not Path(f"runs/{name}/summary.json").is_file():
        subprocess.run([*headway, "train", config, "--overwrite", *overrides], check=True)


def curve(name: str) -> Message:
    """What the run's record says: rewards by step, evaluations, seconds of training."""
    from headway.record.events import Evaluated
    from headway.record.run import Run

    found = Run.read(f"runs/{name}")
    steps = [step.event for step in found.steps]
    return {
        "steps": [step.version for step in steps],
        "reward": [None if step.reward is None else round(step.reward, 4) for step in steps],
        "evaluations": [
            {"version": event.version, "accuracy": event.accuracy, "interval": event.interval, "num": event.num}
            for event in found.all(Evaluated)
        ],
        "training_s": round(steps[-1].time - steps[0].started, 1) if steps else 0.0,
        "tokens": sum(step.tokens for step in steps),
        "trajectories": sum(step.num_trajectories for step in found.steps),
    }


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="headway bench examples", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=EXAMPLES, help="which of them")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "examples.json", help="where the record goes")
    return parser.parse_known_args(arguments)


def main(arguments: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    (options, overrides), record = parse(arguments), Record("examples", arguments)
    found: Message = {}
    table = Table("example", "held out before", "after", "reward at first", "at last", "steps", "seconds")
    for name in options.names:
        run(name, overrides)
        made = found[name] = curve(name)
        ends = [made["evaluations"][0]["accuracy"], made["evaluations"][-1]["accuracy"]]
        ends += [made["reward"][0], made["reward"][-1]]
        table.add_row(name, *(f"{end:.3f}" for end in ends), str(len(made["steps"])), f"{made['training_s']:.0f}")
    record.write(options.out, versions=versions("torch", "transformers"), figures=found)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
