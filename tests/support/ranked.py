"""Real trainer ranks for tests: several processes that train together, and one trainer to compare with."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from rank_probes import ProbeRank
from torch import Tensor
from training import make_trainer

from headway.algorithm import AlgorithmSection
from headway.config import ModelSection, TrainerSection, WeightsSection
from headway.runtime.local import LocalRuntime
from headway.training.ranks import RankedTrainer
from headway.training.trainer import Trainer

DEADLINE_S = 120.0

T = TypeVar("T")


class Stage:
    """Ranks of one model in processes of their own, on an event loop of their own; `begin` makes them as new."""

    def __init__(self, path: str, num_ranks: int, directory: Path, deadline_s: float = DEADLINE_S, **knobs: Any):
        self.path, self.directory, self._loop = path, directory, asyncio.new_event_loop()
        self._model, self._section, self._algorithm = sections(path, num_ranks, **knobs)
        self.runtime = self.run(self._make_runtime(deadline_s))
        weights = WeightsSection(transport="shared_memory")
        given = self._model, self._section, self._algorithm, None, weights, directory, deadline_s, False, ProbeRank
        self.trainer = RankedTrainer(self.runtime, *given)
        try:
            self.run(self.trainer.start())
        except BaseException:
            self.close()
            raise

    async def _make_runtime(self, deadline_s: float) -> LocalRuntime:
        return LocalRuntime(self.directory / "logs", deadline_s)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, 2 * DEADLINE_S))

    def close(self) -> None:
        self.run(self.runtime.close())
        self._loop.close()

    @property
    def ranks(self) -> list[ProbeRank]:
        return cast(list[ProbeRank], self.trainer.ranks)

    def begin(self, **knobs: Any) -> RankedTrainer:
        """The ranks at version 0 with these knobs."""
        worst_staleness = knobs.pop("worst_staleness", None)
        _, section, algorithm = sections(self.path, len(self.ranks), **knobs)
        self.trainer._section = section
        self.each("begin", section, algorithm, worst_staleness)
        return self.trainer

    def one(self, **knobs: Any) -> Trainer:
        """One trainer with the same knobs."""
        return make_trainer(self.path, **knobs)

    def each(self, method: str, *args: Any) -> list[Any]:
        return self.run(self.trainer._each(method, *args))

    def save(self, directory: Path) -> None:
        self.run(self.trainer.snapshot())
        self.run(self.trainer.save(str(directory)))

    def gradients(self) -> dict[str, Tensor]:
        """The gradients the last minibatch was stepped with, put together from all ranks."""
        parts = self.each("gradients")
        return {
            name.removeprefix("model."): torch.cat([torch.from_numpy(part[name].copy()) for part in parts])
            for name in parts[0]
        }


def sections(path: str, num_ranks: int, **knobs: Any) -> tuple[ModelSection, TrainerSection, AlgorithmSection]:
    made = []
    knobs = {"path": path, "ranks": num_ranks, "threads": 1} | knobs
    knobs = {"behaviour_cap": 0.0, "lr": 2e-5} | knobs
    for section in (ModelSection, TrainerSection, AlgorithmSection):
        made.append(section(**{name: knobs.pop(name) for name in list(knobs) if name in section.model_fields}))
    assert not knobs, knobs
    return cast(tuple[ModelSection, TrainerSection, AlgorithmSection], tuple(made))
