"""Memory and time of a training step with adapters against training all weights, and what engines are sent.

    headway bench lora --shape qwen2.5-1.5b --device cuda

Each arm is a process of its own: a trainer of the same random model trains the same long-tailed sequences for a few
steps. On a GPU memory is what torch allocated there, on a CPU the process's own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from common import RESULTS_DIR, Message, Record, versions
from shapes import SHAPES, LongTailed, model_directory, trained_groups, vocabulary_of

if TYPE_CHECKING:
    from rich.console import Console

GROUP_SIZE, PROMPT = 8, 64
ARMS = {"all weights": 0, "adapters": 16}


def measure(options: argparse.Namespace) -> Message:
    """One arm, in this process."""
    import torch

    from headway.algorithm import AlgorithmSection
    from headway.config import LoraSection, ModelSection, TrainerSection
    from headway.training.trainer import Trainer
    from headway.types import Batch

    model = ModelSection(path=str(options.model), dtype=options.dtype, lora=LoraSection(rank=options.rank))
    section = TrainerSection(device=options.device, token_budget=options.token_budget, lr=1e-6)
    trainer = Trainer(model, section, AlgorithmSection(), None)
    drawn = LongTailed(options.mean, options.longest).lengths(options.groups, GROUP_SIZE)
    groups = trained_groups(drawn, PROMPT, vocabulary_of(options.model))
    held, seconds = gib(options.device, peak=False), []
    for version in range(options.steps):
        started = time.perf_counter()
        report = trainer.train(Batch(version, tuple(groups)))
        assert not report.skipped, report.skipped
        seconds.append(time.perf_counter() - started)
    update = trainer.publish()
    return {
        "held_gib": held,
        "peak_gib": gib(options.device, peak=True),
        "seconds": seconds,
        "trained_parameters": sum(master.numel() for master in trainer.masters.named.values()),
        "update_bytes": update.num_bytes,
        "torch_threads": torch.get_num_threads(),
    }


def gib(device: str, peak: bool) -> float:
    import torch

    if device == "cpu":
        return float(round(psutil.Process().memory_info().rss / 2**30, 2))
    read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
    return round(read(device) / 2**30, 2)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench lora", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--mean", type=float, default=256)
    parser.add_argument("--longest", type=int, default=960)
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, help="measure one arm in this process and print it")
    parser.add_argument("--model", type=Path, help="its model directory")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "lora.json", help="where the record goes")
    return parser.parse_args(arguments)


def show(arms: Message, console: "Console") -> None:
    from rich.table import Table

    table = Table("trained", "parameters", "GiB held", "GiB at the peak", "s a step", "MiB an update")
    for name, arm in arms.items():
        memory = [f"{arm[key]:.2f}" for key in ("held_gib", "peak_gib")]
        rest = [f"{min(arm['seconds']):.2f}", f"{arm['update_bytes'] / 2**20:,.1f}"]
        table.add_row(name, f"{arm['trained_parameters']:,}", *memory, *rest)
    console.print(table)


def main(arguments: list[str]) -> None:
    from rich.console import Console

    options = parse(arguments)
    if options.rank is not None:
        print(json.dumps(measure(options)))
        return
    record, arms = Record("lora", arguments), {}
    with tempfile.TemporaryDirectory() as parent:
        model = model_directory(options.shape, Path(parent), options.device, options.dtype)
        for name, rank in ARMS.items():
            command = [sys.executable, __file__, *arguments, f"--rank={rank}", f"--model={model}"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            arms[name] = json.loads(done.stdout.splitlines()[-1])
    ratio = arms["adapters"]["peak_gib"] / arms["all weights"]["peak_gib"]
    found = {"held_ratio": arms["adapters"]["held_gib"] / arms["all weights"]["held_gib"], "peak_ratio": ratio}
    record.write(options.out, versions=versions("torch", "transformers", "peft"), repetitions=arms, figures=found)
    show(arms, Console())
    print(f"peak memory: {ratio:.2f} of training all weights; written to {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
