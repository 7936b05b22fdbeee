"""Trainer ranks whose inside can be looked at, in a module of their own so that their processes can import them."""

import os
import resource
import signal
from typing import Any

import torch
from torch import Tensor

from headway.config import AlgorithmSection, TrainerSection
from headway.model.sharding import local_rows
from headway.runtime.compute import offload
from headway.training.batches import Fit, MicroBatch
from headway.training.collective import Place
from headway.training.optimizer import adamw
from headway.training.ranks import Rank
from headway.training.trainer import Trainer
from headway.weights.publish import Publisher


class ProbeRank(Rank):
    """A rank that can begin again with other knobs, shows its gradients, and fails as it is told."""

    def __init__(self, place: Place, *given: Any):
        super().__init__(place, *given)
        self._first = self.trainer._snapshot()
        if os.environ.get("HEADWAY_TEST_SHORT_OF_MEMORY") == str(place.rank):
            self._have_room_for(60)

    async def begin(self, section: TrainerSection, algorithm: AlgorithmSection) -> None:
        """As if newly started with these sections."""
        await offload(self._begin, section, algorithm)

    def _begin(self, section: TrainerSection, algorithm: AlgorithmSection) -> None:
        trainer = self.trainer
        trainer.section, trainer.algorithm, trainer.version = section, algorithm, 0
        trainer.make_fit(Fit(section.token_budget, section.gradient_checkpointing))
        trainer.optimizer = adamw(trainer.masters.named.values(), section, section.lr)
        trainer._restore(self._first)
        trainer._publisher.close()
        trainer._publisher = Publisher()

    async def gradients(self) -> dict[str, Any]:
        """This rank's rows of every gradient."""
        named = self.trainer.masters.named.items()
        assert all(master.grad is not None for _, master in named)
        return {name: local_rows(master.grad).numpy() for name, master in named if master.grad is not None}

    async def pid(self) -> int:
        return os.getpid()

    async def limit_files(self, num_bytes: int | None) -> None:
        """Let no file grow beyond so many bytes, which fails a write as a full disk does."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))

    async def stop_in_the_next_pass(self, number: signal.Signals | int) -> None:
        """Send this process a signal in the middle of its next forward pass."""

        def forward(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            os.kill(os.getpid(), number)
            return Trainer._forward(self.trainer, micro_batch)

        self.trainer._forward = forward  # type: ignore[method-assign]

    async def break_in_the_next_pass(self, message: str) -> None:
        def forward(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            raise ZeroDivisionError(message)

        self.trainer._forward = forward  # type: ignore[method-assign]

    def _have_room_for(self, num_tokens: int) -> None:
        def forward(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            if len(micro_batch.tokens_T) > num_tokens:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return Trainer._forward(self.trainer, micro_batch)

        self.trainer._forward = forward  # type: ignore[method-assign]
