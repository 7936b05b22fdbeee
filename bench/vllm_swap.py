"""What new weights cost a vLLM server: how long it stands still, and how far its log-probs are from transformers'.

An engine of random weights, served by vLLM, generates for a full batch of requests. New weights, a little different,
are published, written next to the live ones and swapped in, several times, under each policy the server can do.
Measured: the time of staging (generation goes on), the pause (it does not), tokens a second around a swap, and mean and
largest differences of log-probs: of a probe between vLLM and transformers under the last weights, and of sampled tokens
between what they were sampled with and vLLM's own score of them, each under the version it is stamped with.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import RESULTS_DIR, Message, Record, versions
from shapes import SHAPES, model_directory

if TYPE_CHECKING:
    from rich.console import Console

    from headway.engine.vllm.engine import VllmEngine
    from headway.types import Completion, Request

NOISE = 1e-3
PROBE_TOKENS, NUM_PROBES = 48, 4


class Weights:
    """A model whose weights are changed a little and published, version by version."""

    def __init__(self, model: Path, dtype: str):
        import torch

        from headway.model.loading import load_model
        from headway.weights.publish import Publisher

        self.model = load_model(str(model), getattr(torch, dtype)).eval().requires_grad_(False)
        self._publisher = Publisher()

    def publish(self, version: int) -> Any:
        import torch

        from headway.model.loading import named_weights

        torch.manual_seed(version)
        for parameter in self.model.parameters():
            parameter.mul_(1 + NOISE * torch.randn_like(parameter))
        return self._publisher.publish(version, named_weights(self.model))


def requests_of(options: argparse.Namespace, vocabulary: int, call: int) -> "list[Request]":
    from headway.types import Request, RequestKey, Sampling

    draws, sampling = np.random.default_rng(call), Sampling(max_tokens=options.output_length)
    prompts = [draws.integers(16, vocabulary, options.prompt_length).astype(np.int32) for _ in range(options.requests)]
    return [Request(RequestKey(group, 0, call), prompt, sampling, seed=0) for group, prompt in enumerate(prompts)]


async def complete(engine: "VllmEngine", request: "Request") -> "Completion":
    from headway.types import Completion

    async for item in engine.generate(request):
        if isinstance(item, Completion):
            return item
    raise AssertionError(f"request {request.key} ended without a completion")


async def speed(engine: "VllmEngine", seconds: float) -> float:
    """Tokens a second over so long."""
    before, started = (await engine.stats()).num_generated, time.perf_counter()
    await asyncio.sleep(seconds)
    return ((await engine.stats()).num_generated - before) / (time.perf_counter() - started)


async def measure(engine: "VllmEngine", options: argparse.Namespace, weights: Weights, kv: Any) -> Message:
    swaps, vocabulary = [], weights.model.config.vocab_size
    gaps: list[float] = []
    for number in range(options.swaps):
        requests = requests_of(options, vocabulary, 1000 * len(kv) + number)
        tasks = [asyncio.create_task(complete(engine, request)) for request in requests]
        await asyncio.sleep(options.seconds)
        before = await speed(engine, options.seconds)
        version = engine.version + 1
        update = await asyncio.to_thread(weights.publish, version)
        started = time.perf_counter()
        await engine.stage_weights(update)
        stage_s = time.perf_counter() - started
        report = await engine.swap(version, kv)
        after = await speed(engine, options.seconds)
        done = await asyncio.gather(*tasks)
        if report.num_interrupted == 0:
            raise AssertionError("every request had ended before the swap; raise --output-length or lower --seconds")
        swaps.append({"stage_s": stage_s, "pause_ms": report.pause_ms, "interrupted": report.num_interrupted})
        swaps[-1] |= {"tokens_per_s_before": before, "tokens_per_s_after": after}
        gaps += await newest_gaps(engine, requests, done, options.scored)
    return {"swaps": swaps, "logprob_gap": {"mean": float(np.mean(gaps)), "max": float(np.max(gaps))}}


async def newest_gaps(engine: "VllmEngine", requests: Any, done: Any, limit: int) -> list[float]:
    """Of tokens of the newest version: between what they were sampled with and vLLM's score of the whole sequence."""
    found: list[float] = []
    for request, completion in list(zip(requests, done, strict=True))[:limit]:
        tokens = np.concatenate([request.tokens, completion.tokens])
        scored = (await engine.score((tokens,), 1.0)).logprobs[0][len(request.tokens) :]
        found += np.abs(completion.logprobs - scored)[completion.versions == engine.version].tolist()
    return found


