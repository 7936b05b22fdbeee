"""Dynamic micro-batches against a fixed number of sequences in each: the same data, the same trainer, the same run.

Fixed: sequences in the order they come, as many in every micro-batch as fit even if all were as long as can be,
which is all one can do without looking at lengths; or, with hindsight, as many as happen to fit this batch everywhere.
Dynamic: Algorithm 1, balanced by the number of sequences as in the paper, and by FLOPs as Headway does it. TFLOP/s by
the count of `headway bench trainer`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS_DIR, Message, Record, spread, versions
from trainer import (
    PACKAGES,
    add_workload,
    device_facts,
    headway_step,
    make_groups,
    make_trainer,
    measure,
    plain_options,
    prepare,
)

if TYPE_CHECKING:
    from rich.console import Console

    from headway.training.trainer import Trainer

PAPER_RATIO = 1.06
"""Of the paper's ablation for its 1B model: 427.4 against 404.4 TFLOP/s."""

Arrange = Callable[[list[int], int], list[list[int]]]
"""(lengths, token budget) -> indices of the sequences of each micro-batch."""


def fixed(lengths: list[int], token_budget: int, longest: int) -> list[list[int]]:
    """As many sequences per micro-batch as fit if all are as long as can be."""
    size = token_budget // longest
    return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]


def with_hindsight(lengths: list[int], token_budget: int) -> list[list[int]]:
    """The largest number of sequences per micro-batch with which none exceeds the budget."""
    for size in range(len(lengths), 0, -1):
        parts = [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
        if all(sum(lengths[i] for i in part) <= token_budget for part in parts):
            return parts
    raise AssertionError("a sequence is longer than the token budget")


def arrangements(cost: Callable[[int], float], longest: int) -> dict[str, Arrange]:
    from headway.training.batches import arranged
    from headway.training.packing import pack

    return {
        "fixed": partial(fixed, longest=longest),
        "fixed, with hindsight": with_hindsight,
        "dynamic, as in the paper": pack,
        "dynamic, by FLOPs": partial(arranged, cost=cost),
    }


def arranged_trainer() -> "type[Any]":
    from headway.training.batches import MicroBatch, assemble
    from headway.training.trainer import Trainer
    from headway.types import Sample

    class ArrangedTrainer(Trainer):
        """A trainer with the arrangement under test."""

        arrange: Arrange

        def _pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
            lengths = [len(sample.tokens) for sample in samples]
            parts = self.arrange(lengths, self.section.token_budget)
            return [assemble([samples[i] for i in part], self.device) for part in parts]

    return ArrangedTrainer


def facts(parts: list[list[int]], lengths: list[int], token_budget: int, cost: Callable[[int], float]) -> Message:
    costs = [sum(cost(lengths[i]) for i in part) for part in parts]
    return {
        "num_micro_batches": len(parts),
        "fill": round(sum(lengths) / (len(parts) * token_budget), 3),
        "costliest_over_mean": round(max(costs) * len(costs) / sum(costs), 3),
    }


def compete(trainer: "Trainer", groups: list[Any], lengths: list[int], options: argparse.Namespace) -> Message:
    """Arms take turns, so that what disturbs one disturbs its neighbour too."""
    from headway.model.shape import flops

    cost = partial(flops, shape=options.model_shape)
    totals = [length + options.prompt for length in lengths]
    arms: Message = {}
    for _ in range(options.rounds):
        for name, arrange in arrangements(cost, options.longest).items():
            trainer.arrange = arrange  # type: ignore[attr-defined]
            found = measure(partial(headway_step, trainer, groups), options, options.repetitions)
            if name not in arms:
                arms[name] = found | facts(arrange(totals, options.token_budget), totals, options.token_budget, cost)
            else:
                arms[name]["seconds"] += found["seconds"]
                arms[name]["tflops"] += found["tflops"]
    return arms


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench packing", description=__doc__.splitlines()[0])
    add_workload(parser)
    parser.add_argument("--rounds", type=int, default=2, help="turns of every arm")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "packing.json", help="where the record goes")
    parser.set_defaults(micro_batches=6, repetitions=2, warm_up=1)
    return parser.parse_args(arguments)


def show(arms: Message, figures: Message, console: "Console") -> None:
    from rich.table import Table

    table = Table("packing", "TFLOP/s best", "median", "worst", "s a step", "micro-batches", "fill", "costliest ÷ mean")
    for name, arm in arms.items():
        speeds = [f"{value:.3g}" for value in spread(arm["tflops"]).values()]
        shape = [str(arm[key]) for key in ("num_micro_batches", "fill", "costliest_over_mean")]
        table.add_row(name, *speeds, f"{min(arm['seconds']):.3f}", *shape)
    console.print(table)
    for name, ratio in figures["ratio_to_fixed"].items():
        console.print(f"{name}: {ratio:.3f}× fixed (the paper: {PAPER_RATIO}×)")


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=140)
    options = parse(arguments)
    record = Record("packing", arguments)
    lengths = prepare(options)
    groups = make_groups(lengths, options)
    trainer = make_trainer(options, arranged_trainer())
    arms = compete(trainer, groups, lengths, options)
    best = {name: spread(arm["tflops"])["best"] for name, arm in arms.items()}
    ratios = {name: value / best["fixed"] for name, value in best.items() if name != "fixed"}
    figures = {"tflops": best, "ratio_to_fixed": ratios, "paper": PAPER_RATIO}
    record.write(
        options.out,
        gpu=device_facts(options.device),
        versions=versions(*PACKAGES),
        settings=plain_options(options),
        workload={"lengths": lengths, "operations": options.operations},
        repetitions=arms,
        figures=figures,
    )
    show(arms, figures, console)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
