"""TFLOP/s of whole training steps: Headway's trainer and a plain transformers training step, in one run.

A step is everything: packing, forward, Eq. 5, backward, clipping, AdamW. Both sides train the same sequences
(log-normal lengths, random tokens) from the same random weights, and their first losses are compared. The plain step
is what one writes with transformers: fp32 weights under bf16 autocast, sdpa, sequences of like length padded on the
right, log-softmax over full logits, fused AdamW; it gets the best of several micro-batch sizes. Operations are those
of the matrix products of forward and backward pass (three times headway.model.shape.flops, the head counted for trained
tokens only); what either side recomputes or pads does not count.
"""

import argparse
import gc
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import RESULTS_DIR, Message, Record, spread, versions
from shapes import SHAPES, LongTailed, model_directory, trained_groups

if TYPE_CHECKING:
    from rich.console import Console

    from headway.training.trainer import Trainer
    from headway.types import Group

PACKAGES = ("headway-rl", "torch", "triton", "transformers", "numpy")
NEEDED_TFLOPS = 400.0
GROUP_SIZE = 8
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "log-prob kernels": ("_of_row",),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "compiled blocks": ("triton_",),
    "optimizer and clipping": ("multi_tensor", "adam", "lpnorm"),
    "copies": ("memcpy", "memset", "copy", "fill"),
    "lookups": ("embedding", "index", "gather", "scatter", "sort", "radix"),
}
"""What a kernel is for, by a part of its name; the first that matches."""


def completion_lengths(options: argparse.Namespace) -> list[int]:
    """Lengths that fill the asked number of micro-batches and no more."""
    from headway.model.shape import flops
    from headway.training.batches import arranged

    cost = partial(flops, shape=options.model_shape)
    drawn = LongTailed(options.mean, options.longest - options.prompt, seed=options.seed)
    totals: list[int] = []
    while sum(totals) < options.micro_batches * options.token_budget:
        totals.append(options.prompt + drawn.length(len(totals)))
    while len(arranged(totals, options.token_budget, cost)) > options.micro_batches:
        totals.pop()
    return [total - options.prompt for total in totals]


def make_groups(lengths: Sequence[int], options: argparse.Namespace) -> "list[Group]":
    dealt = [lengths[start : start + GROUP_SIZE] for start in range(0, len(lengths), GROUP_SIZE)]
    return trained_groups(dealt, options.prompt, options.model_shape.vocab_size, options.seed)


def num_operations(lengths: Sequence[int], options: argparse.Namespace) -> float:
    """Of one step's forward and backward passes."""
    from headway.model.shape import flops

    shape = options.model_shape
    forward = sum(flops(length + options.prompt, shape) for length in lengths)
    unused_head = 2.0 * shape.hidden_size * shape.vocab_size * options.prompt * len(lengths)
    return float(3 * (forward - unused_head))


def make_trainer(options: argparse.Namespace, kind: "type[Trainer] | None" = None) -> "Trainer":
    from headway.algorithm import AlgorithmSection
    from headway.config import ModelSection, TrainerSection
    from headway.training.trainer import Trainer

    section = TrainerSection(
        device=options.device,
        token_budget=options.token_budget,
        logprob_chunk=options.logprob_chunk,
        gradient_checkpointing=options.checkpointing,
        compile=not options.no_compile,
        minibatches=options.minibatches,
        lr=1e-6,
    )
    model = ModelSection(path=str(options.model), dtype=options.dtype)
    return (kind or Trainer)(model, section, AlgorithmSection(), None, deterministic=options.deterministic)


def measure(step: Callable[[], Message], options: argparse.Namespace, repetitions: int) -> Message:
    """Warm up, then time steps one by one; each ends with the host knowing its loss, so with all work done."""
    started = time.perf_counter()
    first = step()
    warm_up_s = time.perf_counter() - started
    for _ in range(options.warm_up - 1):
        step()
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {
        "first": first,
        "warm_up_s": round(warm_up_s, 2),
        "seconds": seconds,
        "tflops": [options.operations / second / 1e12 for second in seconds],
        "peak_gib": peak_gib(options.device),
    }


def peak_gib(device: str) -> float:
    import torch

    return round(torch.cuda.max_memory_allocated(device) / 2**30, 1) if device.startswith("cuda") else 0.0


def forget(device: str) -> None:
    """Give memory back, so that the next arm starts with all of it."""
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def headway_step(trainer: "Trainer", groups: "Sequence[Group]") -> Message:
    from headway.types import Batch

    report = trainer.train(Batch(trainer.version, tuple(groups)))
    assert not report.skipped, report.skipped
    return report.metrics


