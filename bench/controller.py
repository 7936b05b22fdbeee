"""The controller's own time per group, with everything around it real but the engine, the verifier and the trainer.

The controller, its log with the writing thread, the buffer, the staleness control, the ledger, the metrics and the
view are those of a run; rollout workers are real too. The fake engine and the stand-ins below answer in processes of
their own, so the CPU time of the measured process is the controller's and nobody else's: decoding every group,
recording it, deciding on it and encoding it for the trainer. The engine holds its answers until the whole number of
groups is in flight; after that the loop is closed, each training step admitting as many groups as it took.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from common import RESULTS_DIR, Arm, Message, Record, serve_arm, versions

from headway.types import Batch, Ints, Prompt, Sampling, Scores, StepReport, TensorInfo, Verdict, WeightUpdate

if TYPE_CHECKING:
    from rich.console import Console

    from headway.config import Config
    from headway.controller import Workers
    from headway.engine import Engine
    from headway.events import Event
    from headway.runtime import Runtime

ALPHABET = "0123456789+-=() \n"
NUM_PROMPTS, PROMPT_TOKENS, MEAN_TOKENS = 1000, 16, 32.0
ETA, MIN_GROUPS, TARGET_US = 4, 2000, 1000.0
LOAD_DEADLINE_S, RUN_DEADLINE_S = 300.0, 900.0
CALLS = {"admitted": 1, "trained": 3, "swapped": 3, "stats": 1, "checkpointed": 1}
"""What an event stands for in calls to workers; each is one message there and one back."""


class StandInVerifier:
    """In place of the reward pool: every text is right."""

    async def verify(self, task: dict[str, Any], text: str) -> Verdict:
        return Verdict(1.0, "", 0.0)


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

    async def save(self, path: str) -> None: ...

    async def save_model(self, path: str) -> None: ...


class Flight:
    """Follows the log: how many events of each kind, how many groups are in flight, and when they all are."""

    def __init__(self, num_concurrent: int) -> None:
        self._num_concurrent = num_concurrent
        self.num_events: Counter[str] = Counter()
        self.most_in_flight = 0
        self._full = asyncio.Event()

    def on_event(self, event: "Event") -> None:
        self.num_events[event.kind] += 1
        if event.kind == "admitted":
            in_flight = self.num_events["admitted"] - self.num_events["finished"]
            self.most_in_flight = max(self.most_in_flight, in_flight)
            if in_flight == self._num_concurrent:
                self._full.set()

    async def release(self, engine: "Engine") -> None:
        """Have a paused engine answer as soon as all groups are in flight."""
        await asyncio.wait_for(self._full.wait(), RUN_DEADLINE_S)
        await engine.resume()

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
            "engine": {"kind": "fake"},
            "staleness": {"max_staleness": ETA},
            "trainer": {"batch_groups": batch_groups},
            "algorithm": {"advantage": "batch"},
            "checkpoint": {"every": 10},
        }
    )


def make_prompts() -> list[Prompt]:
    rows = np.random.default_rng(0).integers(3, 3 + len(ALPHABET), (NUM_PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    return [Prompt(index, tokens, "a problem", {"answer": index}) for index, tokens in enumerate(rows)]


async def start_workers(runtime: "Runtime", config: "Config") -> "Workers":
    from headway.controller import Workers
    from headway.engine.fake import FakeEngine
    from headway.reward import RewardPool
    from headway.rollout import RolloutWorker
    from headway.trainer import Trainer

    engine: Engine = await runtime.start("engine", FakeEngine, MEAN_TOKENS, 0.0, len(ALPHABET))
    rewards = cast(RewardPool, await runtime.start("reward", StandInVerifier))
    trainer = cast(Trainer, await runtime.start("trainer", StandInTrainer))
    arguments = ({"engine": engine}, rewards, config.model.path, config.rollout.workflow, config.run.seed)
    names = [f"rollout-{number}" for number in range(config.rollout.workers)]
    rollout = await asyncio.gather(*(runtime.start(name, RolloutWorker, *arguments) for name in names))
    return Workers({"engine": engine}, trainer, rollout, runtime.failure)


async def measure(spec: Message, directory: Path) -> Message:
    """One run of the loop with `concurrent` groups in flight; what it cost this process."""
    from headway import fleet, launch
    from headway.buffer import Buffer
    from headway.controller import Controller, Progress, Tasks
    from headway.ledger import Ledger
    from headway.metrics import Metrics
    from headway.prompts import PromptStream
    from headway.record import RunLog
    from headway.staleness import StalenessControl
    from headway.tokenizer import build_character_tokenizer
    from headway.view import open_view

    config = make_config(spec, directory)
    build_character_tokenizer(ALPHABET).save_pretrained(config.model.path)
    prompts, batch_groups = make_prompts(), config.trainer.batch_groups
    sampling = Sampling(max_tokens=config.sampling.max_tokens, stop_tokens=(1,))
    tasks = Tasks(PromptStream(prompts, 0), [], launch.probe(prompts), sampling, sampling)
    staleness = StalenessControl(batch_groups, ETA, batch_groups)
    progress = Progress(0, staleness, Buffer(staleness), [])
    log, view = RunLog(directory), open_view(sys.stdout)
    metrics, ledger = Metrics(directory, config.metrics), Ledger()
    flight = Flight(spec["concurrent"])
    for listener in (ledger.on_event, view.on_event, metrics.on_event, flight.on_event):
        log.subscribe(listener)
    async with fleet.open_runtime(config, directory) as runtime:
        workers = await start_workers(runtime, config)
        engine = workers.engines["engine"]
        controller = Controller(config, workers, tasks, progress, log, directory, view)
        await engine.pause()
        release = asyncio.create_task(flight.release(engine))
        meter = Meter()
        await controller.run()
        await log.flush()
        num_groups = config.run.steps * batch_groups
        figures = meter.read(num_groups, flight)
        await release
    for closing in (metrics, log, view):
        closing.close()
    ledger.check()
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
    import headway.controller  # noqa: F401

    def handle(spec: Message) -> Message:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
            return asyncio.run(measure(spec, Path(directory)))

    return {"versions": versions("headway-rl", "msgpack", "numpy")}, handle


def run_all(options: argparse.Namespace, console: "Console") -> tuple[Message, list[Message]]:
    """Every repetition in a fresh process, numbers of groups taking turns."""
    ready, found = {}, []
    for repetition in range(1, options.repetitions + 1):
        for concurrent in options.concurrent:
            spec = {"concurrent": concurrent, "group_size": options.group_size, "workers": options.workers}
            log = options.out.parent / f"{options.out.stem}-{concurrent}.log"
            arm = Arm(f"{concurrent} groups", [sys.executable, __file__, "--arm"], {"OMP_NUM_THREADS": "1"}, log)
            with contextlib.closing(arm), console.status(f"repetition {repetition}: {arm.name}"):
                ready = arm.answer(LOAD_DEADLINE_S)
                answer = arm.ask(spec, RUN_DEADLINE_S)
            found.append({"concurrent": concurrent, "repetition": repetition, **answer})
            cost = f"{answer['cpu_us_per_group']:.0f} µs a group, {answer['wall_s']:.1f} s"
            console.print(f"repetition {repetition}: {arm.name} in flight: {cost}", highlight=False)
    return ready, found


def summarise(found: list[Message], concurrent: int) -> Message:
    rows = [row for row in found if row["concurrent"] == concurrent]
    costs = [row["cpu_us_per_group"] for row in rows]
    names = ("wall_s", "cpu_s", "groups_per_s", "messages_per_s", "mib")
    return {
        "cpu_us_per_group": {"best": min(costs), "median": statistics.median(costs), "worst": max(costs)},
        "met": max(costs) < TARGET_US,
        "medians": {name: statistics.median(row[name] for row in rows) for name in names},
    }


def show(figures: Message, options: argparse.Namespace, console: "Console") -> None:
    from rich.table import Table

    table = Table(title=f"The controller's CPU time: groups of {options.group_size}, {options.repetitions} repetitions")
    for heading in ("in flight", "µs/group", "(spread)", "wall s", "CPU s", "groups/s", "msgs/s", "MiB"):
        table.add_column(heading, justify="right")
    for concurrent, row in figures.items():
        cost, medians = row["cpu_us_per_group"], row["medians"]
        spread = f"{cost['best']:.0f}–{cost['worst']:.0f}"
        rest = [f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in medians.values()]
        table.add_row(f"{int(concurrent):,}", f"{cost['median']:.0f}", spread, *rest)
    console.print(table)
    met = all(row["met"] for row in figures.values())
    console.print(f"under {TARGET_US:.0f} µs a group in every repetition: {'met' if met else 'not met'}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway bench controller", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrent", type=int, nargs="+", default=[100, 1000, 10_000], help="groups in flight")
    parser.add_argument("--group-size", type=int, default=4, help="trajectories of a group")
    parser.add_argument("--workers", type=int, default=2, help="rollout processes")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each number of groups is run")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "controller.json", help="where the record goes")
    options = parser.parse_args(arguments)
    if any(num % (ETA + 1) for num in options.concurrent):
        parser.error(f"--concurrent must be multiples of {ETA + 1}, the batches in flight at η = {ETA}")
    if min(*options.concurrent, options.group_size, options.workers, options.repetitions) < 1:
        parser.error("every count must be 1 or more")
    return options


def main(arguments: list[str]) -> None:
    from rich.console import Console

    console, options, record = Console(), parse(arguments), Record("controller", arguments)
    ready, found = run_all(options, console)
    figures = {str(concurrent): summarise(found, concurrent) for concurrent in options.concurrent}
    settings = {"eta": ETA, "group_size": options.group_size, "rollout_workers": options.workers}
    settings |= {"prompt_tokens": PROMPT_TOKENS, "mean_completion_tokens": MEAN_TOKENS}
    record.write(options.out, settings=settings, **ready, target_us=TARGET_US, figures=figures, repetitions=found)
    show(figures, options, console)
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    # Workers are started by the name of their class, and nobody else can import a class of `__main__`.
    import controller

    if sys.argv[1:2] == ["--arm"]:
        serve_arm(controller.load_arm)
    else:
        controller.main(sys.argv[1:])
