"""How far the engine's log-probs are from the trainer's for the same tokens and weights, on a real model, type by type.

The engine samples completions to the prompts of a config at temperature 1; the trainer scores the very tokens. The KL
divergence a token is estimated over what the engine sampled by r − 1 − log r with r = π_trainer / π_engine, which is
never negative and right in the mean.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import RESULTS_DIR, Message, Record, versions

if TYPE_CHECKING:
    from rich.console import Console

    from headway.config import Config
    from headway.launch import Prepared


def load(options: argparse.Namespace, dtype: str, directory: Path) -> "Config":
    from headway.config import load as load_config

    given = [f"--model.dtype={dtype}", f"--run.dir={directory}", "--run.runtime=inline"]
    return load_config(options.config, [*given, *options.overrides])


async def completions(prepared: "Prepared", options: argparse.Namespace) -> list[tuple[Any, Any]]:
    """Of each request its whole tokens, and the log-probs of those that were sampled."""
    from headway.engine.embedded.service import EmbeddedEngine
    from headway.types import Completion, Request, RequestKey

    config = prepared.config
    engine = EmbeddedEngine(config.model.path, config.model.dtype, config.engine, False, 0.3)
    await engine.open()

    async def one(number: int) -> tuple[Any, Any]:
        prompt = prepared.prompts[number % len(prepared.prompts)].tokens
        request = Request(RequestKey(number, 0), prompt, prepared.sampling, config.run.seed)
        async for item in engine.generate(request):
            if isinstance(item, Completion):
                return np.concatenate([prompt, item.tokens]), item.logprobs
        raise AssertionError(f"request {number} ended without a completion")

    try:
        return list(await asyncio.gather(*map(one, range(options.completions))))
    finally:
        await engine.close()


def measure(options: argparse.Namespace, dtype: str, directory: Path) -> Message:
    from headway import launch
    from headway.training.trainer import Trainer

    prepared = launch.prepare(load(options, dtype, directory))
    made = asyncio.run(completions(prepared, options))
    config = prepared.config
    trainer = Trainer(config.model, config.trainer, config.algorithm, None)
    scores = trainer.score(tuple(tokens for tokens, _ in made), 1.0)
    engine = np.concatenate([logprobs for _, logprobs in made]).astype(np.float64)
    parts = [row[len(row) - len(own) :] for row, (_, own) in zip(scores.logprobs, made, strict=True)]
    gap = np.concatenate(parts).astype(np.float64) - engine
    return {
        "num_tokens": len(gap),
        "mean_abs": float(np.abs(gap).mean()),
        "max_abs": float(np.abs(gap).max()),
        "kl": float((np.expm1(gap) - gap).mean()),
        "quantiles": {str(q): float(np.quantile(np.abs(gap), q)) for q in (0.5, 0.9, 0.99, 0.999)},
        "entropy_of_sampled": float(-engine.mean()),
    }


def show(found: dict[str, Message], console: "Console") -> None:
    from rich.table import Table

    table = Table("type", "mean |Δ log-prob|", "99% below", "max", "KL a token", "tokens")
    for dtype, item in found.items():
        figures = [f"{item['mean_abs']:.2e}", f"{item['quantiles']['0.99']:.2e}", f"{item['max_abs']:.3f}"]
        table.add_row(dtype, *figures, f"{item['kl']:.2e}", f"{item['num_tokens']:,}")
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="whose model, prompts, engine and trainer are compared")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--completions", type=int, default=512, help="how many are sampled")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "parity.json", help="where the record goes")
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    return options


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options, record = Console(), parse(arguments), Record("parity", arguments)
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "config", "overrides")}
    found: dict[str, Message] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in options.dtypes:
            found[dtype] = measure(options, dtype, Path(scratch) / dtype)
            record.write(options.out, versions=versions("torch", "transformers"), settings=settings, repetitions=found)
    show(found, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