class PlainStep:
    """A training step as one writes it with transformers."""

    def __init__(self, groups: "Sequence[Group]", options: argparse.Namespace):
        import torch
        from transformers import AutoModelForCausalLM

        from headway.algorithm import AlgorithmSection
        from headway.training.batches import minibatches_of
        from headway.types import Batch

        self._device, self._dtype = torch.device(options.device), getattr(torch, options.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model = model.to(self._device).train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-6, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.05, fused=True
        )
        samples = minibatches_of(Batch(0, tuple(groups)), AlgorithmSection(), 1)[0]
        self._samples = sorted(samples, key=lambda sample: len(sample.tokens))

    def micro_batches(self, padded_tokens: int) -> list[list[Any]]:
        """Sequences of like length together, as many as fit when padded to the longest."""
        found: list[list[Any]] = [[]]
        for sample in self._samples:
            if (len(found[-1]) + 1) * len(sample.tokens) > padded_tokens and found[-1]:
                found.append([])
            found[-1].append(sample)
        return found

    def __call__(self, padded_tokens: int) -> Message:
        import torch

        denominator = sum(len(sample.where) for sample in self._samples)
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for samples in self.micro_batches(padded_tokens):
            loss = self._loss(samples) / denominator
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return {"loss": float(torch.stack(losses).sum()), "grad_norm": float(norm)}

    def _loss(self, samples: list[Any]) -> Any:
        """−Σ (π_prox/π_behav)·min(u·A, clip(u)·A), where u is 1 in value: the weights have not moved."""
        import torch

        width = max(len(sample.tokens) for sample in samples)
        padded = np.zeros((3, len(samples), width), np.float32)
        tokens = np.zeros((len(samples), width), np.int64)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = sample.tokens
            padded[0, row, sample.where], padded[1, row, sample.where] = 1.0, sample.behaviour
            padded[2, row, sample.where] = sample.advantages
        tokens_NT = torch.from_numpy(tokens).to(self._device)
        mask, behaviour, advantage = torch.from_numpy(padded[:, :, 1:]).to(self._device)
        # Padding on the right needs no mask: no real token looks ahead. So sdpa may take its fast causal path.
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._model(input_ids=tokens_NT, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens_NT[:, 1:, None]).squeeze(-1)
        weight, ratio = (logprobs.detach() - behaviour).exp(), (logprobs - logprobs.detach()).exp()
        return -(mask * weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).sum()


def measure_plain(groups: "Sequence[Group]", options: argparse.Namespace, console: "Console") -> Message:
    """Every micro-batch size once, the best of them as often as ours; a size that does not fit in memory says so."""
    import torch

    step = PlainStep(groups, options)
    tried: dict[str, Any] = {}
    for size in options.padded_tokens:
        try:
            tried[str(size)] = measure(partial(step, size), options, 1)
            console.print(f"transformers, {size} padded tokens: {tried[str(size)]['tflops'][0]:.3g} TFLOP/s")
        except torch.OutOfMemoryError:
            tried[str(size)] = {"tflops": [0.0], "out_of_memory": True}
            console.print(f"transformers, {size} padded tokens: out of memory")
        forget(options.device)
    # A step that ran out of memory moved nothing: the first that did not started from the same weights as ours.
    first = next(found["first"] for found in tried.values() if "first" in found)
    best = max(options.padded_tokens, key=lambda size: tried[str(size)]["tflops"][0])
    return measure(partial(step, best), options, options.repetitions) | {
        "first": first,
        "padded_tokens": best,
        "num_micro_batches": len(step.micro_batches(best)),
        "tried": tried,
    }


def kind_of(kernel: str) -> str:
    lowered = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lowered for part in parts)), "everything else")


def profile(step: Callable[[], Message], options: argparse.Namespace, console: "Console") -> Message:
    """Where the time of one step goes, by kind of kernel and by kernel."""
    from rich.table import Table
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    on_gpu = options.device.startswith("cuda")
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    started = time.perf_counter()
    with watch(activities=activities) as seen:
        step()
    wall_ms = (time.perf_counter() - started) * 1e3
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in seen.key_averages():
        own_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key] += own_us / 1e3
        calls[event.key] += event.count
    kinds: Counter[str] = Counter()
    for key, spent_ms in times.items():
        kinds[kind_of(key)] += spent_ms
    table = Table(
        "kind or kernel", "ms", "% of the step", "calls", title=f"one step, {wall_ms:.0f} ms with the profiler"
    )
    for kind, spent_ms in kinds.most_common():
        table.add_row(kind, f"{spent_ms:.1f}", f"{100 * spent_ms / wall_ms:.1f}", "")
    table.add_row("the device did nothing", f"{wall_ms - sum(times.values()):.1f}", "", "", end_section=True)
    for key, spent_ms in times.most_common(25):
        table.add_row(key[:90], f"{spent_ms:.1f}", f"{100 * spent_ms / wall_ms:.1f}", str(calls[key]))
    console.print(table)
    top = {key: [round(spent_ms, 2), calls[key]] for key, spent_ms in times.most_common(60)}
    return {"wall_ms": wall_ms, "kinds_ms": dict(kinds), "kernels_ms_calls": top}


