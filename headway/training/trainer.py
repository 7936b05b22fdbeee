"""The trainer: batch → micro-batches → loss → optimizer step → published weights.

It is blind to where the data came from. The proximal pass is free in the first minibatch, where π_prox is exactly
π_θ before the step; later minibatches get theirs from a forward pass before any weight moves. The host hands a whole
training step to the device and reads back once, at its end: whether an optimizer step may move the weights is decided
on the device.

A trainer is one rank, alone or of several (ranks.py). What several have to agree on is agreed here: how many
micro-batches there are, the figures of a minibatch, and so whether a step is skipped.

Invariants that live here:
  7. The loss is Eq. 5 (losses.py); what this file adds is that π_prox is the weights before this training step.
 12. Packing-independent gradient: the denominator is the minibatch's number of trained tokens on all ranks,
     and gradients add up over them.
 16. Replay: nothing here is random, so the same batches give the same weights.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headway.config import AlgorithmSection, ModelSection, TrainerSection, WeightsSection
from headway.errors import ConfigError, InvariantBroken, OutOfMemory, SaveFailed
from headway.model.device import DTYPES, find_device
from headway.model.loading import compile_blocks, load_model, model_shape, named_weights
from headway.model.logprobs import Policy
from headway.model.shape import flops
from headway.model.sharding import full_tensor, local_rows, shard, shard_like
from headway.model.tokenizer import load_tokenizer
from headway.runtime.compute import offload
from headway.training import checkpoint
from headway.training.algorithms.losses import (
    PolicyLossInput,
    PolicyLossOutput,
    decoupled_ppo,
    merge_metrics,
    naive_ppo,
)
from headway.training.batches import Fit, MicroBatch, micro_batches, shares_of, whole_sample
from headway.training.collective import Ranks
from headway.training.optimizer import SCALE_SHIFTS, adamw, gradient_scale, warmed_up
from headway.types import (
    Batch,
    Floats,
    Ints,
    Sample,
    Scores,
    Share,
    StepReport,
    WeightUpdate,
    piece_key,
)
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.publish import Publisher, as_part

if TYPE_CHECKING:
    from headway.weights.cuda import DevicePublisher

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_SHARED_MEMORY = WeightsSection(transport="shared_memory")


@dataclass(frozen=True)
class _Outcome:
    """A minibatch that was handed to the device; its figures may not exist yet."""

    denominator: int
    metrics: dict[str, Tensor]


class Trainer:
    """One rank. Methods are called one at a time; the heavy ones run on the compute thread."""

    def __init__(
        self,
        model: ModelSection,
        section: TrainerSection,
        algorithm: AlgorithmSection,
        worst_staleness: int | None,
        weights: WeightsSection = _SHARED_MEMORY,
        ranks: Ranks | None = None,
    ):
        """`weights` says how they travel; besides what a config can name, by "cuda" from GPU to GPU of this machine."""
        self.section, self.algorithm = section, algorithm
        self.worst_staleness = worst_staleness
        self.ranks = ranks or Ranks()
        self.version = 0
        self._model_path, self._dtype = model.path, DTYPES[model.dtype]
        self.device = find_device("trainer.device", section.device, self._dtype)
        self._publish_on_device = weights.transport == "cuda"
        self._publisher = _make_publisher(self.device, weights, self.ranks)
        self._model = load_model(model.path, torch.float32)
        self.policy = Policy(self._model, section.logprob_chunk).train()
        self.masters = shard(self.policy, self._dtype, self.device)
        if section.compile and self.device.type == "cuda" and self._dtype != torch.float32:
            compile_blocks(self._model)
        self.optimizer = adamw(self.masters.named.values(), section, section.lr)
        self.make_fit(Fit(section.token_budget, section.gradient_checkpointing))
        self._cost = partial(flops, shape=model_shape(self._model.config))
        self._before: dict[str, Tensor] | None = None  # the state a training step of several minibatches began with
        self._kept: checkpoint.State | None = None
        self._read: checkpoint.Checkpoint | None = None

    async def close(self) -> None:
        self._publisher.close()

    async def alive(self) -> None:
        """Answered even in the middle of a pass."""

    async def train(self, batch: Batch) -> StepReport:
        return await offload(self.train_batch, batch)

    async def publish(self) -> WeightUpdate:
        return await offload(self.publish_weights)

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return await offload(self.score_sequences, sequences, temperature)

    async def keep(self) -> None:
        """Set the state of this version aside, to be written while training goes on."""
        await offload(self.keep_state)

    async def save(self, directory: str) -> None:
        """Write what was kept as a checkpoint, beside whatever else goes on."""
        await asyncio.to_thread(self.write_kept, Path(directory))

    async def load(self, directory: str) -> int:
        return await offload(self.load_state, Path(directory))

    async def save_model(self, directory: str) -> None:
        await offload(self.write_model, Path(directory))

    def train_batch(self, batch: Batch) -> StepReport:
        """One training step: all minibatches of the batch; adds one version, or none if anything was not finite."""
        check_staleness(batch, self.worst_staleness)
        return self.train_share(*shares_of(batch, self.algorithm, self.section.minibatches, 1, self._cost))

    def train_share(self, share: Share) -> StepReport:
        """This rank's part of a training step; the report is of the whole step, and the same on every rank."""
        started = time.time()
        if share.version != self.version:
            raise InvariantBroken(f"a batch for version {share.version} reached a trainer at version {self.version}")
        # Ratios are clamped, so an infinite one would pass through the loss as a number, and a meaningless one.
        if share.finite:
            metrics, skipped = self._train_as_fits(share)
        else:
            metrics, skipped = {}, "a behaviour log-prob is not finite"
        if not skipped:
            self.version += 1
        return StepReport(
            version=self.version,
            skipped=skipped,
            num_tokens=share.num_sampled,
            started=started,
            seconds=time.time() - started,
            metrics=_per_token(metrics) | {"lr": self.optimizer.param_groups[0]["lr"]},
        )

    def make_fit(self, fit: Fit) -> None:
        self.fit = fit
        if fit.recompute:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})

    def _train_as_fits(self, share: Share) -> tuple[dict[str, float], str]:
        """The step as the config says, or in a tighter way from the first time that does not fit."""
        while True:
            # The one error that a tighter fit mends.
            try:
                return self._train_in_range(share)
            except torch.OutOfMemoryError as error:
                logging.getLogger(__name__).warning("out of memory with %s: %s", self.fit, error)
                # The others wait for this rank in the middle of a pass: only beginning anew can bring them together.
                if self.ranks.num > 1:
                    raise OutOfMemory(f"out of memory with {self.fit}: {error}") from error
                self.make_fit(self.fit.tighter(share.longest))
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()

    def _train_in_range(self, share: Share) -> tuple[dict[str, float], str]:
        """The step; in fp16, should gradients overflow, again with smaller ones, and always from the largest on."""
        for shift in SCALE_SHIFTS if self._dtype == torch.float16 else (0,):
            metrics, skipped = self._train_minibatches(share, shift)
            if not skipped:
                break
        return metrics, skipped

    def _train_minibatches(self, share: Share, scale_shift: int) -> tuple[dict[str, float], str]:
        """The sums of the step's metrics, and why it was skipped, if it was; then nothing has moved."""
        packed = [self._pack(samples) for samples in share.minibatches]
        packed[1:] = [[self._with_proximal(micro_batch) for micro_batch in part] for part in packed[1:]]
        self._before = self._snapshot() if len(packed) > 1 else None
        untouched = not self.optimizer.state
        self._set_learning_rate()
        spoilt = torch.zeros((), device=self.device)
        outcomes = []
        try:
            for part, num_trained in zip(packed, share.num_trained, strict=True):
                scale = gradient_scale(self._dtype, num_trained, scale_shift)
                outcome, spoilt = self._train_minibatch(part, num_trained, share.version, spoilt, scale)
                outcomes.append(outcome)
        except torch.OutOfMemoryError:
            self._go_back()
            raise
        metrics, skipped = _read_back(outcomes)
        metrics["micro_batches"] = float(sum(map(len, packed)))
        if skipped:
            self.optimizer.zero_grad(set_to_none=True)
            self._go_back()
            if untouched:
                self.optimizer.state.clear()
        self._before = None
        return metrics, skipped

    def _go_back(self) -> None:
        """Undo what earlier minibatches of this training step have moved."""
        if self._before is not None:
            self._restore(self._before)

    def _train_minibatch(
        self, micro_batches: list[MicroBatch], denominator: int, version: int, spoilt: Tensor, scale: float
    ) -> tuple[_Outcome, Tensor]:
        """One optimizer step, which moves nothing if loss or gradient are not finite, or something was `spoilt` before.

        What it returns in the place of `spoilt` is 1 in that case, else 0. Passes compute gradients `scale` times as
        large as they are.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts = []
        for micro_batch in micro_batches:
            output = self._loss(micro_batch, denominator, version)
            (output.loss * scale).backward()
            parts.append(output.metrics | {"loss_sum": output.loss.detach() * denominator})
        self._divide_gradients(scale)
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(self.masters.named.values(), self.section.clip_norm))
        metrics = self.ranks.combined(merge_metrics(parts)) | {"grad_norm_max": norm}
        finite = torch.isfinite(metrics["loss_sum"]) & torch.isfinite(norm)
        spoilt = torch.maximum(spoilt, (~finite).to(spoilt.dtype))
        # Where torch's loss scaling says that gradients overflowed: the fused step reads it on the device.
        self.optimizer.found_inf = spoilt  # type: ignore[attr-defined]
        self.optimizer.step()
        self.masters.refresh()
        return _Outcome(denominator, metrics), spoilt

    def _divide_gradients(self, scale: float) -> None:
        for master in self.masters.named.values():
            if scale != 1 and master.grad is not None:
                master.grad /= scale

    def _pack(self, samples: Listed[Sample]) -> list[MicroBatch]:
        longest = max((len(sample.tokens) for sample in samples), default=0)
        # Where too little memory has lowered the budget, a longer sequence than were known then may still come.
        budget = max(self.fit.token_budget, min(longest, self.section.token_budget))
        return micro_batches(samples, budget, self._cost, self.device, self.ranks.most)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.policy(*micro_batch.forward_arguments)
        return out

    def _loss(self, micro_batch: MicroBatch, denominator: float, version: int) -> PolicyLossOutput:
        logprobs_M, entropy_M = self._forward(micro_batch)
        # Without a proximal pass this is the first minibatch: no weight has moved, so π_prox is π_θ.
        proximal_M = logprobs_M.detach() if micro_batch.proximal_M is None else micro_batch.proximal_M
        inputs = PolicyLossInput(
            logprobs_T=logprobs_M,
            proximal_T=proximal_M,
            behaviour_T=micro_batch.behaviour_M,
            advantages_T=micro_batch.advantages_M,
            mask_T=torch.ones_like(logprobs_M),
        )
        chosen = self.algorithm
        if chosen.objective == "decoupled":
            output = decoupled_ppo(
                inputs, denominator, chosen.clip_eps, chosen.behaviour_cap, chosen.behaviour_cap_mode
            )
        else:
            output = naive_ppo(inputs, denominator, chosen.clip_eps)
        # Tokens sampled under these very weights show how far engine and trainer disagree.
        gap_M = (proximal_M - micro_batch.behaviour_M).abs() * (micro_batch.versions_M == version)
        largest = torch.cat([gap_M, gap_M.new_zeros(1)]).max()  # there may be no token at all
        extra = {"entropy_sum": entropy_M.sum(), "logprob_gap_max": largest}
        return PolicyLossOutput(output.loss, output.metrics | extra)

    @torch.no_grad()
    def _with_proximal(self, micro_batch: MicroBatch) -> MicroBatch:
        return replace(micro_batch, proximal_M=self._forward(micro_batch)[0])

    def _set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.section.lr * warmed_up(self.version, self.section.warmup_steps)

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._state_tensors()}

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put this rank's rows of weights and optimizer back, in place."""
        with torch.no_grad():
            for name, master in self.masters.named.items():
                local_rows(master).copy_(tensors[f"weights/{name}"])
                found = {kind: tensors[key] for kind in _MOMENTS if (key := f"{kind}/{name}") in tensors}
                placed = {kind: value.to(master.device, copy=True) for kind, value in found.items()}
                self.optimizer.state[master] = {kind: shard_like(master, value) for kind, value in placed.items()}
        self.masters.refresh()

    def _state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's rows of the master weights and of the optimizer's state, by parameter name."""
        for name, master in self.masters.named.items():
            yield f"weights/{name}", local_rows(master.detach())
            for kind, value in self.optimizer.state.get(master, {}).items():
                yield f"{kind}/{name}", local_rows(value)

    def published_weights(self) -> dict[str, Tensor]:
        """What engines receive of this rank: its rows of the cast tensors the forward pass uses, on this device.

        Tied ones stay one tensor; those of which this rank has no rows are left out.
        """
        rows: dict[int, Tensor] = {}
        for tensor in named_weights(self._model).values():
            if id(tensor) not in rows:
                rows[id(tensor)] = local_rows(tensor.detach()).to(self._dtype)
        named = {name: rows[id(tensor)] for name, tensor in named_weights(self._model).items()}
        return {name: tensor for name, tensor in named.items() if len(tensor)}

    def publish_weights(self) -> WeightUpdate:
        update = self._publisher.publish(self.version, self._to_publish())
        return as_part(update, self._rows_published()) if self.ranks.num > 1 else update

    def _rows_published(self) -> dict[str, tuple[range, int]]:
        """Of each published tensor: which rows this rank has, and how many there are."""
        sizes = {name: len(tensor) for name, tensor in named_weights(self._model).items()}
        return {name: (self.ranks.rows(size), size) for name, size in sizes.items()}

    def _to_publish(self) -> dict[str, Tensor]:
        """The weights where they are published from: this device, or the host; tied ones stay one tensor."""
        tensors = self.published_weights()
        if self._publish_on_device or self.device.type == "cpu":
            return tensors
        held: dict[int, Tensor] = {}
        for tensor in tensors.values():
            if id(tensor) not in held:
                pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
                held[id(tensor)] = pinned.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize(self.device)
        return {name: held[id(tensor)] for name, tensor in tensors.items()}

    def fingerprints(self) -> dict[str, str]:
        """Those an update of these weights would have."""
        found, rows = fingerprints(self._to_publish(), self._publish_on_device), self._rows_published()
        return {piece_key(name, *rows[name]): value for name, value in found.items()}

    @torch.no_grad()
    def score_sequences(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        samples = [whole_sample(tokens, temperature) for tokens in sequences]
        found: dict[int, Floats] = {}
        for micro_batch in self._pack(samples):
            logprobs_M = self._forward(micro_batch)[0].cpu()
            counts = [len(sample.where) for sample in micro_batch.samples]
            for sample, logprobs in zip(micro_batch.samples, logprobs_M.split(counts), strict=True):
                found[id(sample)] = np.concatenate([np.zeros(1, np.float32), logprobs.numpy()])
        return Scores(self.version, tuple(found[id(sample)] for sample in samples))

    def keep_state(self) -> None:
        self._kept = None  # two of them may be too much memory
        self._kept = checkpoint.State(self.version, *self.state_to_save(), self.fingerprints())

    def write_kept(self, directory: Path) -> None:
        kept = self.take_kept(directory)
        checkpoint.save(directory, kept.version, kept.tensors, {"digest": digest(kept.fingerprints)})

    def take_kept(self, directory: Path) -> checkpoint.State:
        """What was kept, which may then be kept no longer."""
        kept, self._kept = self._kept, None
        if kept is None:
            raise SaveFailed(f"cannot write {directory}: the trainer has begun anew since, and kept nothing")
        return kept

    def state_to_save(self) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
        """This rank's tensors, and of those of which others have rows too: the first row, and how many there are.

        In the middle of a training step they are those it began with.
        """
        state = self._before if self._before is not None else dict(self._state_tensors())
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        whole = {name: len(master) for name, master in self.masters.named.items()}
        split = {key: whole[key.partition("/")[2]] for key, tensor in tensors.items() if tensor.ndim}
        if self.ranks.rank == 0:
            tensors["random_state"] = torch.get_rng_state()
        else:  # what is no row is the same on all ranks
            tensors = {key: tensors[key] for key in split}
        return tensors, {key: (self.ranks.rows(size).start, size) for key, size in split.items()}

    def load_state(self, directory: Path) -> int:
        self.read_state(directory)
        return self.adopt_state()

    def read_state(self, directory: Path) -> None:
        """Read and check this rank's rows of a checkpoint, of however many ranks it is; nothing changes yet."""
        self._read = None
        read = checkpoint.load(directory, self._rows_to_load)
        self._check_same_model(read.shapes, directory)
        self._read = read

    def _rows_to_load(self, name: str, num_rows: int) -> range:
        return range(num_rows) if name == "random_state" else self.ranks.rows(num_rows)

    def adopt_state(self) -> int:
        """Go on from what was read."""
        assert self._read is not None
        read, self._read = self._read, None
        torch.set_rng_state(read.tensors.pop("random_state"))
        self._restore(read.tensors)
        self.version = read.version
        return self.version

    def _check_same_model(self, shapes: Mapping[str, tuple[int, ...]], directory: Path) -> None:
        theirs = {name: shape for name, shape in shapes.items() if name.startswith("weights/")}
        ours = {f"weights/{name}": tuple(master.shape) for name, master in self.masters.named.items()}
        differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if differing:
            there, here = (shapes.get(differing[0], "absent") for shapes in (theirs, ours))
            raise ConfigError(f"checkpoint {directory} is of another model: {differing[0]} is {there}, here {here}")

    def write_model(self, directory: Path) -> None:
        """The current weights as an ordinary transformers directory, in the type they were published in."""
        model = load_model(self._model_path, self._dtype)
        model.load_state_dict(self.published_weights())
        checkpoint.save_model(directory, model, load_tokenizer(self._model_path))

    def describe_model(self, directory: Path) -> None:
        """All of that directory but the weights, of which every rank then writes its rows."""
        checkpoint.describe_model(directory, self._model, self._dtype, load_tokenizer(self._model_path))

    def write_rows(self, directory: Path) -> None:
        rows = self._rows_published()
        placed = {name: (rows[name][0].start, tensor) for name, tensor in self.published_weights().items()}
        checkpoint.write_rows(directory, self._model, self._dtype, placed)


