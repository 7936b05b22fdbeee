"""Asynchronous against synchronous training with engine and trainer on one GPU, over forced long-tailed lengths.

Every arm is `headway train` of one config: the same model of random weights, the same prompts, lengths and seeds; arms
differ in the bound η. Effective tokens a second are those of the trained completions over the time from the end of one
training step to the end of the last, so that starting, compiling and the first fill are left out, for all. At η = 0
generation and training take turns on the whole GPU.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS_DIR, Message, Record, versions
from long_tail import write_rows
from shapes import SHAPES, LongTailed, model_directory

if TYPE_CHECKING:
    from rich.console import Console

PROMPT_LENGTH = 128
POLICIES = ("keep", "recompute", "drain")


def config_text(sections: dict[str, dict[str, Any]]) -> str:
    """A config file; JSON's numbers, strings, booleans and lists are TOML's."""
    parts = []
    for section, values in sections.items():
        parts += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(parts)


def sections_of(
    options: argparse.Namespace, model: Path, rows: Path, size: tuple[int, int], eta: int
) -> dict[str, Any]:
    groups, group_size = size
    context = -(-(options.longest + PROMPT_LENGTH + 64) // 64) * 64
    here = Path(__file__).resolve().parent
    concurrent = min(options.max_num_seqs, groups * group_size * (eta + 1))
    return {
        "run": {"steps": 100_000, "seed": options.seed},
        "model": {"path": str(model), "dtype": "bfloat16" if options.device == "cuda" else "float32"},
        "task": {"train": str(rows), "verifier": f"{here}/long_tail.py:no_score"},
        "sampling": {"max_tokens": options.longest},
        "rollout": {"workflow": f"{here}/long_tail.py:ForcedLengths", "group_size": group_size},
        "engine": {
            "device": options.device,
            "max_num_seqs": concurrent,
            "max_context": context,
            "kv_tokens": options.kv_tokens,
            "prefill_chunk": 8192,
            "chunk_tokens": 4096,
            "kv_on_swap": options.kv,
        },
        "staleness": {"max_staleness": eta, "window": options.window or groups * (eta + 1)},
        "trainer": {
            "device": options.device,
            "batch_groups": groups,
            "token_budget": max(options.token_budget, context),
            "minibatches": options.minibatches,
            "lr": 1e-6,
        },
        "checkpoint": {"every": 1000},
        "metrics": {"tensorboard": False},
    }


def effective(events: list[Message], skipped: int) -> Message:
    """Tokens trained after the first `skipped` steps over the time they took."""
    trained = [event for event in events if event["kind"] == "trained"]
    wall_s = trained[-1]["time"] - trained[skipped - 1]["time"]
    tokens = sum(event["tokens"] for event in trained[skipped:])
    steps = len(trained) - skipped
    return {
        "steps": steps,
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "train_s": sum(event["seconds"] for event in trained[skipped:]) / steps,
        "wait_s": sum(event["wait_s"] for event in trained[skipped:]) / steps,
        "staleness_mean": sum(event["staleness_mean"] for event in trained[skipped:]) / steps,
        "staleness_max": max(event["staleness_max"] for event in trained[skipped:]),
        **engine_figures(events, trained[skipped - 1]["time"], wall_s),
    }


def engine_figures(events: list[Message], started: float, wall_s: float) -> Message:
    """What the engine did in the measured time: how busy it was, how many sequences ran, how long swaps stopped it."""
    stats = [event for event in events if event["kind"] == "stats" and event["time"] >= started]
    swaps = [event for event in events if event["kind"] == "swapped" and event["version"] > 0]
    pauses = [swap["pause_ms"] for swap in swaps]
    if len(stats) < 2:
        raise AssertionError("the measured time is too short to look at the engine twice; train more steps")
    return {
        "engine_busy": (stats[-1]["busy_s"] - stats[0]["busy_s"]) / (stats[-1]["time"] - stats[0]["time"]),
        "running_mean": sum(event["running"] for event in stats) / len(stats),
        "generated_per_s": (stats[-1]["num_generated"] - stats[0]["num_generated"])
        / (stats[-1]["time"] - stats[0]["time"]),
        "preempted": stats[-1]["num_preempted"],
        "pause_ms": {"mean": sum(pauses) / len(pauses), "max": max(pauses)},
        "stage_s": sum(swap["stage_s"] for swap in swaps) / len(swaps),
        "parity_max_abs": max(swap["parity_max_abs"] for swap in swaps),
    }


def train(options: argparse.Namespace, directory: Path, model: Path, size: tuple[int, int], eta: int) -> Message:
    from headway.errors import RunFailed

    run = directory / f"{size[0]}x{size[1]}-eta{eta}"
    rows = directory / f"rows-{size[0]}x{size[1]}.jsonl"
    steps, skipped = options.steps[eta > 0], options.skipped[eta > 0]
    lengths = LongTailed(options.mean, options.longest, options.spread, seed=options.seed)
    write_rows(rows, lengths, (max(options.steps) + eta + 2) * size[0], size[1], PROMPT_LENGTH)
    config = run.with_suffix(".toml")
    config.write_text(config_text(sections_of(options, model, rows, size, eta)))
    command = [sys.executable, "-m", "headway.cli", "train", str(config), f"--run.dir={run}"]
    environment = {
        **os.environ,
        "COLUMNS": "200",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    log = run.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            events = watch(process, run / "events.jsonl", steps, options.deadline_s)
        finally:
            process.kill()
            process.wait()
    if not events:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RunFailed(f"η = {eta} ended early: {lines[-1] if lines else 'no output'}; its log is {log}")
    return {"size": f"{size[0]}×{size[1]}", "eta": eta, **effective(events, skipped)}


def watch(process: "subprocess.Popen[bytes]", path: Path, steps: int, deadline_s: float) -> list[Message]:
    """The run's events once it has trained so many steps; none if it ends or takes too long before."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.5)
        lines = path.read_text().splitlines() if path.exists() else []
        if sum('"kind": "trained"' in line or '"kind":"trained"' in line for line in lines) >= steps:
            return [json.loads(line) for line in lines if line.endswith("}")]
    return []