def compiled_graphs() -> Message:
    """How often the blocks were compiled: twice is right (with and without gradients), once per layer is wrong."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"].get("unique_graphs", 0), "breaks": sum(counters["graph_break"].values())}


def add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="shape of the model")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type of the products")
    parser.add_argument("--token-budget", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer steps of a step")
    parser.add_argument("--mean", type=float, default=2048, help="mean length of the completions")
    parser.add_argument("--longest", type=int, default=8192, help="longest sequence, prompt and completion")
    parser.add_argument("--prompt", type=int, default=128, help="length of every prompt")
    parser.add_argument("--logprob-chunk", type=int, default=4096, help="tokens whose logits exist at one time")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--no-compile", action="store_true", help="run the blocks as they are")
    parser.add_argument("--deterministic", action="store_true", help="repeat bit for bit on a GPU")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--repetitions", type=int, default=5, help="measured steps")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and rewards")
    parser.add_argument("--models", type=Path, default=Path("models/random"), help="where random models are put")


def prepare(options: argparse.Namespace) -> list[int]:
    """The model directory and the lengths; what cannot work is one sentence."""
    import torch

    from headway.errors import ConfigError
    from headway.model.device import find_device
    from headway.model.loading import load_config, model_shape

    find_device("--device", options.device, getattr(torch, options.dtype))
    if not options.prompt + options.mean < options.longest <= options.token_budget:
        raise ConfigError("--prompt plus --mean must be below --longest, and --longest at most --token-budget")
    options.model = model_directory(options.shape, options.models, options.device)
    options.model_shape = model_shape(load_config(str(options.model)))
    lengths = completion_lengths(options)
    options.operations = num_operations(lengths, options)
    return lengths


def device_facts(device: str) -> Message:
    import torch

    if not device.startswith("cuda"):
        return {"device": "cpu"}
    found = torch.cuda.get_device_properties(device)
    return {"device": found.name, "memory_gib": round(found.total_memory / 2**30, 1), "cuda": torch.version.cuda}


def plain_options(options: argparse.Namespace) -> Message:
    return {
        key: value if isinstance(value, (int, float, str, list)) else str(value) for key, value in vars(options).items()
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench trainer", description=__doc__.splitlines()[0])
    add_workload(parser)
    parser.add_argument(
        "--padded-tokens", type=int, nargs="+", default=[8192, 16384], help="micro-batch sizes the plain step may try"
    )
    parser.add_argument("--skip-transformers", action="store_true", help="leave the plain step out")
    parser.add_argument("--profile", action="store_true", help="also say where the time of a step goes")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "trainer.json", help="where the record goes")
    return parser.parse_args(arguments)


def show(arms: Message, figures: Message, console: "Console") -> None:
    from rich.table import Table

    table = Table(
        "training step", "TFLOP/s best", "median", "worst", "s a step", "first step s", "peak GiB", "first loss"
    )
    for name, arm in arms.items():
        speeds = [f"{value:.3g}" for value in spread(arm["tflops"]).values()]
        others = [f"{min(arm['seconds']):.3f}", f"{arm['warm_up_s']:.1f}", f"{arm['peak_gib']}"]
        table.add_row(name, *speeds, *others, f"{arm['first']['loss']:.6f}")
    console.print(table)
    for key, value in figures.items():
        console.print(f"{key}: {value}", highlight=False, soft_wrap=True)


def compare(arms: Message) -> Message:
    figures: Message = {name: spread(arm["tflops"]) for name, arm in arms.items()}
    figures["needed_tflops"] = NEEDED_TFLOPS
    if "transformers" in arms:
        ours, theirs = arms["headway"]["first"], arms["transformers"]["first"]
        figures["ratio"] = figures["headway"]["best"] / figures["transformers"]["best"]
        figures["loss_difference"] = abs(ours["loss"] - theirs["loss"])
        figures["grad_norm_relative_difference"] = abs(ours["grad_norm"] / theirs["grad_norm"] - 1)
        assert all(math.isfinite(value) for value in (ours["loss"], theirs["loss"]))
    return figures


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=160)
    options = parse(arguments)
    record = Record("trainer", arguments)
    lengths = prepare(options)
    groups = make_groups(lengths, options)
    tokens = sum(lengths) + options.prompt * len(lengths)
    console.print(f"{len(lengths)} sequences, {tokens} tokens, {options.operations / 1e12:.4g} TFLOP a step")
    trainer = make_trainer(options)
    step = partial(headway_step, trainer, groups)
    arms: Message = {"headway": measure(step, options, options.repetitions) | {"compiled": compiled_graphs()}}
    console.print(f"headway: {arms['headway']}", soft_wrap=True)
    profiled = profile(step, options, console) if options.profile else {}
    del step, trainer
    forget(options.device)
    if not options.skip_transformers:
        arms["transformers"] = measure_plain(groups, options, console)
    figures = compare(arms)
    record.write(
        options.out,
        gpu=device_facts(options.device),
        versions=versions(*PACKAGES),
        settings=plain_options(options),
        workload={"lengths": lengths, "tokens": tokens, "operations": options.operations},
        repetitions=arms,
        profile=profiled,
        figures=figures,
    )
    show(arms, figures, console)
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
