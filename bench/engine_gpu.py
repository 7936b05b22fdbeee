"""Tokens a second of the embedded engine on a GPU, of vLLM and of transformers' `generate`, in one run.

Random weights of a known shape, prompts of equal length, forced completion lengths, temperature 1, the log-prob of
every sampled token returned. Arms take turns in processes of their own, each with its fastest known settings. The
share of the roofline is the time a step must at least take, reading all weights and the mean of the keys and values
once at the copy bandwidth, or doing its matrix work at the measured peak if that takes longer, over what it took.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import RESULTS_DIR, Arm, Message, Record, headway_logprobs, serve_arm, spread, versions, vllm_logprobs
from shapes import SHAPES, LongTailed, model_directory, vocabulary_of

if TYPE_CHECKING:
    from rich.console import Console

Prompts = list[list[int]]
Generate = Callable[[Prompts, list[int]], list[list[float]]]

BANDWIDTH, PEAK = 4.3e12, 790e12
LOAD_DEADLINE_S, RUN_DEADLINE_S = 400.0, 400.0
PACKAGES = ("torch", "transformers", "triton", "vllm")
VLLM_SETTINGS: dict[str, Message] = {
    "vllm": {"compilation_config": {"cudagraph_capture_sizes": [1, 16, 64, 128, 256, 512, 768, 1024]}},
    "vllm, 256 at a time": {"max_num_seqs": 256},
}
"""All requests decoded together, in graphs as large as the batch; or as many as it decodes the fastest."""


def load_headway(spec: Message) -> tuple[Message, Generate]:
    from headway.config import EngineSection
    from headway.engine.embedded.service import EmbeddedEngine

    settings = {
        "device": "cuda",
        "max_num_seqs": spec["max_num_seqs"],
        "max_context": spec["max_context"],
        "kv_tokens": spec["kv_tokens"],
        "prefill_chunk": 65536,
        "chunk_tokens": 4096,
    }
    engine = EmbeddedEngine(spec["model"], spec["dtype"], EngineSection(**settings), False)
    return settings, headway_logprobs(engine)


def load_vllm(spec: Message) -> tuple[Message, Generate]:
    from vllm import LLM

    settings = {
        "dtype": spec["dtype"],
        "max_model_len": spec["max_context"],
        "max_num_seqs": spec["max_num_seqs"],
        "max_num_batched_tokens": 16384,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": spec["kv_bytes"],  # not what is free: the other arms are loading too
        "gpu_memory_utilization": 0.1,  # not used then, but as much must be free
        "skip_tokenizer_init": True,
        **VLLM_SETTINGS[spec["system"]],
        **spec.get("vllm", {}),
    }
    llm = LLM(model=spec["model"], **settings)

    def generate(prompts: Prompts, lengths: list[int]) -> list[list[float]]:
        return vllm_logprobs(llm, prompts, lengths)

    return settings, generate


def load_transformers(spec: Message) -> tuple[Message, Generate]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]))
    model = model.cuda().eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: Prompts, lengths: list[int]) -> list[list[float]]:
        logprobs: list[Any] = []

        def note(sampled: Any, scores: Any) -> Any:
            logprobs.append(scores.log_softmax(-1))
            if len(logprobs) > 1:  # the token sampled from the scores before is the last one now
                logprobs[-2] = logprobs[-2].gather(1, sampled[:, -1:])[:, 0]
            return scores

        out = model.generate(
            torch.tensor(prompts, device="cuda"),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            logits_processor=[note],
            pad_token_id=0,
        )
        logprobs[-1] = logprobs[-1].gather(1, out[:, -1:])[:, 0]
        return [row[:length].tolist() for row, length in zip(torch.stack(logprobs, 1), lengths, strict=True)]

    return {"attention": model.config._attn_implementation, "cache": "dynamic"}, generate


LOADERS = {"headway": load_headway, **dict.fromkeys(VLLM_SETTINGS, load_vllm), "transformers": load_transformers}


def load_arm(spec: Message) -> tuple[Message, Callable[[Message], Message]]:
    """Load, warm up, and return what `serve_arm` needs; only the arm's own process comes here."""
    started = time.perf_counter()
    settings, generate = LOADERS[spec["system"]](spec)

    def handle(message: Message) -> Message:
        return timed(generate, spec, message)

    ready = {"settings": settings, "versions": versions(*PACKAGES)}
    return ready | {"load_s": round(time.perf_counter() - started, 1)}, handle


