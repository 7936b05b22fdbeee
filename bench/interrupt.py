"""Interruptible generation against draining before each update, engine and trainer on one GPU, everything else equal.

Three arms of `headway bench async_gpu` at one size and one bound η: under `keep` and `recompute` new weights reach
sequences in the middle; under `drain` the engine lets all running sequences end before it takes them, and begins
nothing new meanwhile. Arguments are those of that bench.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from async_gpu import POLICIES, measure, parse
from common import RESULTS_DIR, Message, Record

if TYPE_CHECKING:
    from rich.console import Console


def show(results: list[Message], console: "Console") -> None:
    from rich.table import Table

    table = Table("at a swap", "tokens/s", "against draining", "pause ms mean", "max", "mean staleness")
    drained = next(item["tokens_per_s"] for item in results if item["kv"] == "drain")
    for item in results:
        pauses = [f"{item['pause_ms'][key]:.1f}" for key in ("mean", "max")]
        ratio, stale = f"{item['tokens_per_s'] / drained:.2f}×", f"{item['staleness_mean']:.2f}"
        table.add_row(item["kv"], f"{item['tokens_per_s']:,.0f}", ratio, *pauses, stale)
    console.print(table)


def main(arguments: list[str]) -> None:
    from rich.console import Console

    arms = [f"16x16,eta=4,kv={kv}" for kv in POLICIES]
    console = Console(width=140)
    options = parse(["--arms", *arms, "--out", str(RESULTS_DIR / "interrupt.json"), *arguments])
    with tempfile.TemporaryDirectory() as scratch:
        results = asyncio.run(measure(options, Path(scratch), Record("interrupt", arguments), console))
    show(results, console)


if __name__ == "__main__":
    main(sys.argv[1:])
