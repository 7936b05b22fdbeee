"""The controller's own time per group, with everything around it real but the engines, the verifier and the trainer.

The controller, its log with the writing thread, the buffer, the staleness control, the ledger, the metrics and the
view are those of a run; rollout workers are real too. The fake engine and the stand-ins below answer in processes of
their own, so the CPU time of the measured process is the controller's and nobody else's: decoding every group,
recording it, deciding on it and encoding it for the trainer. Engines hold their answers until the whole number of
groups is in flight; after that the loop is closed, each training step admitting as many groups as it took.

Two series: groups in flight, at one engine that answers at once; and engines, each of which takes the time of a real
one. Many of those live in one process, and each is still called, health-checked and given weights by itself.
"""

import argparse
import asyncio
import contextlib
import gc
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from common import RESULTS_DIR, Arm, Message, Record, serve_arm, versions

from headway.codec import portable
from headway.rollout.worker import RolloutWorker
from headway.types import (
    Batch,
    Chunk,
    Completion,
    EngineStats,
    Ints,
    Prompt,
    Request,
    RequestKey,
    Sampling,
    Scores,
    StepReport,
    SwapReport,
    TensorInfo,
    Verdict,
    WeightUpdate,
)

if TYPE_CHECKING:
    from rich.console import Console

    from headway.config import Config
    from headway.engine.protocol import KvPolicy
    from headway.record.events import Event
    from headway.runtime.protocol import Runtime

ALPHABET = "0123456789+-=() \n"
NUM_PROMPTS, PROMPT_TOKENS, MEAN_TOKENS = 1000, 16, 32.0
ETA, MIN_GROUPS, TARGET_US = 4, 2000, 1000.0
SECONDS_PER_TOKEN, GROUPS_PER_ENGINE, MIN_CONCURRENT = 0.05, 5, 1000
LOAD_DEADLINE_S, RUN_DEADLINE_S = 300.0, 900.0
CALLS = {"admitted": 1, "trained": 3, "swapped": 3, "stats": 1, "checkpointed": 1}
"""What an event stands for in calls to workers; each is one message there and one back."""


class Hall:
    """Many fake engines in one process, each asked under its number."""

    def __init__(self, num_engines: int, seconds_per_token: float) -> None:
        from headway.engine.fake import FakeEngine

        self._engines = [FakeEngine(MEAN_TOKENS, seconds_per_token, len(ALPHABET)) for _ in range(num_engines)]
        self._started = asyncio.Event()

    async def open(self) -> None: ...

    async def go(self) -> None:
        self._started.set()

    async def generate(self, number: int, request: Request) -> AsyncIterator[Chunk | Completion]:
        await self._started.wait()
        async for item in self._engines[number].generate(request):
            yield item

    async def ask(self, number: int, method: str, arguments: list[Any]) -> Any:
        return await getattr(self._engines[number], method)(*arguments)


@portable
class Guest:
    """One engine of the hall, as everybody else sees it."""

    def __init__(self, hall: Any, number: int) -> None:
        self._hall, self._number = hall, number

    def to_plain(self) -> list[Any]:
        return [self._hall, self._number]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> "Guest":
        return cls(*plain)

    def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        items: AsyncIterator[Chunk | Completion] = self._hall.generate(self._number, request)
        return items

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await self._hall.ask(self._number, method, list(arguments))

    async def abort(self, key: RequestKey) -> None:
        await self._ask("abort", key)

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        scores: Scores = await self._ask("score", sequences, temperature)
        return scores

    async def stage_weights(self, update: WeightUpdate) -> None:
        await self._ask("stage_weights", update)

    async def swap(self, version: int, kv: "KvPolicy") -> SwapReport:
        report: SwapReport = await self._ask("swap", version, kv)
        return report

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._ask("stats")
        return stats

    async def close(self) -> None: ...


class Rollout(RolloutWorker):
    """A rollout worker whose process knows guests when they arrive."""


class StandInVerifier:
    """In place of the reward pool: every text is right."""

    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Verdict:
        return Verdict(1.0, "", 0.0)

    async def stats(self) -> dict[str, int]:
        return {}