def timed(generate: Generate, spec: Message, message: Message) -> Message:
    draws = np.random.default_rng(message["repetition"])
    lengths: list[int] = message["lengths"]
    prompts = draws.integers(16, spec["vocabulary"], (len(lengths), spec["prompt_length"])).tolist()
    started = time.perf_counter()
    logprobs = generate(prompts, lengths)
    wall_s = time.perf_counter() - started
    flat = [logprob for row in logprobs for logprob in row]
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in flat):
        raise AssertionError("a log-prob is positive or not finite")
    if len(flat) < 0.98 * sum(lengths):  # random weights may sample an end of text here and there
        raise AssertionError(f"asked for {sum(lengths)} tokens, got {len(flat)}")
    return {"wall_s": wall_s, "num_tokens": len(flat), "tokens_per_s": len(flat) / wall_s}


def roofline_s(shape: str, num_rows: float, mean_context: float) -> float:
    """The least time of one decode step."""
    from headway.model.shape import ModelShape

    sizes = SHAPES[shape]
    heads = sizes["num_attention_heads"]
    described = ModelShape(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_heads=heads,
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["hidden_size"] // heads,
        vocab_size=sizes["vocab_size"],
    )
    width = described.head_dim * (2 * described.num_heads + 2 * described.num_kv_heads)
    layer = described.hidden_size * (width + 3 * described.intermediate_size)
    weights = described.num_layers * layer + described.hidden_size * described.vocab_size
    kv = 2 * described.num_layers * described.num_kv_heads * described.head_dim * mean_context * num_rows
    return max(2 * (weights + kv) / BANDWIDTH, 2 * weights * num_rows / PEAK)


def uneven_roofline_s(shape: str, prompt_length: int, lengths: list[int]) -> float:
    """The least time of all decode steps, as sequences of these lengths end one after the other."""
    seconds, ends = 0.0, sorted(set(lengths))
    for begin, end in zip([0, *ends], ends, strict=False):
        num_rows = sum(length >= end for length in lengths)
        seconds += (end - begin) * roofline_s(shape, num_rows, prompt_length + (begin + end) / 2)
    return seconds


def token_bytes(shape: str) -> int:
    """Keys and values of one token, 16 bits each."""
    sizes = SHAPES[shape]
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    return int(2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * head_dim * 2)


def workloads(options: argparse.Namespace) -> dict[str, list[int]]:
    even = {f"{n} × {options.output_length}": [options.output_length] * n for n in options.requests}
    if not options.uneven:
        return even
    lengths = LongTailed(mean=8192, longest=16384, spread=0.5, shortest=4096)
    return even | {f"{options.uneven} uneven": [lengths.length(i) for i in range(options.uneven)]}


def compete(
    arms: dict[str, Arm], options: argparse.Namespace, console: "Console", note: Callable[[Message], None]
) -> Message:
    """Workload by workload, arms taking turns; `note` keeps what there is after each, should a later one fail."""
    found: Message = {}
    for name, lengths in workloads(options).items():
        found[name] = {"lengths": lengths if len(set(lengths)) > 1 else lengths[:1], "repetitions": {}}
        for repetition in range(options.repetitions + 1):
            for system, arm in arms.items():
                if system == "transformers" and (len(lengths) > 256 or repetition > 1 or len(set(lengths)) > 1):
                    continue
                # The first turn compiles and captures; short completions will do for that.
                asked = lengths if repetition else [min(length, 40) for length in lengths]
                answer = arm.ask({"repetition": repetition, "lengths": asked}, RUN_DEADLINE_S)
                if repetition:
                    found[name]["repetitions"].setdefault(system, []).append(answer)
                    speed = f"{answer['tokens_per_s']:,.0f} tokens/s"
                    console.print(f"{name}, repetition {repetition}, {system}: {speed}", highlight=False)
        note(found)
    return found


