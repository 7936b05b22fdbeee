"""Interruptible generation against draining before each update, engine and trainer on one GPU, everything else equal.

Three runs of `headway train` over the same forced long-tailed lengths at one bound η: under `keep` and `recompute` new
weights reach sequences in the middle; under `drain` the engine lets all running sequences end before it takes them,
and begins nothing new meanwhile. Arguments are those of `headway bench async_gpu`.
"""

import sys
import tempfile
from pathlib import Path

from async_gpu import POLICIES, parse, train
from common import RESULTS_DIR, Message, Record, versions
from shapes import model_directory


def main(arguments: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    options = parse(["--etas", "4", "--sizes", "16x16", "--out", str(RESULTS_DIR / "interrupt.json"), *arguments])
    record = Record("interrupt", arguments)
    found: dict[str, Message] = {}
    with tempfile.TemporaryDirectory() as scratch:
        parent = options.keep or Path(scratch)
        model = model_directory(options.shape, parent, options.device)
        for options.kv in POLICIES:
            directory = parent / options.kv
            directory.mkdir(parents=True, exist_ok=True)
            with console.status(options.kv):
                found[options.kv] = train(options, directory, model, options.sizes[0], options.etas[0])
            console.print(f"{options.kv}: {found[options.kv]['tokens_per_s']:,.0f} tokens/s", highlight=False)
            settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "keep")}
            record.write(options.out, versions=versions("torch"), settings=settings, repetitions=found)
    table = Table("at a swap", "tokens/s", "against draining", "pause ms mean", "mean staleness")
    for kv, item in found.items():
        ratio = item["tokens_per_s"] / found["drain"]["tokens_per_s"]
        pause, stale = f"{item['pause_ms']['mean']:.1f}", f"{item['staleness_mean']:.2f}"
        table.add_row(kv, f"{item['tokens_per_s']:,.0f}", f"{ratio:.2f}×", pause, stale)
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
