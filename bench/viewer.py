"""How fast the web viewer opens and filters a very long run, and what a connected viewer costs a live one.

The run is written here: the fake engine's completions, with a swap in the middle of each, and every event and token
that a run of this length records, in its formats and as long as its own. The viewer then opens it in a process of its
own, and every query that a page makes is timed from outside, over HTTP.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import RESULTS_DIR, Message, Record

from headway.errors import HeadwayError
from headway.record.events import Event, Stats, Swapped
from headway.types import Chunk, Completion, Request, RequestKey, Sampling

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]

POLL_S = 3.0
TURN_S = 15.0
MEAN_TOKENS, MOST_TOKENS = 16.0, 64
METRICS = (
    *("loss", "entropy", "clip_fraction", "capped_fraction", "behaviour_weight_mean", "kl", "behaviour_kl"),
    *("behaviour_weight_max", "logprob_gap_max", "effective_sample_size", "zero_variance_groups", "single_groups"),
    *("incomplete_groups", "truncated_trajectories", "grad_norm", "num_micro_batches", "lr", "token_budget"),
)
"""What a trainer says of every step, besides a sample of its weights."""
STATS_FIELDS = (
    *("generated", "prefilled", "recomputed", "preempted", "running", "waiting", "kv_used", "kv_total"),
    *("inflight", "ready", "trainer_wait_s"),
)
QUERIES = {
    "first page of runs": "runs",
    "curves": "series?run=0",
    "timeline, whole run": "timeline?run=0",
    "groups, first page": "trajectories?run=0&limit=50",
    "filter by reward and length": "trajectories?run=0&reward_min=1&length_max=12&limit=50",
    "filter by step and text": "trajectories?run=0&step=500&search=a%2B&limit=50",
    "filter by step": "trajectories?run=0&step=500&limit=50",
    "sort by staleness": "trajectories?run=0&sort=staleness&limit=50",
    "one group": "group?run=0&group=1000",
    "one trajectory's tokens": "tokens?run=0&group=1000&trajectory=0",
}


async def write(directory: Path, steps: int, groups: int, size: int) -> None:
    from recorded import ALPHABET, RecordedRun, completed, encoded, write_tokenizer  # type: ignore[import-not-found]

    from headway.engine.fake import FakeEngine
    from headway.training.state import NUM_SAMPLED

    run = RecordedRun(directory, batch=groups, size=size, prompts=10_000)
    write_tokenizer(directory / "model")
    engine, draw = FakeEngine(MEAN_TOKENS, vocab_size=len(ALPHABET)), np.random.default_rng(0)

    async def group() -> int:
        prompt = encoded(f"what is {run.num_groups % run.prompts}?")
        made = [await complete(engine, run.version, (run.num_groups, index), prompt) for index in range(size)]
        rewards = [float(len(one.tokens) % 2) for one in made]
        number: int = run.record_group(
            tuple(completed(index, prompt, *one) for index, one in enumerate(zip(made, rewards, strict=True)))
        )
        return number

    for step in range(steps):
        taken = [await group() for _ in range(groups)]
        metrics = dict(zip(METRICS, draw.random(len(METRICS)).tolist(), strict=True))
        run.train(taken, metrics, tuple(draw.normal(size=NUM_SAMPLED).astype(np.float32).tolist()))
        for event in step_events(run.version):
            run.add(event)
        if step % 50 == 0:
            run.flush()
    run.end()


async def complete(engine: Any, version: int, key: tuple[int, int], prompt: Any) -> Completion:
    """By the version before and, after a swap in the middle, by this one."""
    request = Request(RequestKey(*key, 0), prompt, Sampling(max_tokens=MOST_TOKENS, stop_tokens=(1,)), seed=0)
    engine.version = max(0, version - 1)
    found: Chunk | Completion | None = None
    async for item in engine.generate(request):
        found, engine.version = item, version
    assert isinstance(found, Completion)
    return found


def step_events(version: int) -> list[Event]:
    """What an engine says during a step: once a second what it did, and that it runs the new version."""
    counts = dict.fromkeys(STATS_FIELDS, 1000)
    stats = Stats(engine="engine", version=version, seconds=0.5, busy_s=0.4, admission_wait_s=0.1, **counts)
    swapped = Swapped(
        version=version, engine="engine", stage_s=0.12345678, pause_ms=1.2345678, interrupted=64, recomputed=1000,
        parity_max_abs=1.2345678e-6,
    )  # fmt: skip
    return [stats, swapped, stats]


class Browser:
    """Opens the link, then asks queries with its cookie."""

    def __init__(self, directory: Path) -> None:
        self.started = time.perf_counter()
        command = [sys.executable, "-u", "-m", "headway.cli", "view", str(directory)]
        self._viewer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._viewer.stdout is not None
        text = ""
        while "browser" not in text:
            text += self._viewer.stdout.readline()
        self._url = text.replace("\n", " ").split()[1]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._open: Callable[[str], Any] = opener.open
        self._open(self._url).read()
        self.opened_s = time.perf_counter() - self.started
        self.opened_cpu_s = self.cpu_s

    def ask(self, query: str) -> float:
        started = time.perf_counter()
        json.loads(self._open(self._url.split("?")[0] + "api/" + query).read())
        return time.perf_counter() - started

    @property
    def cpu_s(self) -> float:
        """CPU time that the viewer's process has used."""
        times = psutil.Process(self._viewer.pid).cpu_times()
        return float(times.user + times.system)

    def poll(self) -> None:
        """What an open run page asks, every 3 seconds, of a live run."""
        for query in ("runs", "series?run=0"):
            self.ask(query)

    def close(self) -> None:
        self._viewer.terminate()
        self._viewer.wait()


