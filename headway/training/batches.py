"""A batch as packed tensors: what the trainer feeds to the model.

Over several ranks, samples are dealt out by whole sequences and equal work, and every rank makes the same number of
micro-batches of its share, because all of them have to take part in every pass. One that has too few samples fills up
with micro-batches in which nothing is trained.

Shape suffixes: T packed tokens of one micro-batch, M the sampled tokens among them.
"""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.codec import noun
from headway.config import AlgorithmSection
from headway.errors import RunFailed
from headway.model.device import CPU, to_device
from headway.training.algorithms.advantages import batch_advantages
from headway.training.packing import pack
from headway.types import Batch, Group, Ints, Sample, Share

_BLANK = Sample(np.zeros(2, np.int32), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int32), 0.0, 1.0)
"""Nothing in it is trained. Two tokens: with one, compiled blocks would be compiled anew."""


@noun
class Fit:
    """How passes are made to fit into memory; the gradient does not depend on it."""

    token_budget: int
    recompute: bool  # activations, in the backward pass, rather than keeping them

    def tighter(self, longest: int) -> "Fit":
        """The next to try: smaller micro-batches as far as the longest sequence allows, then recomputing."""
        if self.token_budget > longest:
            return replace(self, token_budget=max(longest, self.token_budget // 2))
        if not self.recompute:
            return replace(self, recompute=True)
        raise RunFailed(
            f"the GPU has too little memory to train a sequence of {longest} tokens; lower sampling.max_tokens or "
            "engine.kv_tokens, or train on several GPUs"
        )

    def __str__(self) -> str:
        return f"micro-batches of {self.token_budget} tokens" + ", activations recomputed" * self.recompute


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


def whole_sample(tokens: Ints, temperature: float) -> Sample:
    """A sequence of which every token but the first is scored."""
    where = np.arange(1, len(tokens))
    blank = np.zeros(len(where), np.float32)
    return Sample(tokens, where, blank, np.zeros(len(where), np.int32), 0.0, temperature)


def minibatches_of(batch: Batch, algorithm: AlgorithmSection, num_minibatches: int) -> list[list[Sample]]:
    """Whole groups dealt out by turns, so that every minibatch has groups of every age."""
    advantages = batch_advantages(batch, algorithm.advantage)
    dealt = [batch.groups[start::num_minibatches] for start in range(num_minibatches)]
    return [[sample for group in groups for sample in samples_of(group, advantages)] for groups in dealt]


def shares_of(
    batch: Batch, algorithm: AlgorithmSection, num_minibatches: int, num_ranks: int, cost: Callable[[int], float]
) -> list[Share]:
    """What each rank gets of a batch; a minibatch in which nothing was said is left out."""
    minibatches = [part for part in minibatches_of(batch, algorithm, num_minibatches) if part]
    everything = [sample for part in minibatches for sample in part]
    about_all = (
        tuple(sum(len(sample.where) for sample in part) for part in minibatches),
        batch.num_sampled,
        max((len(sample.tokens) for sample in everything), default=0),
        all(bool(np.isfinite(sample.behaviour).all()) for sample in everything),
    )
    dealt = [[[part[i] for i in mine] for mine in deal(_lengths(part), num_ranks, cost)] for part in minibatches]
    return [Share(batch.version, tuple(tuple(part[rank]) for part in dealt), *about_all) for rank in range(num_ranks)]


def deal(lengths: list[int], num_ranks: int, cost: Callable[[int], float]) -> list[list[int]]:
    """The sequences of each rank: equal work, as nearly as whole sequences allow; a rank may get none."""
    parts = pack(lengths, max(1, sum(lengths)), num_ranks, cost)
    return parts + [[] for _ in range(num_ranks - len(parts))]


def micro_batches(
    samples: Listed[Sample],
    token_budget: int,
    cost: Callable[[int], float],
    device: torch.device = CPU,
    most: Callable[[int], int] = int,
) -> list[MicroBatch]:
    """The samples in micro-batches, as many as on the rank that has `most`."""
    parts = arranged(_lengths(samples), token_budget, cost, most)
    return [assemble([samples[i] for i in indices] or [_BLANK], device) for indices in parts]


def arranged(
    lengths: list[int], token_budget: int, cost: Callable[[int], float], most: Callable[[int], int] = int
) -> list[list[int]]:
    """The sequences of each micro-batch: as few micro-batches as the budget allows, and equal work in each.

    `most` gives the largest number of micro-batches on any rank. A rank with fewer cuts its share into that many too,
    which may take more than that many, so they ask again until all agree.
    """
    # Opened one by one, the first would take all the long sequences and the last would stay half empty.
    parts = pack(lengths, token_budget, max(1, math.ceil(sum(lengths) / token_budget)), cost)
    agreed = most(len(parts))
    while True:
        if len(parts) < agreed:
            parts = pack(lengths, token_budget, agreed, cost)
        before, agreed = agreed, most(len(parts))
        if agreed <= before:
            return parts + [[] for _ in range(before - len(parts))]


def _lengths(samples: Listed[Sample]) -> list[int]:
    return [len(sample.tokens) for sample in samples]


def assemble(samples: list[Sample], device: torch.device) -> MicroBatch:
    """The samples end to end, in the order given, as one micro-batch."""
    lengths = _lengths(samples)
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
