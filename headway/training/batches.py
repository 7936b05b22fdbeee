"""A batch as packed tensors: what the trainer feeds to the model.

Every rank takes the whole batch and picks its share: whole sequences, equal work. All ranks take part in every pass, so
they make the same number of micro-batches; a rank with too few samples adds micro-batches in which nothing is trained.

Shape suffixes: T packed tokens of one micro-batch, M the sampled tokens among them, N sequences.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.algorithm import AlgorithmSection
from headway.codec import message
from headway.errors import RunFailed
from headway.model.device import CPU, to_device
from headway.trained_tokens import TrainedTokens
from headway.training.algorithms.credit import Advantages, Key, batch_advantages, was_cut
from headway.training.packing import pack
from headway.types import Batch, Floats, Group, Ints, Sample

_NOTHING = np.zeros(0, np.float32)
_BLANK = Sample(np.zeros(2, np.int32), np.zeros(0, np.int64), _NOTHING, np.zeros(0, np.int32), _NOTHING, 1.0)
"""A sample in which nothing is trained. Two tokens, because compiled blocks specialise on a length of one."""


@message
class MemoryFit:
    """How passes fit into memory: micro-batch size and activation checkpointing. The gradient does not depend on it."""

    token_budget: int
    recompute: bool  # activations, in the backward pass, instead of storing them

    def reduce(self, longest: int) -> "MemoryFit":
        """The next fit to try: smaller micro-batches as far as the longest sequence allows, then recomputation."""
        if self.token_budget > longest:
            return replace(self, token_budget=max(longest, self.token_budget // 2))
        if not self.recompute:
            return replace(self, recompute=True)
        raise RunFailed(
            f"the GPU has too little memory to train a sequence of {longest} tokens; lower sampling.max_tokens or "
            "engine.kv_tokens, or train on several GPUs"
        )

    def as_metrics(self) -> dict[str, float]:
        """For the record of a training step: retraining packs its batch in the same way."""
        return {"token_budget": float(self.token_budget), "recompute": float(self.recompute)}

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float | None]) -> "MemoryFit | None":
        token_budget = metrics.get("token_budget")
        return cls(int(token_budget), bool(metrics.get("recompute"))) if token_budget else None

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
    counts_N: Tensor
    proximal_M: Tensor | None = None  # computed before the weights of this training step move

    @property
    def forward_arguments(self) -> tuple[Tensor, Tensor, list[int], Tensor, Tensor]:
        """What `Policy.forward` takes."""
        return self.tokens_T, self.positions_T, self.lengths, self.where_M, self.temperature_M


def samples_of(group: Group, advantages: Mapping[Key, Floats], mask_truncated: bool = False) -> list[Sample]:
    """The sequences of a group that have trained tokens, each with its part of its trajectory's advantages."""
    samples = []
    for trajectory in group.trajectories:
        if mask_truncated and was_cut(trajectory):
            continue
        left_T = advantages[group.id, trajectory.index]
        for number, sequence in enumerate(trajectory.sequences):
            where = np.flatnonzero(sequence.loss_mask)
            own_T, left_T = left_T[: len(where)], left_T[len(where) :]
            if len(where):
                arrays = sequence.logprobs[where], sequence.versions[where], own_T
                source = group.id, trajectory.index, number
                samples.append(Sample(sequence.tokens, where, *arrays, trajectory.temperature, source))
    return samples


def whole_sample(tokens: Ints, temperature: float) -> Sample:
    """A sequence of which every token but the first is scored."""
    where = np.arange(1, len(tokens))
    blank = np.zeros(len(where), np.float32)
    return Sample(tokens, where, blank, np.zeros(len(where), np.int32), blank, temperature)


def minibatches_of(
    batch: Batch, chosen: AlgorithmSection, num_minibatches: int, advantages: Advantages | None = None
) -> list[list[Sample]]:
    """Whole groups assigned round-robin, so that every minibatch has groups of every age."""
    found = (advantages or batch_advantages(batch, chosen)).by_trajectory
    assigned = [batch.groups[start::num_minibatches] for start in range(num_minibatches)]
    masked = chosen.mask_truncated
    return [[sample for group in groups for sample in samples_of(group, found, masked)] for groups in assigned]


