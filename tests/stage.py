"""A controller on stage: a fake engine, a stand-in trainer and a stand-in reward pool around it, and no model."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from headway.config import Config
from headway.controller import Controller, Tasks, Workers
from headway.engine import Engine
from headway.engine.fake import FakeEngine
from headway.errors import WorkerDied
from headway.events import Event, read
from headway.launch import Prepared
from headway.ledger import fold
from headway.prompts import PromptStream
from headway.record import RunLog
from headway.resume import progress_from
from headway.reward import RewardPool
from headway.rollout import RolloutWorker
from headway.trainer import Trainer
from headway.types import Batch, Ints, Scores, StepReport, TensorInfo, Verdict, WeightUpdate
from headway.view import PlainView


@dataclass
class StandInTrainer:
    """Its weights are a hash of every batch it was given: other batches, or another order, are other weights."""

    worst_staleness: int | None = None
    not_finite: frozenset[int] = frozenset()  # training steps that fail, counted from 0
    pace: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    version: int = 0
    weights: str = "start"
    batches: list[Batch] = field(default_factory=list)
    num_asked: int = 0
    weights_at: dict[int, str] = field(default_factory=dict)

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
        return WeightUpdate(self.version, "full", "none", "", (tensor,))

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return Scores(self.version, tuple(np.zeros(len(tokens), np.float32) for tokens in sequences))

    async def save(self, directory: str) -> None:
        await self.pace()
        Path(directory).parent.mkdir(exist_ok=True)
        Path(directory).write_text(json.dumps([self.version, self.weights]))

    async def load(self, directory: str) -> int:
        self.version, self.weights = json.loads(Path(directory).read_text())
        return self.version

    async def save_model(self, directory: str) -> None:
        pass


@dataclass
class StandInRewards:
    """A verifier whose delays, in turns of the event loop, and failures are drawn from what it is given."""

    seed: int = 0
    longest_delay: int = 40
    failing: Callable[[int, int], bool] = lambda answer, draw: False
    num_verdicts: int = 0

    async def verify(self, task: dict[str, Any], text: str) -> Verdict:
        draw = xxhash.xxh3_64_intdigest(f"{self.seed} {task['prompt']} {text}".encode())
        # Long-tailed: one in eight takes as long as all the others together.
        for _ in range(draw % self.longest_delay * (8 if draw // 1000 % 8 == 0 else 1)):
            await asyncio.sleep(0)
        self.num_verdicts += 1
        failed = self.failing(int(task["answer"]), draw)
        return Verdict(0.0 if failed else float(draw % 2), "broken" if failed else "", 0.0)


@dataclass
class Stage:
    """Everything a controller needs, and what it left behind."""

    prepared: Prepared
    trainer: StandInTrainer
    rewards: StandInRewards = field(default_factory=StandInRewards)
    engines: list[FakeEngine] = field(default_factory=lambda: [FakeEngine(mean_tokens=6.0)])
    failure: Callable[[], Awaitable[WorkerDied]] = lambda: cast(Awaitable[WorkerDied], asyncio.Event().wait())

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
        view = PlainView(io.StringIO())
        log = RunLog(self.directory)
        trainer = cast(Trainer, self.trainer)
        try:
            if not history:
                self._begin(log)
            progress = await progress_from(self.prepared, log, fold(history), history, trainer, self.directory, view)
            workers = Workers(self._engines(), trainer, self._rollout(), self.failure)
            await Controller(self.config, workers, self.tasks(), progress, log, self.directory, view).run()
            log.append("ended", status="finished", cause="", ledger={})
        finally:
            log.close()
            view.close()

    def _begin(self, log: RunLog) -> None:
        log.append(
            "run_started",
            config=self.config.model_dump(),
            hardware={},
            num_prompts=len(self.prepared.prompts),
            worst_staleness=self.prepared.staleness().worst_staleness,
            config_hash="",
        )

    def _engines(self) -> dict[str, Engine]:
        return {f"engine-{number}": engine for number, engine in enumerate(self.engines)}

    def _rollout(self) -> list[RolloutWorker]:
        section = self.config.rollout
        rewards = cast(RewardPool, self.rewards)
        return [
            RolloutWorker(self._engines(), rewards, self.config.model.path, section.workflow, 0)
            for _ in range(section.workers)
        ]

    def tasks(self) -> Tasks:
        return Tasks(
            stream=PromptStream(self.prepared.prompts, self.config.run.seed),
            held_out=self.prepared.held_out,
            probe=(np.array([1, 2], np.int32),),
            sampling=self.prepared.sampling,
            eval_sampling=self.prepared.eval_sampling,
        )


def drawn_pace(seed: int) -> Callable[[], Awaitable[None]]:
    numbers = count()

    async def pace() -> None:
        for _ in range(xxhash.xxh3_64_intdigest(f"{seed} {next(numbers)}".encode()) % 60):
            await asyncio.sleep(0)

    return pace