def check_staleness(batch: Batch, worst_staleness: int | None) -> None:
    worst = max(batch.staleness, default=0)
    if worst_staleness is not None and worst > worst_staleness:
        raise InvariantBroken(f"a batch is {worst} versions stale, beyond the bound of {worst_staleness}")


def _make_publisher(device: torch.device, weights: WeightsSection, ranks: Ranks) -> "Publisher | DevicePublisher":
    if weights.transport != "cuda":
        part = "model" if ranks.num == 1 else f"rank-{ranks.rank}"
        return Publisher(weights.transports, weights.address, weights.dir, part)
    from headway.weights.cuda import DevicePublisher

    return DevicePublisher(device)


def _read_back(outcomes: list[_Outcome]) -> tuple[dict[str, float], str]:
    """The sums and maxima of all minibatches, and what was not finite, if anything was: the one wait for the device."""
    if not outcomes:
        return {}, ""
    merged = merge_metrics(outcome.metrics for outcome in outcomes)
    suspects = [outcome.metrics[name] for outcome in outcomes for name in ("loss_sum", "grad_norm_max")]
    values = torch.stack([*merged.values(), *suspects]).tolist()
    totals = dict(zip(merged, values, strict=False))
    pairs = zip(values[len(merged) :: 2], values[len(merged) + 1 :: 2], strict=True)
    for outcome, (loss, norm) in zip(outcomes, pairs, strict=True):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return totals, f"loss {loss / outcome.denominator:g}, gradient norm {norm:g}"
    return totals, ""


def _per_token(totals: Mapping[str, float]) -> dict[str, float]:
    """Sums over all minibatches as the per-token figures a person reads."""
    tokens = max(1.0, totals.get("tokens", 0.0))
    names = {
        "loss": "loss_sum",
        "entropy": "entropy_sum",
        "clip_fraction": "clip_count",
        "capped_fraction": "capped_count",
        "behaviour_weight_mean": "behaviour_weight_sum",
        "kl": "kl_sum",
        "behaviour_kl": "behaviour_kl_sum",
    }
    means = {shown: totals.get(summed, 0.0) / tokens for shown, summed in names.items()}
    return means | {
        "behaviour_weight_max": totals.get("behaviour_weight_max", 0.0),
        "logprob_gap_max": totals.get("logprob_gap_max", 0.0),
        "grad_norm": totals.get("grad_norm_max", 0.0),
        "num_micro_batches": totals.get("micro_batches", 0.0),
    }