class StandInTrainer:
    """Receives batches whole, computes nothing, adds versions."""

    def __init__(self) -> None:
        self.version = 0

    async def train(self, batch: Batch) -> StepReport:
        self.version += 1
        return StepReport(self.version, "", batch.num_sampled, time.time(), 0.0, {"loss": 0.0})

    async def publish(self) -> WeightUpdate:
        tensor = TensorInfo("lm_head.weight", "float32", (1,), 0, 4, f"{self.version:016x}")
        return WeightUpdate(self.version, "full", "none", "", (tensor,))

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return Scores(self.version, tuple(np.zeros(len(tokens), np.float32) for tokens in sequences))

    async def ping(self, seconds: float) -> None: ...

    async def snapshot(self) -> None: ...

    async def save(self, path: str) -> None: ...

    async def copy_model(self) -> None: ...

    async def write_model(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)


class Flight:
    """Follows the log: how many events of each kind, how many groups are in flight, when they all are, and what the
    time from the first admission on cost: starting workers is no group's cost."""

    def __init__(self, num_concurrent: int) -> None:
        self._num_concurrent = num_concurrent
        self.num_events: Counter[str] = Counter()
        self.meter: Meter | None = None
        self.most_in_flight = 0
        self._full = asyncio.Event()

    def on_event(self, event: "Event") -> None:
        self.num_events[event.kind] += 1
        if event.kind == "admitted":
            self.meter = self.meter or Meter()
            in_flight = self.num_events["admitted"] - self.num_events["finished"]
            self.most_in_flight = max(self.most_in_flight, in_flight)
            if in_flight == self._num_concurrent:
                self._full.set()

    async def release(self, hall: Hall) -> None:
        """Have paused engines answer as soon as all groups are in flight."""
        await asyncio.wait_for(self._full.wait(), RUN_DEADLINE_S)
        await hall.go()

    @property
    def num_messages(self) -> int:
        return 2 * sum(calls * self.num_events[kind] for kind, calls in CALLS.items())


