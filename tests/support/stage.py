"""A controller on stage: a fake engine, a stand-in trainer and a stand-in reward pool around it, and no model.

Rollout workers are real. A `StageRuntime` starts all of them, again too, and can let any of them die.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import xxhash
from system import make_config

from headway import launch
from headway.config import Config
from headway.control.controller import Controller, Tasks
from headway.control.resume import progress_from
from headway.control.workers import Fleet
from headway.engine.fake import FakeEngine
from headway.errors import SaveFailed, WorkerDied
from headway.launch import Prepared
from headway.record.events import Ended, Event, ResumeStarted, RunStarted, TokenCounts
from headway.record.log import read
from headway.record.run import fold
from headway.record.shards import RunLog
from headway.rollout.worker import RolloutWorker
from headway.runtime.compute import awaitable
from headway.runtime.handle import remote_methods
from headway.runtime.protocol import Runtime
from headway.tasks.prompts import PromptStream
from headway.training.checkpoint import CheckpointPart
from headway.types import (
    Batch,
    Ints,
    Scores,
    StepReport,
    TensorInfo,
    Verdict,
    WeightUpdate,
)


@dataclass
class StandInTrainer:
    """Its weights are a hash of every batch it was given: other batches, or another order, are other weights."""

    worst_staleness: int | None = None
    not_finite: frozenset[int] = frozenset()  # training steps that fail, counted from 0
    pace: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    version: int = 0
    weights: str = "start"
    kept: tuple[int, str] | None = None
    copied: tuple[int, str] | None = None
    batches: list[Batch] = field(default_factory=list)
    num_asked: int = 0
    weights_at: dict[int, str] = field(default_factory=dict)

    async def ping(self) -> None:
        pass

    async def train(self, batch: Batch) -> StepReport:
        assert batch.version == self.version
        if self.worst_staleness is not None:
            assert max(batch.staleness, default=0) <= self.worst_staleness
        await self.pace()
        self.num_asked += 1
        skipped = "loss nan" if self.num_asked - 1 in self.not_finite else ""
        if not skipped:
            self.batches.append(batch)
            trained = repr([(group.id, group.num_sampled) for group in batch.groups])
            self.weights = xxhash.xxh3_64_hexdigest(f"{self.weights} {trained}".encode())
            self.version += 1
            self.weights_at[self.version] = self.weights
        return StepReport(self.version, skipped, batch.num_sampled, 0.0, 0.0, {"loss": 0.0})

    async def publish(self) -> WeightUpdate:
        await self.pace()
        tensor = TensorInfo("weights", "float32", (1,), 0, 4, self.weights)
        return WeightUpdate(self.version, "full", "none", "", (tensor,), digest=self.weights)

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return Scores(self.version, tuple(np.zeros(len(tokens), np.float32) for tokens in sequences))

    async def snapshot(self) -> None:
        await self.pace()
        self.kept = self.version, self.weights

    async def save(self, directory: str) -> CheckpointPart:
        if self.kept is None:
            raise SaveFailed(f"cannot write {directory}: there is no snapshot")
        kept, self.kept = self.kept, None
        await self.pace()
        Path(f"{directory}.unfinished", "state.json").write_text(json.dumps(kept))
        return CheckpointPart(kept[0], "state.json", {})

    async def read(self, directory: str) -> None:
        self.kept = json.loads(Path(directory, "state.json").read_text())

    async def adopt(self) -> int:
        assert self.kept is not None
        (self.version, self.weights), self.kept = self.kept, None
        return self.version

    async def copy_model(self) -> None:
        self.copied = self.version, self.weights

    async def write_model(self, directory: str) -> None:
        if self.copied is None:
            raise SaveFailed(f"cannot write {directory}: there is no copy")
        copied, self.copied = self.copied, None
        Path(f"{directory}.unfinished", "config.json").write_text("{}")
        Path(f"{directory}.unfinished", "model.safetensors").write_text(json.dumps(copied))


@dataclass
class StandInRewards:
    """A verifier whose delays, in turns of the event loop, and failures are drawn from what it is given."""

    seed: int = 0
    longest_delay: int = 40
    failing: Callable[[int, int], bool] = lambda answer, draw: False
    num_verdicts: int = 0

    async def verify(self, task: dict[str, Any], text: str, source: str = "") -> Verdict:
        draw = xxhash.xxh3_64_intdigest(f"{self.seed} {task['prompt']} {text}".encode())
        # Long-tailed: one in eight takes as long as all the others together.
        for _ in range(draw % self.longest_delay * (8 if draw // 1000 % 8 == 0 else 1)):
            await asyncio.sleep(0)
        self.num_verdicts += 1
        failed = self.failing(int(task["answer"]), draw)
        return Verdict(0.0 if failed else float(draw % 2), "broken" if failed else "", 0.0)

    async def stats(self) -> dict[str, int]:
        return {"num_verified": self.num_verdicts}


class Mortal:
    """A worker behind a handle that can die: from then on every call fails, also those in flight."""

    def __init__(self, name: str, worker: Any) -> None:
        self._name, self.worker = name, worker
        self._dead = asyncio.Event()
        for method, is_stream in remote_methods(type(worker)).items():
            bound = awaitable(getattr(worker, method))
            setattr(self, method, self._stream(bound) if is_stream else self._call(bound))

    def die(self) -> None:
        self._dead.set()

    def _call(self, bound: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._unless_dead(bound(*args, **kwargs))

        return call

    def _stream(self, bound: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            items = bound(*args, **kwargs)
            with suppress(StopAsyncIteration):
                while True:
                    yield await self._unless_dead(anext(items))

        return stream

    async def _unless_dead(self, awaitable: Awaitable[Any]) -> Any:
        answer, death = asyncio.ensure_future(awaitable), asyncio.ensure_future(self._dead.wait())
        try:
            if not self._dead.is_set():
                await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                raise WorkerDied(f"worker {self._name} ended while it was still needed", self._name)
            return answer.result()
        finally:
            answer.cancel()
            death.cancel()


class StageRuntime:
    """Starts what the stage has for a name; with `mortal`, behind handles that can die."""

    def __init__(self, stage: "Stage") -> None:
        self._stage = stage
        self._deaths: asyncio.Queue[WorkerDied] = asyncio.Queue()
        self.workers: dict[str, Any] = {}
        self.starts: list[str] = []

    async def num_machines(self) -> int:
        return 1

    async def start(self, name: str, cls: type, *args: Any, threads: int = 1) -> Any:
        self.starts.append(name)
        await asyncio.sleep(0)
        worker = self._stage.make(name, cls, *args)
        self.workers[name] = Mortal(name, worker) if self._stage.mortal else worker
        return self.workers[name]

    async def failure(self) -> WorkerDied:
        return await self._deaths.get()

    async def stop(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if isinstance(worker, Mortal):
            worker.die()

    async def close(self) -> None: ...

    def kill(self, name: str, told: bool = True) -> None:
        """As if its process was killed; not `told`, the runtime notices nothing."""
        if name in self.workers:
            self.workers[name].die()
            if told:
                self._deaths.put_nowait(WorkerDied(f"worker {name} ended (signal 9)", name))


@dataclass
class Stage:
    """Everything a controller needs, and what it left behind."""

    prepared: Prepared
    trainer: StandInTrainer
    rewards: StandInRewards = field(default_factory=StandInRewards)
    engines: list[FakeEngine] = field(default_factory=lambda: [FakeEngine(mean_tokens=6.0)])
    mortal: bool = False
    remake: Callable[[int], FakeEngine] = lambda number: FakeEngine(mean_tokens=6.0)  # later lives, later engines
    during: Callable[["Stage", Controller], Awaitable[None]] | None = None  # what befalls the run as it goes

    @property
    def config(self) -> Config:
        return self.prepared.config

    @property
    def directory(self) -> Path:
        return Path(self.config.run.dir)

    def run(self) -> list[Event]:
        """From the beginning, or from what the log in the run directory says, to the end."""
        asyncio.run(asyncio.wait_for(self.play(), 60))
        return read(self.directory / "events.jsonl")

    async def play(self) -> None:
        path = self.directory / "events.jsonl"
        history = read(path) if path.exists() else []
        log, run = RunLog(self.directory), fold(history)
        log.subscribe(run.on_event)
        try:
            if history:
                log.append(ResumeStarted(incarnation=len(run.clock.incarnations), hardware={}))
            else:
                self._begin(log)
            self.runtime = StageRuntime(self)
            staleness = self.prepared.staleness()
            fleet = Fleet(cast(Runtime, self.runtime), self.config, staleness.worst_staleness)
            progress = progress_from(staleness, self.config.staleness, log, run)
            controller = Controller(self.config, fleet, self.tasks(), progress, log, self.directory)
            befalling = asyncio.ensure_future(self.during(self, controller)) if self.during else None
            await controller.run()
            if befalling is not None:
                await befalling
            log.append(Ended(status="finished", cause="", tokens=TokenCounts()))
        finally:
            log.close()

    def _begin(self, log: RunLog) -> None:
        log.append(
            RunStarted(
                config=self.config.model_dump(),
                hardware={},
                num_prompts=len(self.prepared.prompts),
                worst_staleness=self.prepared.staleness().worst_staleness,
                config_hash="",
            )
        )

    def make(self, name: str, cls: type, *args: Any) -> Any:
        """What is started under a name: rollout workers are real; a later life begins from nothing."""
        kind, _, number = name.partition("-")
        is_first = self.runtime.starts.count(name) == 1
        if kind == "rollout":
            return RolloutWorker(*args)
        if kind == "reward":
            return self.rewards
        if kind == "trainer":
            if not is_first:
                self.trainer = replace(self.trainer, version=0, weights="start", batches=[], kept=None)
            return self.trainer
        is_known = is_first and int(number or 0) < len(self.engines)
        return self.engines[int(number or 0)] if is_known else self.remake(int(number or 0))

    def tasks(self) -> Tasks:
        return Tasks(
            prompts=self.prepared.prompts,
            stream=PromptStream(self.prepared.prompts, self.config.run.seed),
            held_out=self.prepared.held_out,
            probe=(np.array([1, 2], np.int32),),
            sampling=self.prepared.sampling,
            eval_sampling=self.prepared.eval_sampling,
        )


During = Callable[[Stage, Controller], Awaitable[None]]


def kinds(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def timed_engines(num: int, seconds_per_token: float = 0.0005) -> list[FakeEngine]:
    return [FakeEngine(mean_tokens=6.0, seconds_per_token=seconds_per_token) for _ in range(num)]


async def steps_done(controller: Controller, version: int) -> None:
    while controller.version < version:
        await asyncio.sleep(0)


class MakeStage(Protocol):
    def __call__(self, sections: dict[str, dict[str, Any]], **options: Any) -> Stage:
        """A stage in a directory of its own, with `sections` on top of the small config."""
        ...


def stage_maker(model: str, home: Path) -> MakeStage:
    numbers = count()
    base = launch.prepare(make_config(home, model))

    def make(sections: dict[str, dict[str, Any]], **options: Any) -> Stage:
        run = {"dir": f"{home}/{next(numbers)}"} | sections.get("run", {})
        engine = {"count": len(options.get("engines", [None]))} | sections.get("engine", {})
        supervise = {"backoff_s": 0.001} | sections.get("supervise", {})
        config = make_config(home, model, **sections | {"run": run, "engine": engine, "supervise": supervise})
        prepared = replace(base, config=config)
        trainer = StandInTrainer(prepared.staleness().worst_staleness, options.pop("not_finite", frozenset()))
        return Stage(prepared, trainer, **options)

    return make


def crash_after(num_events: int, run: "Stage", into: "Stage") -> None:
    """What the disk holds when a run is killed right after one of its events: the log so far, and its checkpoints."""
    into.directory.mkdir()
    shutil.copytree(run.directory / "record", into.directory / "record")
    lines = (run.directory / "events.jsonl").read_text().splitlines(keepends=True)
    (into.directory / "events.jsonl").write_text("".join(lines[:num_events]))
    for slot in ("a", "b"):
        (into.directory / "checkpoint" / slot).mkdir(parents=True)
    for event in read(into.directory / "events.jsonl"):
        if event.kind == "checkpointed":
            state = [event.version, run.trainer.weights_at[event.version]]
            (into.directory / "checkpoint" / event.slot / "state.json").write_text(json.dumps(state))


def drawn_pace(seed: int) -> Callable[[], Awaitable[None]]:
    numbers = count()

    async def pace() -> None:
        for _ in range(xxhash.xxh3_64_intdigest(f"{seed} {next(numbers)}".encode()) % 60):
            await asyncio.sleep(0)

    return pace