def show(results: list[Message], console: "Console") -> None:
    from rich.table import Table

    table = Table("batch", "η", "tokens/s", "against η = 0", "s a step", "training s", "waiting s", "mean staleness")
    by_size = {size: list(items) for size, items in itertools.groupby(results, key=lambda result: result["size"])}
    for size, items in by_size.items():
        base = next((item["tokens_per_s"] for item in items if item["eta"] == 0), None)
        for item in items:
            ratio = f"{item['tokens_per_s'] / base:.2f}×" if base else "–"
            numbers = [f"{item['wall_s'] / item['steps']:.1f}", f"{item['train_s']:.1f}", f"{item['wait_s']:.1f}"]
            speed = f"{item['tokens_per_s']:,.0f}"
            table.add_row(size, str(item["eta"]), speed, ratio, *numbers, f"{item['staleness_mean']:.2f}")
    console.print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench async_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="shape of the model")
    parser.add_argument("--device", default="cuda", help="where engine and trainer compute")
    parser.add_argument("--sizes", nargs="+", default=["16x16", "16x8"], help="batches, groups x trajectories")
    parser.add_argument("--etas", nargs="+", type=int, default=[0, 4], help="bounds on staleness")
    parser.add_argument("--window", type=int, default=0, help="take-order window in groups; 0 takes all in flight")
    parser.add_argument("--mean", type=float, default=2048, help="mean length of completions")
    parser.add_argument("--longest", type=int, default=16384, help="longest completion")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the lengths' logarithm")
    parser.add_argument("--steps", nargs=2, type=int, default=[4, 8], help="training steps at η = 0, and otherwise")
    parser.add_argument("--skipped", nargs=2, type=int, default=[1, 3], help="first steps left out, likewise")
    parser.add_argument("--max-num-seqs", type=int, default=1024, help="most sequences decoded together")
    parser.add_argument("--kv-tokens", type=int, default=1_200_000, help="key/value memory")
    parser.add_argument("--kv", choices=POLICIES, default="keep", help="what becomes of it at a swap")
    parser.add_argument("--token-budget", type=int, default=16896, help="most tokens of a micro-batch")
    parser.add_argument("--minibatches", type=int, default=1, help="more than one makes proximal passes necessary")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, prompts and sampling")
    parser.add_argument("--deadline-s", type=float, default=900, help="longest run")
    parser.add_argument("--keep", type=Path, default=None, help="directory that keeps the runs")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "async_gpu.json", help="where the record goes")
    options = parser.parse_args(arguments)
    options.sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
    return options


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options = Console(), parse(arguments)
    record = Record("async_gpu", arguments)
    results: list[Message] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        model = model_directory(options.shape, directory, options.device)
        for size, eta in itertools.product(options.sizes, options.etas):
            with console.status(f"batches of {size[0]}×{size[1]}, η = {eta}"):
                results.append(train(options, directory, model, size, eta))
            found = results[-1]
            console.print(f"{found['size']}, η = {eta}: {found['tokens_per_s']:,.0f} tokens/s", highlight=False)
            settings = {key: str(value) for key, value in vars(options).items()}
            record.write(
                options.out, versions=versions("torch", "transformers"), settings=settings, repetitions=results
            )
    show(results, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