def measure(directory: Path, repetitions: int) -> Message:
    from headway.monitor.viewer.index import OpenRun

    started = time.perf_counter()
    opened = OpenRun(directory)
    folded_s = time.perf_counter() - started
    browser = Browser(directory)
    try:
        cpu: dict[str, list[float]] = {}
        times: dict[str, list[float]] = {}
        for name, query in QUERIES.items():
            for _ in range(repetitions):
                before = browser.cpu_s
                times.setdefault(name, []).append(browser.ask(query))
                cpu.setdefault(name, []).append(browser.cpu_s - before)
        before = browser.cpu_s
        for _ in range(repetitions):
            browser.poll()
        poll_s = (browser.cpu_s - before) / repetitions
    finally:
        browser.close()
    return {
        "trajectories": len(opened.table["group"]),
        "steps": len(opened.run.steps),
        "log_mib": (directory / "events.jsonl").stat().st_size / 2**20,
        "fold_s": folded_s,
        "poll_cpu_s": poll_s,
        "command_to_page_s": browser.opened_s,
        "command_to_page_cpu_s": browser.opened_cpu_s,
        "queries_cpu_ms": {name: [round(1000 * value, 1) for value in values] for name, values in cpu.items()},
        "queries_ms": {name: [round(1000 * value, 1) for value in values] for name, values in times.items()},
    }