def figures_of(found: Message, options: argparse.Namespace) -> Message:
    figures: Message = {}
    for name, measured in found.items():  # of the workloads measured so far
        speeds = {s: spread(r["tokens_per_s"] for r in rs) for s, rs in measured["repetitions"].items()}
        lengths = workloads(options)[name]
        entry: Message = {"tokens_per_s": speeds}
        if len(set(lengths)) == 1:
            mean_context = options.prompt_length + lengths[0] / 2
            least_s = lengths[0] * roofline_s(options.shape, len(lengths), mean_context)
        else:
            least_s = uneven_roofline_s(options.shape, options.prompt_length, lengths)
        entry["roofline_share"] = least_s * speeds["headway"]["best"] / sum(lengths)
        others = {s: speeds["headway"]["best"] / speed["best"] for s, speed in speeds.items() if s != "headway"}
        figures[name] = entry | {"headway_over": others}
    return figures


def show(figures: Message, console: "Console") -> None:
    from rich.table import Table

    table = Table("requests", "system", "best tokens/s", "median", "headway over it", "of the roofline")
    for name, entry in figures.items():
        for system, speed in entry["tokens_per_s"].items():
            ratio = entry["headway_over"].get(system)
            share = f"{entry['roofline_share']:.0%}" if system == "headway" and "roofline_share" in entry else ""
            shown = f"{ratio:.2f}×" if ratio else ""
            table.add_row(name, system, f"{speed['best']:,.0f}", f"{speed['median']:,.0f}", shown, share)
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench engine_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="shape of the model")
    parser.add_argument("--systems", nargs="+", choices=LOADERS, default=list(LOADERS), help="who takes part")
    parser.add_argument("--requests", nargs="*", type=int, default=[64, 256, 1024], help="concurrent requests")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--output-length", type=int, default=512)
    parser.add_argument("--uneven", type=int, default=0, help="also this many requests of 4,096 to 16,384 tokens")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vllm-path", default="", help="put before PYTHONPATH for vLLM's process")
    parser.add_argument("--vllm-settings", type=json.loads, default={}, help="JSON of more arguments for vLLM")
    parser.add_argument("--kv-tokens", type=int, default=900_000, help="key/value memory of the embedded engine")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "engine_gpu.json", help="where the record goes")
    return parser.parse_args(arguments)


def start(options: argparse.Namespace, model: Path, stack: contextlib.ExitStack, console: "Console") -> dict[str, Arm]:
    longest = max(max(lengths) for lengths in workloads(options).values())
    arms = {}
    for system in options.systems:
        spec = {
            "system": system,
            "model": str(model),
            "dtype": options.dtype,
            "vocabulary": vocabulary_of(model),
            "prompt_length": options.prompt_length,
            "max_num_seqs": max(len(lengths) for lengths in workloads(options).values()),
            "max_context": -(-(options.prompt_length + longest + 64) // 64) * 64,
            "kv_tokens": options.kv_tokens,
            "kv_bytes": options.kv_tokens * token_bytes(options.shape),
            "vllm": options.vllm_settings,
        }
        env = {"HF_HUB_OFFLINE": "1"}
        if system in VLLM_SETTINGS:
            path = os.pathsep.join(filter(None, [options.vllm_path, os.environ.get("PYTHONPATH", "")]))
            env |= {"PYTHONPATH": path, "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        command = [sys.executable, __file__, "--arm", json.dumps(spec)]
        log = f"{options.out.stem}-{system.replace(', ', '-').replace(' ', '-')}.log"
        arm = Arm(system, command, env, options.out.parent / log)
        stack.callback(arm.close)
        arms[system] = arm
    for system, arm in arms.items():
        ready = arm.answer(LOAD_DEADLINE_S)
        options.ready[system] = ready
        console.print(f"loaded {system} in {ready['load_s']} s", highlight=False)
    return arms


def write(record: Record, options: argparse.Namespace, found: Message) -> None:
    settings = {"shape": options.shape, "prompt_length": options.prompt_length, "dtype": options.dtype}
    figures = figures_of(found, options)
    record.write(options.out, workload=settings, arms=options.ready, repetitions=found, figures=figures)


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options = Console(), parse(arguments)
    options.ready = {}
    record = Record("engine_gpu", arguments)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        model = model_directory(options.shape, Path(scratch), "cuda", options.dtype)
        arms = start(options, model, stack, console)
        found = compete(arms, options, console, functools.partial(write, record, options))
    show(figures_of(found, options), console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        serve_arm(functools.partial(load_arm, json.loads(sys.argv[2])))
    else:
        main(sys.argv[1:])
