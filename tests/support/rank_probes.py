"""Trainer ranks that expose their state, in a module that their processes can import."""

import os
import resource
import signal
from typing import Any

import torch
from torch import Tensor

from headway.algorithm import AlgorithmSection
from headway.config import TrainerSection
from headway.model.sharding import local_rows
from headway.training import batches
from headway.training.algorithms.algorithm import Algorithm
from headway.training.batches import MemoryFit, MicroBatch
from headway.training.optimizer import adamw
from headway.training.trainer import Trainer
from headway.types import Batch, StepReport
from headway.weights.publish import Publisher


class ProbeRank(Trainer):
    """A rank that can begin again with other knobs, shows its gradients, and fails on request."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._first = {name: tensor.clone() for name, tensor in self._state().items()}
        if os.environ.get("HEADWAY_TEST_SHORT_OF_MEMORY") == str(self.ranks.rank):
            self._have_room_for(60)

    def begin(self, section: TrainerSection, algorithm: AlgorithmSection, worst_staleness: int | None) -> None:
        """As if newly started with these sections."""
        self.section, self.algorithm = section, Algorithm(algorithm)
        self.worst_staleness, self.version = worst_staleness, 0
        self.set_fit(MemoryFit(section.token_budget, section.gradient_checkpointing))
        self.optimizer = adamw(self.masters.named.values(), section, section.lr)
        self._restore(self._first)
        self._publisher.close()
        self._publisher = Publisher()

    def train_dealt(self, batch: Batch, dealt: list[list[int]]) -> StepReport:
        """A training step of one minibatch with these samples of it on each rank."""

        def deal(lengths: list[int], num_ranks: int, cost: Any) -> list[list[int]]:
            return dealt

        exact, batches.deal = batches.deal, deal
        try:
            return self.train(batch)
        finally:
            batches.deal = exact

    def gradients(self) -> dict[str, Any]:
        """This rank's rows of every gradient."""
        named = self.masters.named.items()
        assert all(master.grad is not None for _, master in named)
        return {name: local_rows(master.grad).numpy() for name, master in named if master.grad is not None}

    async def pid(self) -> int:
        return os.getpid()

    async def limit_files(self, num_bytes: int | None) -> None:
        """Let no file grow beyond that size, which fails a write as a full disk does."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))

    async def stop_in_the_next_pass(self, number: signal.Signals | int) -> None:
        """Send this process a signal in the middle of its next forward pass."""

        def forward(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            os.kill(os.getpid(), number)
            return Trainer._forward(self, micro_batch)

        self._forward = forward  # type: ignore[method-assign]

    async def break_in_the_next_pass(self, message: str) -> None:
        def forward(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            raise ZeroDivisionError(message)

        self._forward = forward  # type: ignore[method-assign]

    def _have_room_for(self, num_tokens: int) -> None:
        def forward(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            if len(micro_batch.tokens_T) > num_tokens:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return Trainer._forward(self, micro_batch)

        self._forward = forward  # type: ignore[method-assign]