def longest_of(batch: Batch) -> int:
    """Tokens of the longest sequence, trained or not."""
    lengths = (len(s.tokens) for group in batch.groups for t in group.trajectories for s in t.sequences)
    return max(lengths, default=0)


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's samples of a batch, and what the gradient needs to know of the other ranks' samples."""

    minibatches: list[list[Sample]]
    num_trained: list[int]  # trained tokens of each minibatch, over all ranks
    num_sequences: list[int]  # the sequences they belong to
    longest: int  # tokens of the longest sequence
    finite: bool  # whether all behaviour log-probs are
    entropy: float  # of the policies that sampled the batch, estimated from their log-probs
    figures: dict[str, float]  # of the whole batch, for the report


def share_of(
    batch: Batch,
    chosen: AlgorithmSection,
    num_minibatches: int,
    cost: Callable[[int], float],
    rank: int = 0,
    num_ranks: int = 1,
    advantages: Advantages | None = None,
) -> Share:
    """The share of one rank of a batch; minibatches without trained tokens are dropped."""
    advantages = advantages or batch_advantages(batch, chosen)
    minibatches = [samples for samples in minibatches_of(batch, chosen, num_minibatches, advantages) if samples]
    everything = [sample for samples in minibatches for sample in samples]
    behaviour = np.concatenate([_NOTHING, *(sample.behaviour for sample in everything)])
    return Share(
        [[samples[i] for i in deal(_lengths(samples), num_ranks, cost)[rank]] for samples in minibatches],
        [sum(len(sample.where) for sample in samples) for samples in minibatches],
        [len(samples) for samples in minibatches],
        max(_lengths(everything), default=0),
        bool(np.isfinite(behaviour).all()),
        -float(behaviour.mean(dtype=np.float64)) if len(behaviour) else 0.0,
        advantages.figures | _truncated(batch, chosen),
    )


def _truncated(batch: Batch, chosen: AlgorithmSection) -> dict[str, float]:
    """The tokens that are not trained because their trajectory was cut off."""
    if not chosen.mask_truncated:
        return {}
    cut = [trajectory for group in batch.groups for trajectory in group.trajectories if was_cut(trajectory)]
    return {"masked_truncated": float(sum(int(s.loss_mask.sum()) for t in cut for s in t.sequences))}


def deal(lengths: list[int], num_ranks: int, cost: Callable[[int], float]) -> list[list[int]]:
    """The sequences of each rank: as equal work as whole sequences allow; a rank may get none."""
    parts = pack(lengths, max(1, sum(lengths)), num_ranks, cost)
    return parts + [[] for _ in range(num_ranks - len(parts))]


def micro_batches(
    samples: Listed[Sample],
    token_budget: int,
    cost: Callable[[int], float],
    device: torch.device = CPU,
    most: Callable[[int], int] = int,
) -> list[MicroBatch]:
    """The samples in micro-batches, the same number on every rank; `most` gives the largest number on any rank."""
    parts = arranged(_lengths(samples), token_budget, cost, most)
    return [assemble([samples[i] for i in indices] or [_BLANK], device) for indices in parts]


def arranged(
    lengths: list[int], token_budget: int, cost: Callable[[int], float], most: Callable[[int], int] = int
) -> list[list[int]]:
    """The sequences of each micro-batch: as few micro-batches as the budget allows, and equal work in each.

    A rank with fewer micro-batches than another splits its share into that many, too. This may take even more, so ranks
    compare again until they agree.
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


def trained_tokens(seen: Listed[tuple[list[Sample], Tensor]]) -> TrainedTokens:
    """What a step's loss saw of its tokens, for the record: `seen` are the samples of each micro-batch with four rows
    over their tokens: proximal and current log-probs, weights and fates.
    """
    rows_4M = torch.cat([torch.zeros(4, 0), *(rows.to("cpu") for _, rows in seen)], dim=1).numpy()
    samples = [sample for samples, _ in seen for sample in samples if len(sample.where)]
    return TrainedTokens(
        sources=np.array([sample.source for sample in samples], np.int32).reshape(-1),
        counts=np.array([len(sample.where) for sample in samples], np.int32),
        proximal=rows_4M[0],
        current=rows_4M[1],
        weights=rows_4M[2],
        advantages=np.concatenate([_NOTHING, *(sample.advantages for sample in samples)]),
        fates=rows_4M[3].astype(np.int32),
    ).compact()


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
        advantages_M=joined(sample.advantages for sample in samples),
        counts_N=to_device(torch.tensor(counts), device),
    )
