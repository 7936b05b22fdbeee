"""Where a decode step's time goes on a GPU: kernels by what they are for, and what is left between them.

An engine of random weights decodes a full batch; after it has settled, a few windows of steps are profiled. Kernels run
one after the other on one stream, so what they do not cover of the wall time is idle: launches, and the host's looks.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS_DIR, Message, Record, versions
from shapes import SHAPES, model_directory, vocabulary_of
from swap import make_core, submit

if TYPE_CHECKING:
    from rich.console import Console

    from headway.engine.embedded.scheduler import EngineCore

KINDS = {
    "attention": ("_decode_kernel", "_prefix_kernel", "_combine_kernel", "_plan_kernel", "_prefill"),
    "norms": ("_norm_kernel",),
    "rotation and writing keys and values": ("_rope_kernel",),
    "activation": ("_activation_kernel",),
    "sampling": ("_masses_kernel", "_draw_kernel"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "copies": ("memcpy", "memset"),
}
"""What a kernel is for, by a part of its name; the first that matches."""
OTHER, IDLE = "bookkeeping", "idle"


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lowered for part in parts)), OTHER)


def settle(core: "EngineCore", num_requests: int, num_windows: int) -> None:
    """Until every sequence decodes, and some windows more."""
    while core.stats().num_generated < 32 * num_requests:
        core.step()
    for _ in range(num_windows):
        core.step()


def profiled(core: "EngineCore", num_windows: int) -> Message:
    import torch
    from torch.profiler import ProfilerActivity, profile

    before = core.stats().num_generated
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        started = time.perf_counter()
        for _ in range(num_windows):
            core.step()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - started
    names, kinds = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in found.events():
        if event.device_type.name == "CUDA":
            names[event.name] += event.device_time_total / 1e6
            kinds[kind_of(event.name)] += event.device_time_total / 1e6
    kinds[IDLE] = max(0.0, wall_s - sum(kinds.values()))
    return {
        "wall_s": wall_s,
        "tokens": core.stats().num_generated - before,
        "seconds": dict(kinds),
        "kernels": dict(sorted(names.items(), key=lambda item: -item[1])[:16]),
    }


def measure(options: argparse.Namespace, model: Path, num_requests: int) -> Message:
    """The same windows without the profiler and with it: what it adds is not the engine's."""
    import torch

    options.requests = num_requests
    core = make_core(options, model)
    submit(core, options, vocabulary_of(model), 0)
    settle(core, num_requests, options.windows)
    before = core.stats().num_generated
    started = time.perf_counter()
    for _ in range(options.windows):
        core.step()
    torch.cuda.synchronize()
    plain_s = time.perf_counter() - started
    tokens = core.stats().num_generated - before
    found = profiled(core, options.windows)
    if core.stats().running < num_requests:
        raise AssertionError("sequences ended while they were profiled; raise --output-length or lower --windows")
    steps = tokens / num_requests
    return {"step_ms": 1000 * plain_s / steps, "tokens_per_s": tokens / plain_s, "profile": found}


def show(results: dict[str, Message], console: "Console") -> None:
    from rich.table import Table

    table = Table("", *results)
    kinds = [*KINDS, OTHER, IDLE]
    for kind in kinds:
        cells = []
        for result in results.values():
            found = result["profile"]
            steps = found["tokens"] / result["requests"]
            seconds = found["seconds"].get(kind, 0.0)
            cells.append(f"{1000 * seconds / steps:.2f} ms, {seconds / found['wall_s']:.0%}")
        table.add_row(kind, *cells)
    table.add_row("a step, without the profiler", *(f"{result['step_ms']:.2f} ms" for result in results.values()))
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench profile_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2.5-1.5b"], help="shapes of the models")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 1024], help="sequences decoded together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--output-length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=3, help="looks of the host, each after several steps")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "profile_gpu.json", help="where the record goes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options, record = Console(width=160), parse(arguments), Record("profile_gpu", arguments)
    settings: dict[str, Any] = {key: str(value) for key, value in vars(options).items() if key != "out"}
    results: dict[str, Message] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for shape in options.shapes:
            model = model_directory(shape, Path(scratch), options.device, options.dtype)
            for num_requests in options.batches:
                found = measure(options, model, num_requests)
                results[f"{shape}, {num_requests}"] = {"shape": shape, "requests": num_requests, **found}
                found_versions = versions("torch", "triton", "transformers")
                record.write(options.out, versions=found_versions, settings=settings, repetitions=results)
    show(results, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