def follow(directory: Path, config: str, steps: int) -> Message:
    """What an open page costs a run: watched and alone by turns, from its first step to its end.

    The ratio of what the engines sample in neighbouring turns is the slowdown itself, as blurred as the machine is
    busy. The viewer's CPU time bounds it without blur: the run keeps all cores busy, and goes without what that uses.
    """
    command = [sys.executable, "-m", "headway.cli", "train", config, f"--run.dir={directory}", f"--run.steps={steps}"]
    events = directory / "events.jsonl"
    turns: list[tuple[float, float]] = []  # of wall clock: watched, alone, watched, …
    with subprocess.Popen([*command, "--task.eval="], stdout=subprocess.DEVNULL) as run:
        while not (events.exists() and b'"trained"' in events.read_bytes()):
            if run.poll() is not None:
                raise HeadwayError(f"{config} ended before its first step; train it by hand to see why")
            time.sleep(0.2)
        browser = Browser(directory)
        browser.poll()
        cpu_s = 0.0
        while run.poll() is None:
            started, before, is_watched = time.time(), browser.cpu_s, len(turns) % 2 == 0
            while time.time() - started < TURN_S and run.poll() is None:
                time.sleep(POLL_S)
                if is_watched:
                    browser.poll()
            turns.append((started, time.time()))
            cpu_s += (browser.cpu_s - before) * is_watched
        browser.close()
    watched_s, cores = sum(end - start for start, end in turns[::2]), len(os.sched_getaffinity(0))
    whole = turns[: (len(turns) - 1) // 2 * 2]  # without the last, in which the run ended
    speeds = [_sampled_per_s(directory, *turn) for turn in whole]
    return {
        "config": config, "watched_s": watched_s, "viewer_cpu_s": cpu_s, "cores": cores,
        "share_of_all_cores": cpu_s / watched_s / cores,
        "tokens_per_s": {"watched": speeds[::2], "alone": speeds[1::2]},
        "ratios": [watched / alone for watched, alone in zip(speeds[::2], speeds[1::2], strict=True) if alone],
    }  # fmt: skip


def _sampled_per_s(directory: Path, start: float, end: float) -> float:
    """Of all engines, by the reports whose windows lie in this time."""
    from headway.record.events import Stats
    from headway.record.run import Run

    own = [stat for stat in Run.read(directory).all(Stats) if start <= stat.time - stat.seconds and stat.time <= end]
    seconds: dict[str, float] = {}
    for stat in own:
        seconds[stat.engine] = seconds.get(stat.engine, 0.0) + stat.seconds
    return sum(stat.generated / seconds[stat.engine] for stat in own)


def main(arguments: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="headway bench viewer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=13, help="of a batch")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "viewer.json", help="where the record goes")
    parser.add_argument("--run", type=Path, help="measure this run instead of one that is written here")
    parser.add_argument("--live", default="", help="also follow a run of this config, and measure what that costs")
    parser.add_argument("--live-steps", type=int, default=20)
    options = parser.parse_args(arguments)
    record, console = Record("viewer", arguments), Console()
    with tempfile.TemporaryDirectory() as folder:
        directory = options.run or Path(folder) / "run"
        if options.run is None:
            asyncio.run(write(directory, options.steps, options.groups, options.group_size))
        found = measure(directory, options.repetitions)
        if options.live:
            found["live"] = follow(Path(folder) / "live", options.live, options.live_steps)
    table = Table(
        title=f"{found['trajectories']:,} trajectories, {found['steps']:,} steps, {found['log_mib']:.0f} MiB of log"
    )
    for heading in ("", "median ms", "worst ms", "CPU ms"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row(
        "from the command to the page",
        f"{1000 * found['command_to_page_s']:.0f}",
        "",
        f"{1000 * found['command_to_page_cpu_s']:.0f}",
    )
    table.add_row("folding the log", f"{1000 * found['fold_s']:.0f}", "", "")
    for name, values in found["queries_ms"].items():
        used = f"{statistics.median(found['queries_cpu_ms'][name]):.0f}"
        table.add_row(name, f"{statistics.median(values):.0f}", f"{max(values):.0f}", used)
    table.add_row("one look of an open page at a live run", "", "", f"{1000 * found['poll_cpu_s']:.0f}")
    console.print(table)
    if options.live:
        live = found["live"]
        console.print(
            f"following {options.live}: {live['viewer_cpu_s']:.2f} s of CPU time in {live['watched_s']:.0f} s, "
            f"{live['share_of_all_cores']:.2%} of {live['cores']} cores; tokens/s watched over alone: "
            f"{', '.join(f'{ratio:.3f}' for ratio in live['ratios'])}"
        )
    record.write(options.out, figures=found)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
