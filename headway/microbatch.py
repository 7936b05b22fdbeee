"""A batch as packed tensors: what the trainer feeds to the model.

Shape suffixes: T packed tokens of one micro-batch, M the sampled tokens among them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.advantages import batch_advantages
from headway.config import AlgorithmSection
from headway.models import CPU, to_device
from headway.packing import pack
from headway.types import Batch, Floats, Group, Ints


@dataclass(eq=False)
class Sample:
    """One sequence with something to learn from: `where` are the places of its trained tokens."""

    tokens: Ints
    where: NDArray[np.int64]
    behaviour: Floats
    versions: Ints
    advantage: float
    temperature: float


@dataclass(frozen=True, eq=False)
class MicroBatch:
    samples: list[Sample]
    lengths: list[int]
    tokens_T: Tensor
    positions_T: Tensor
    where_M: Tensor
    temperature_M: Tensor
    behaviour_M: Tensor
    versions_M: Tensor
    advantages_M: Tensor
    proximal_M: Tensor | None = None  # filled in before the weights of this training step move

    @property
    def forward_arguments(self) -> tuple[Tensor, Tensor, list[int], Tensor, Tensor]:
        """What `Policy.forward` takes."""
        return self.tokens_T, self.positions_T, self.lengths, self.where_M, self.temperature_M


def samples_of(group: Group, advantages: dict[tuple[int, int], float]) -> list[Sample]:
    """The sequences of a group that have trained tokens, each with its trajectory's advantage."""
    samples = []
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            where = np.flatnonzero(sequence.loss_mask)
            if len(where):
                samples.append(
                    Sample(
                        tokens=sequence.tokens,
                        where=where,
                        behaviour=sequence.logprobs[where],
                        versions=sequence.versions[where],
                        advantage=advantages[group.id, trajectory.index],
                        temperature=trajectory.temperature,
                    )
                )
    return samples


def minibatches_of(batch: Batch, algorithm: AlgorithmSection, num_minibatches: int) -> list[list[Sample]]:
    """Whole groups dealt out by turns, so that every minibatch has groups of every age."""
    advantages = batch_advantages(batch, algorithm.advantage)
    dealt = [batch.groups[start::num_minibatches] for start in range(num_minibatches)]
    return [[sample for group in groups for sample in samples_of(group, advantages)] for groups in dealt]


def micro_batches(
    samples: list[Sample], token_budget: int, cost: Callable[[int], float], device: torch.device = CPU
) -> list[MicroBatch]:
    parts = arranged([len(sample.tokens) for sample in samples], token_budget, cost)
    return [assemble([samples[i] for i in indices], device) for indices in parts]


def arranged(lengths: list[int], token_budget: int, cost: Callable[[int], float]) -> list[list[int]]:
    """The sequences of each micro-batch: as few micro-batches as the budget allows, and equal work in each."""
    # Opened one by one, the first would take all the long sequences and the last would stay half empty.
    return pack(lengths, token_budget, max(1, math.ceil(sum(lengths) / token_budget)), cost)


def assemble(samples: list[Sample], device: torch.device) -> MicroBatch:
    """The samples end to end, in the order given, as one micro-batch."""
    lengths = [len(sample.tokens) for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    counts = [len(sample.where) for sample in samples]

    def joined(arrays: Iterable[NDArray[Any]]) -> Tensor:
        return to_device(torch.from_numpy(np.concatenate(list(arrays))), device)

    def repeated(values: list[float]) -> Tensor:
        return to_device(torch.from_numpy(np.repeat(np.array(values, np.float32), counts)), device)

    return MicroBatch(
        samples=samples,
        lengths=lengths,
        tokens_T=joined(sample.tokens.astype(np.int64) for sample in samples),
        positions_T=joined(np.arange(length) for length in lengths),
        where_M=joined(sample.where + start for sample, start in zip(samples, starts, strict=True)),
        temperature_M=repeated([sample.temperature for sample in samples]),
        behaviour_M=joined(sample.behaviour for sample in samples),
        versions_M=joined(sample.versions for sample in samples),
        advantages_M=repeated([sample.advantage for sample in samples]),
    )
