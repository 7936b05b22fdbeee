"""What new weights cost a running engine: how long it stands still, what is computed again, what log-probs become.

An engine of random weights decodes a full batch. New weights, a little different, are published, staged next to it and
swapped in, several times, under `keep` and under `recompute`. Measured: the time of staging (generation goes on), the
pause (it does not), tokens whose keys and values are computed again, tokens a second around a swap, and how far the
log-probs of tokens sampled after a swap are from those of the new weights over the whole sequence, which `keep` is not.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import RESULTS_DIR, Message, Record, versions
from shapes import SHAPES, model_directory, vocabulary_of

if TYPE_CHECKING:
    from rich.console import Console

    from headway.engine.embedded.scheduler import EngineCore

NOISE = 1e-3


def make_core(options: argparse.Namespace, model: Path, kv_tokens: int = 0) -> "EngineCore":
    import torch

    from headway.config import EngineSection
    from headway.engine.embedded.scheduler import EngineCore
    from headway.model.loading import load_model

    context = -(-(options.prompt_length + options.output_length + 64) // 64) * 64
    section = EngineSection(
        device=options.device,
        max_num_seqs=options.requests,
        max_context=context,
        kv_tokens=kv_tokens or 2 * options.requests * context,
        prefill_chunk=16384 if options.device == "cuda" else 512,
    )
    module: Any = load_model(str(model), getattr(torch, options.dtype))
    return EngineCore(module.to(options.device), section, context, False, lambda tokens: "")


def publisher_for(device: str) -> Any:
    import torch

    if device == "cpu":
        from headway.weights.publish import Publisher

        return Publisher()
    from headway.weights.cuda import DevicePublisher

    return DevicePublisher(torch.device(device))


def changed(core: "EngineCore", seed: int) -> dict[str, Any]:
    """The live weights with a little noise; tied ones stay one tensor."""
    import torch

    from headway.model.loading import named_weights

    made: dict[int, Any] = {}
    torch.manual_seed(seed)
    for tensor in named_weights(core.model).values():
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach() * (1 + NOISE * torch.randn_like(tensor))
    return {name: made[id(tensor)] for name, tensor in named_weights(core.model).items()}


def submit(core: "EngineCore", options: argparse.Namespace, vocabulary: int, call: int) -> dict[str, Any]:
    from headway.types import Request, RequestKey, Sampling

    draws = np.random.default_rng(call)
    requests = {}
    for group in range(options.requests):
        prompt = draws.integers(16, vocabulary, options.prompt_length).astype(np.int32)
        sampling = Sampling(max_tokens=options.output_length)
        request = Request(RequestKey(group, 0, call), prompt, sampling, seed=0)
        core.submit(request)
        requests[str(request.key)] = request
    return requests


def speed(core: "EngineCore", seconds: float, done: dict[str, Any]) -> float:
    """Tokens a second over about so long."""
    before, started = core.stats().num_generated, time.perf_counter()
    while core.has_work and time.perf_counter() - started < seconds:
        collect(core, done)
    return (core.stats().num_generated - before) / (time.perf_counter() - started)


def collect(core: "EngineCore", done: dict[str, Any]) -> None:
    from headway.types import Completion

    done.update({name: item for name, item in core.step() if isinstance(item, Completion)})


def measure(core: "EngineCore", options: argparse.Namespace, vocabulary: int, kv: Any) -> Message:
    publisher = publisher_for(options.device)
    swaps, gaps = [], []
    for number in range(options.swaps):
        done: dict[str, Any] = {}
        requests = submit(core, options, vocabulary, 1000 * len(kv) + number)
        speed(core, options.seconds, done)
        calm = speed(core, options.seconds, done)
        version = core.version + 1
        update = publisher.publish(version, changed(core, version))
        started = time.perf_counter()
        core.stage(update)
        stage_s = time.perf_counter() - started
        report = core.swap(version, kv)
        after = speed(core, options.seconds, done)
        swaps.append(
            {
                "stage_s": stage_s,
                "pause_ms": report.pause_ms,
                "recomputed": report.num_recomputed,
                "interrupted": report.num_interrupted,
                "tokens_per_s_before": calm,
                "tokens_per_s_after": after,
            }
        )
        while core.has_work:
            collect(core, done)
        gaps += logprob_gaps(core, requests, done, options.scored)
    publisher.close()
    if not gaps:
        raise AssertionError("every sequence had ended before the swap; raise --output-length or lower --seconds")
    return {"swaps": swaps, "logprob_gap": {"mean": float(np.mean(gaps)), "max": float(np.max(gaps))}}


def logprob_gaps(core: "EngineCore", requests: dict[str, Any], done: dict[str, Any], limit: int) -> list[float]:
    """Between what tokens were sampled with after the swap and their log-probs under the new weights alone."""
    found: list[float] = []
    for name, request in list(requests.items())[:limit]:
        completion = done[name]
        tokens = np.concatenate([request.tokens, completion.tokens])
        scored = core.score((tokens,), 1.0).logprobs[0][len(request.tokens) :]
        newest = completion.versions == core.version
        found += np.abs(completion.logprobs - scored)[newest].tolist()
    return found


def show(found: Message, console: "Console") -> None:
    from rich.table import Table

    table = Table(
        "kv", "pause ms mean / max", "staging s", "recomputed", "tokens/s before", "after", "Δ log-prob mean / max"
    )
    for kv, measured in found.items():
        swaps = measured["swaps"]
        pauses = [swap["pause_ms"] for swap in swaps]
        means = {name: float(np.mean([swap[name] for swap in swaps])) for name in swaps[0]}
        table.add_row(
            kv,
            f"{np.mean(pauses):.2f} / {max(pauses):.2f}",
            f"{means['stage_s']:.3f}",
            f"{means['recomputed']:,.0f}",
            f"{means['tokens_per_s_before']:,.0f}",
            f"{means['tokens_per_s_after']:,.0f}",
            f"{measured['logprob_gap']['mean']:.4f} / {measured['logprob_gap']['max']:.3f}",
        )
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench swap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="shape of the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=256, help="sequences decoded together")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--output-length", type=int, default=1024)
    parser.add_argument("--swaps", type=int, default=4, help="swaps under each policy")
    parser.add_argument("--seconds", type=float, default=1.0, help="of generation before and after each")
    parser.add_argument("--scored", type=int, default=8, help="completions of each round whose log-probs are compared")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "swap.json", help="where the record goes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options, record = Console(), parse(arguments), Record("swap", arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model = model_directory(options.shape, Path(scratch), options.device, options.dtype)
        core = make_core(options, model)
        vocabulary = vocabulary_of(model)
        found = {kv: measure(core, options, vocabulary, kv) for kv in ("keep", "recompute")}
    figures = {
        kv: {"pause_ms": sorted(swap["pause_ms"] for swap in measured["swaps"]), "gap": measured["logprob_gap"]}
        for kv, measured in found.items()
    }
    settings = {key: str(value) for key, value in vars(options).items() if key != "out"}
    record.write(
        options.out, versions=versions("torch", "transformers"), settings=settings, repetitions=found, figures=figures
    )
    show(found, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