async def parity(engine: "VllmEngine", weights: Weights) -> Message:
    """A probe scored by vLLM and by transformers' module under the same weights."""
    from headway.engine.vllm.model_copy import score

    draws = np.random.default_rng(0)
    probe = draws.integers(0, weights.model.config.vocab_size, (NUM_PROBES, PROBE_TOKENS)).astype(np.int32)
    theirs = (await engine.score(tuple(probe), 1.0)).logprobs
    gaps = np.abs(np.concatenate([a - score(weights.model, b) for a, b in zip(theirs, probe, strict=True)]))
    return {"mean": float(gaps.mean()), "max": float(gaps.max())}


async def run(options: argparse.Namespace, model: Path, console: "Console") -> Message:
    from headway.config import EngineSection
    from headway.engine.vllm.engine import VllmEngine
    from headway.engine.vllm.messages import PROCESSED

    context = -(-(options.prompt_length + options.output_length + 64) // 64) * 64
    section = EngineSection(
        kind="vllm",
        device=options.device,
        vllm_python=str(options.vllm_python),
        vllm_args=options.vllm_args,
        max_num_seqs=options.requests,
        max_context=context,
        kv_tokens=2 * options.requests * context,
        threads=options.threads,
        chunk_tokens=8,
    )
    engine = VllmEngine(str(model), options.dtype, section, "", PROCESSED, 900.0)
    started = time.perf_counter()
    await engine.open()
    try:
        facts = engine._connection.facts
        ready = {"open_s": time.perf_counter() - started, "vllm": facts.version, "spans": facts.has_spans}
        console.print(f"vLLM {facts.version}, spans: {facts.has_spans}, open after {ready['open_s']:.0f} s")
        weights = Weights(model, options.dtype)
        policies = ["keep", "recompute"] if facts.has_spans else ["recompute"]
        found = {kv: await measure(engine, options, weights, kv) for kv in policies}
        return {**ready, "policies": found, "parity": await parity(engine, weights)}
    finally:
        await engine.close()


def show(found: Message, console: "Console") -> None:
    from rich.table import Table

    table = Table("kv", "pause ms mean / max", "staging s", "tokens/s before", "after", "Δ log-prob mean / max")
    for kv, measured in found["policies"].items():
        swaps = measured["swaps"]
        pauses = [swap["pause_ms"] for swap in swaps]
        means = {name: float(np.mean([swap[name] for swap in swaps])) for name in swaps[0]}
        table.add_row(
            kv,
            f"{np.mean(pauses):.1f} / {max(pauses):.1f}",
            f"{means['stage_s']:.3f}",
            f"{means['tokens_per_s_before']:,.0f}",
            f"{means['tokens_per_s_after']:,.0f}",
            f"{measured['logprob_gap']['mean']:.2g} / {measured['logprob_gap']['max']:.2g}",
        )
    console.print(table)
    console.print(f"against transformers: mean {found['parity']['mean']:.2g}, largest {found['parity']['max']:.2g}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench vllm_swap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"), help="vLLM's interpreter")
    parser.add_argument("--vllm-args", default="", help="further arguments of `vllm serve`")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="shape of the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the server")
    parser.add_argument("--requests", type=int, default=16, help="sequences decoded together")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--output-length", type=int, default=512)
    parser.add_argument("--swaps", type=int, default=3, help="swaps under each policy")
    parser.add_argument("--seconds", type=float, default=2.0, help="of generation before and after each")
    parser.add_argument("--scored", type=int, default=4, help="completions of each round whose log-probs are compared")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "vllm_swap.json", help="where the record goes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options, record = Console(), parse(arguments), Record("vllm_swap", arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        model = model_directory(options.shape, Path(scratch), "cpu", options.dtype)
        found = asyncio.run(run(options, model, console))
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "vllm_python")}
    record.write(options.out, versions=versions("torch", "transformers"), settings=settings, figures=found)
    show(found, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