def make_config(spec: Message, directory: Path) -> "Config":
    from headway.config import validate

    batch_groups = spec["concurrent"] // (ETA + 1)
    num_groups = max(2 * spec["concurrent"], MIN_GROUPS)
    return validate(
        {
            "run": {"dir": str(directory), "steps": num_groups // batch_groups, "deadline_s": RUN_DEADLINE_S},
            "model": {"path": str(directory / "tokenizer")},
            "task": {"train": "prompts made here", "verifier": "a stand-in"},
            "rollout": {"group_size": spec["group_size"], "workers": spec["workers"]},
            "engine": {"kind": "fake", "count": spec["engines"]},
            "staleness": {"max_staleness": ETA},
            "trainer": {"batch_groups": batch_groups},
            "algorithm": {"baseline": "none", "normalise": "batch"},
            "checkpoint": {"every": 10},
        }
    )


def make_prompts() -> list[Prompt]:
    rows = np.random.default_rng(0).integers(3, 3 + len(ALPHABET), (NUM_PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    return [Prompt(index, tokens, "a problem", {"answer": index}) for index, tokens in enumerate(rows)]


class StandInFleet:
    """Starts a stand-in for every worker but the rollout workers."""

    def __init__(self, runtime: "Runtime", config: "Config", hall: "Hall") -> None:
        self._runtime, self._config, self._hall = runtime, config, hall

    async def start_engine(self, name: str) -> Any:
        return Guest(self._hall, int(name.removeprefix("engine").removeprefix("-") or 0))

    async def start_rollout(self, name: str) -> Any:
        config = self._config
        arguments = (config.model.path, config.rollout, config.run.seed, len(ALPHABET), 4096, 4096, RUN_DEADLINE_S)
        return await self._runtime.start(name, Rollout, *arguments)

    async def start_rewards(self) -> Any:
        return await self._runtime.start("reward", StandInVerifier)

    async def start_trainer(self) -> Any:
        return await self._runtime.start("trainer", StandInTrainer)

    async def stop(self, name: str) -> None:
        await self._runtime.stop(name)

    async def failure(self) -> Any:
        return await self._runtime.failure()


async def measure(spec: Message, directory: Path) -> Message:
    """One run of the loop with `concurrent` groups in flight; what it cost this process."""
    from headway import launch
    from headway.control.adaptive import AdaptiveStaleness
    from headway.control.buffer import Buffer
    from headway.control.controller import Controller, Progress, Tasks
    from headway.control.staleness import StalenessControl
    from headway.control.workers import Fleet, open_runtime
    from headway.model.tokenizer import build_character_tokenizer
    from headway.monitor.metrics import Metrics
    from headway.monitor.view import open_view
    from headway.record.run import Run
    from headway.record.shards import RunLog
    from headway.tasks.prompts import PromptStream

    config = make_config(spec, directory)
    build_character_tokenizer(ALPHABET).save_pretrained(config.model.path)
    prompts, batch_groups = make_prompts(), config.trainer.batch_groups
    sampling = Sampling(max_tokens=config.sampling.max_tokens, stop_tokens=(1,))
    tasks = Tasks(prompts, PromptStream(prompts, 0), [], launch.probe(prompts), sampling, sampling)
    staleness = StalenessControl(batch_groups, ETA, batch_groups)
    progress = Progress(0, staleness, Buffer(staleness), AdaptiveStaleness(config.staleness))
    log, view = RunLog(directory), open_view(sys.stdout)
    run = Run()
    view.follow(run)
    metrics = Metrics(directory, config.metrics, run)
    flight = Flight(spec["concurrent"])
    for listener in (run.on_event, view.on_event, metrics.on_event, flight.on_event):
        log.subscribe(listener)
    async with open_runtime(config, directory) as runtime:
        hall = await runtime.start("hall", Hall, spec["engines"], spec["seconds_per_token"])
        fleet = cast(Fleet, StandInFleet(runtime, config, hall))
        controller = Controller(config, fleet, tasks, progress, log, directory)
        release = asyncio.create_task(flight.release(hall))
        await controller.run()
        await log.flush()
        num_groups = config.run.steps * batch_groups
        assert flight.meter is not None
        figures = flight.meter.read(num_groups, flight)
        await release
    for closing in (metrics, log, view):
        closing.close()
    run.check_tokens()
    if flight.num_events["worker_lost"]:
        raise AssertionError("a worker was lost")
    if flight.most_in_flight < spec["concurrent"] or staleness.num_trained != num_groups:
        raise AssertionError(f"{flight.most_in_flight} groups were in flight, {staleness.num_trained} were trained")
    return figures


class Meter:
    """CPU time of this process with all its threads, wall time and memory, from here to `read`."""

    def __init__(self) -> None:
        gc.collect()
        self._resident_mib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def read(self, num_groups: int, flight: Flight) -> Message:
        wall_s, cpu_s = time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "cpu_us_per_group": cpu_s / num_groups * 1e6,
            "groups_per_s": num_groups / wall_s,
            "messages_per_s": flight.num_messages / wall_s,
            "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - self._resident_mib,
            "num_groups": num_groups,
            "most_in_flight": flight.most_in_flight,
        }


def load_arm() -> tuple[Message, Any]:
    """Only an arm's own process comes here; the imports are paid before anything is measured."""
    import headway.control.controller  # noqa: F401

    def handle(spec: Message) -> Message:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
            return asyncio.run(measure(spec, Path(directory)))

    return {"versions": versions("headway-rl", "msgspec", "numpy")}, handle


def run_all(options: argparse.Namespace, console: "Console") -> tuple[Message, list[Message]]:
    """Every repetition in a fresh process, numbers of groups taking turns."""
    ready, found = {}, []
    for repetition in range(1, options.repetitions + 1):
        for spec in [*groups_series(options), *engines_series(options)]:
            name = f"{spec['concurrent']} groups, {spec['engines']} engines"
            log = options.out.parent / f"{options.out.stem}-{spec['concurrent']}-{spec['engines']}.log"
            arm = Arm(name, [sys.executable, __file__, "--arm"], {"OMP_NUM_THREADS": "1"}, log)
            with contextlib.closing(arm), console.status(f"repetition {repetition}: {arm.name}"):
                ready = arm.answer(LOAD_DEADLINE_S)
                answer = arm.ask(spec, RUN_DEADLINE_S)
            found.append({**spec, "repetition": repetition, **answer})
            cost = f"{answer['cpu_us_per_group']:.0f} µs a group, {answer['wall_s']:.1f} s"
            console.print(f"repetition {repetition}: {arm.name}: {cost}", highlight=False)
    return ready, found


def groups_series(options: argparse.Namespace) -> list[Message]:
    shared = {"group_size": options.group_size, "workers": options.workers, "series": "groups"}
    return [{**shared, "concurrent": num, "engines": 1, "seconds_per_token": 0.0} for num in options.concurrent]


def engines_series(options: argparse.Namespace) -> list[Message]:
    """As many groups for each engine as keep it busy, and enough of them to tell the engines' cost from the rest."""
    shared = {"group_size": options.group_size, "workers": options.workers, "series": "engines"}
    return [
        {
            **shared,
            "concurrent": max(MIN_CONCURRENT, GROUPS_PER_ENGINE * num),
            "engines": num,
            "seconds_per_token": options.seconds_per_token,
        }
        for num in options.engines
    ]


def summarise(rows: list[Message]) -> Message:
    costs = [row["cpu_us_per_group"] for row in rows]
    names = ("wall_s", "cpu_s", "groups_per_s", "messages_per_s", "mib")
    return {
        "cpu_us_per_group": {"best": min(costs), "median": statistics.median(costs), "worst": max(costs)},
        "met": max(costs) < TARGET_US,
        "medians": {name: statistics.median(row[name] for row in rows) for name in names},
    }


def show(figures: Message, what: str, options: argparse.Namespace, console: "Console") -> None:
    from rich.table import Table

    table = Table(title=f"The controller's CPU time: groups of {options.group_size}, {options.repetitions} repetitions")
    for heading in (what, "µs/group", "(spread)", "wall s", "CPU s", "groups/s", "msgs/s", "MiB"):
        table.add_column(heading, justify="right")
    for number, row in figures.items():
        cost, medians = row["cpu_us_per_group"], row["medians"]
        spread = f"{cost['best']:.0f}–{cost['worst']:.0f}"
        rest = [f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in medians.values()]
        table.add_row(f"{int(number):,}", f"{cost['median']:.0f}", spread, *rest)
    console.print(table)
    if figures:
        met = all(row["met"] for row in figures.values())
        console.print(f"under {TARGET_US:.0f} µs a group in every repetition: {'met' if met else 'not met'}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench controller", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrent", type=int, nargs="*", default=[100, 1000, 10_000], help="groups in flight")
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 10, 100, 1000], help="simulated engines")
    parser.add_argument("--seconds-per-token", type=float, default=SECONDS_PER_TOKEN, help="of a simulated engine")
    parser.add_argument("--group-size", type=int, default=4, help="trajectories of a group")
    parser.add_argument("--workers", type=int, default=2, help="rollout processes")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each number of groups is run")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "controller.json", help="where the record goes")
    options = parser.parse_args(arguments)
    if any(num % (ETA + 1) for num in options.concurrent):
        parser.error(f"--concurrent must be multiples of {ETA + 1}, the batches in flight at η = {ETA}")
    if min(*options.concurrent, *options.engines, options.group_size, options.workers, options.repetitions) < 1:
        parser.error("every count must be 1 or more")
    return options


def figures_of(found: list[Message], series: str, key: str) -> Message:
    """The series' summaries by the number that makes its members differ."""
    rows = [row for row in found if row["series"] == series]
    return {str(number): summarise([row for row in rows if row[key] == number]) for number in {r[key]: 0 for r in rows}}


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options, record = Console(), parse(arguments), Record("controller", arguments)
    ready, found = run_all(options, console)
    figures = figures_of(found, "groups", "concurrent")
    by_engines = figures_of(found, "engines", "engines")
    settings = {"eta": ETA, "group_size": options.group_size, "rollout_workers": options.workers}
    settings |= {"prompt_tokens": PROMPT_TOKENS, "mean_completion_tokens": MEAN_TOKENS}
    settings |= {"seconds_per_token": options.seconds_per_token}
    results = {"target_us": TARGET_US, "figures": figures, "by_engines": by_engines, "repetitions": found}
    record.write(options.out, settings=settings, **ready, **results)
    show(figures, "in flight", options, console)
    show(by_engines, "engines", options, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    # Workers are started by the name of their class, and nobody else can import a class of `__main__`.
    import controller

    if sys.argv[1:2] == ["--arm"]:
        serve_arm(controller.load_arm)
    else:
        controller.main(sys.argv[1:])
