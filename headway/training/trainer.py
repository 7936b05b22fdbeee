"""The trainer: batch → advantages → micro-batches → loss → optimizer step → published weights.

It does not know where the data came from. The proximal pass is free in the first minibatch, where π_prox is exactly
π_θ before the step; later minibatches need a forward pass before any weight moves. The host queues a whole training
step on the device and synchronises once, at its end: the device decides whether an optimizer step moves the weights.

A `Trainer` is one rank, alone or of several (ranks.py). Every rank is given the whole batch and picks its share; ranks
agree on the number of micro-batches and on the sums of a minibatch, and so on whether a step is skipped.

Invariants that live here:
  7. The loss is Eq. 5 (losses.py); what this file adds is that π_prox is the weights before this training step.
 12. Packing-independent gradient: the denominator is the minibatch's number of trained tokens on all ranks,
     and gradients add up over them.
 16. Replay: nothing here is random, so the same batches give the same weights where arithmetic is repeatable: on a
     CPU, and on a GPU in deterministic mode.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headway.algorithm import AlgorithmSection
from headway.config import ModelSection, TrainerSection, WeightsSection
from headway.errors import ConfigError, InvariantBroken, OutOfMemory, SaveFailed, WorkerDied
from headway.model.device import DTYPES, find_device, make_repeatable
from headway.model.loading import compile_blocks, load_model, model_shape, named_weights
from headway.model.logprobs import Policy
from headway.model.shape import flops
from headway.model.sharding import Masters, full_tensor, local_rows, shard
from headway.model.tokenizer import load_tokenizer
from headway.training import checkpoint
from headway.training.algorithms.algorithm import Algorithm
from headway.training.algorithms.losses import Figures, PolicyLossInput, PolicyLossOutput, merge_metrics
from headway.training.batches import (
    MemoryFit,
    MicroBatch,
    Share,
    longest_of,
    micro_batches,
    share_of,
    trained_tokens,
    whole_sample,
)
from headway.training.checkpoint import CheckpointPart
from headway.training.collective import Ranks, RankSpec, join
from headway.training.companions import Companions
from headway.training.lora import LoraMasters
from headway.training.optimizer import SCALE_SHIFTS, MinibatchOutcome, adamw, gradient_scale, learning_rate, read_back
from headway.training.state import HostCopy, lock_pages_early, restore, sample_weights, state_tensors
from headway.types import Batch, Floats, Ints, Sample, Scores, StepReport, WeightUpdate
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.publish import as_part, open_publisher

T = TypeVar("T")
_SHARED_MEMORY = WeightsSection(transport="shared_memory")


@dataclass(frozen=True)
class _Snapshot:
    version: int
    state: HostCopy
    pieces: dict[str, tuple[int, int]]  # of tensors split over ranks: the first row here, and the total of rows


class Trainer:
    """One rank. Its synchronous methods run on the compute thread, one at a time."""

    def __init__(
        self,
        model: ModelSection,
        section: TrainerSection,
        algorithm: AlgorithmSection,
        worst_staleness: int | None,
        weights: WeightsSection = _SHARED_MEMORY,
        deterministic: bool = False,
        fit: MemoryFit | None = None,
        spec: RankSpec | None = None,
    ):
        """`deterministic` makes a GPU repeat a step bit for bit; `spec` is for a rank of several.

        Transport "cuda", from GPU to GPU of this machine, is not in the config.
        """
        self.section, self.algorithm = section, Algorithm(algorithm)
        self.worst_staleness = worst_staleness
        self.version = 0
        self._model_path, self._dtype = model.path, DTYPES[model.dtype]
        self._writes_model = model.lora.merged or not model.lora.rank
        self.device = find_device("trainer.device", section.device, self._dtype)
        if deterministic:
            make_repeatable(self.device)
        self.ranks = join(spec, self.device) if spec else Ranks()
        self._publish_on_device = weights.transport == "cuda"
        part = "model" if self.ranks.num == 1 else f"rank-{self.ranks.rank}"
        self._publisher = open_publisher(self.device, weights, part)
        self._model = load_model(model.path, torch.float32)
        self.policy = Policy(self._model, section.logprob_chunk).train()
        if model.lora.rank:
            self.masters: Masters = LoraMasters(self.policy, model.lora, model.path, self._dtype, self.device)
        else:
            self.masters = shard(self.policy, self._dtype, self.device)
        # What is compiled depends on the sizes seen first, which are others after a restart.
        if section.compile and self.device.type == "cuda" and self._dtype != torch.float32 and not deterministic:
            compile_blocks(self._model)
        self.optimizer = adamw(self.masters.named.values(), section, section.lr)
        self._companions = Companions(algorithm, model.path, section, self._dtype, self.device)
        self.set_fit(fit or MemoryFit(section.token_budget, section.gradient_checkpointing))
        self._cost = partial(flops, shape=model_shape(self._model.config))
        self._before: dict[str, Tensor] | None = None  # the state a training step of several minibatches began with
        self._seen: list[tuple[list[Sample], Tensor]] = []  # by this training step's loss, for the record
        self._has_trained = False
        self._moved = False  # whether the attempt in progress may have changed weights
        self._copying: list[HostCopy] = []  # may be incomplete
        self._snapshot: _Snapshot | None = None
        self._model_copy: HostCopy | None = None
        self._read: checkpoint.Checkpoint | None = None

    async def close(self) -> None:
        self._publisher.close()
        if self.ranks.num > 1:
            # The compute thread may wait in a pass for a rank that has exited, and would block this process for ever.
            os._exit(0)

    async def ping(self) -> None:
        """Answered even during a pass."""

    # Training

    def train(self, batch: Batch) -> StepReport:
        """One training step: all minibatches of the batch; adds one version, or none if anything was not finite.

        The report is of all ranks together, and the same on each but for its times. The step starts over in smaller
        micro-batches when memory runs out, and with a smaller gradient scale when fp16 gradients overflow.
        """
        started, clock = time.time(), time.monotonic()
        check_batch(batch, self.version, self.worst_staleness)
        ranks, chosen = self.ranks, self.algorithm.chosen
        if not self._has_trained:
            self._has_trained = True
            model = {f"model/{name}": each for name, each in self._model.named_parameters()} if ranks.num == 1 else {}
            lock_pages_early(self._state() | model, self.device)
        self._moved, self._before = False, None
        advantages = self._fitting(partial(self._companions.advantages, batch, self._pack), longest_of(batch))
        share = share_of(batch, chosen, self.section.minibatches, self._cost, ranks.rank, ranks.num, advantages)
        metrics, learned = dict[str, float](), dict[str, float]()
        # Ratios are clamped: the loss of an infinite log-prob would be finite, and meaningless.
        skipped, shifts = "a behaviour log-prob is not finite", list[int]()
        if not share.minibatches:
            skipped = "no trajectory of the batch has a token to train" + ", not cut off" * chosen.mask_truncated
        elif share.finite:
            shifts = list(SCALE_SHIFTS if self._dtype == torch.float16 else SCALE_SHIFTS[:1])
        while skipped and shifts:
            metrics, skipped = self._fitting(partial(self._train_minibatches, share, shifts.pop(0)), share.longest)
        if not skipped:
            self._moved = False  # the policy's step is done; the critic's passes change nothing
            self._fitting(partial(self._companions.learn, batch, advantages, self._pack), share.longest)
            self._moved = True
            learned = self._fitting(self._companions.step, share.longest)
            self.version += 1
        return StepReport(
            version=self.version,
            skipped=skipped,
            num_tokens=batch.num_sampled,
            started=started,
            seconds=time.monotonic() - clock,
            metrics=self.algorithm.report(metrics)
            | share.figures
            | learned
            | self._pass_figures(metrics)
            | self.fit.as_metrics(),
            weights_sample=sample_weights(self.masters),
            tokens=trained_tokens(self._seen) if self.section.record_tokens and not skipped else None,
        )

    def set_fit(self, fit: MemoryFit) -> None:
        self.fit = fit
        if fit.recompute:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
            self._companions.recompute()

    def _fitting(self, attempt: Callable[[], T], longest: int) -> T:
        """What the attempt returns; it is repeated with a tighter fit while memory runs out."""
        while True:
            # The one error that a tighter fit resolves.
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                self._reduce_memory(error, longest)

    def _reduce_memory(self, error: torch.OutOfMemoryError, longest: int) -> None:
        """Return to the state before this training step, with a tighter fit for the next attempt."""
        sentence = f"out of memory with {self.fit}: {error}"
        logging.getLogger(__name__).warning(sentence)
        # The others wait for this rank in a pass: only new processes can rendezvous again.
        if self.ranks.num > 1:
            raise OutOfMemory(sentence) from error
        # Trained once more, the batch would count twice; a new trainer starts from the record.
        if self._moved and self._before is None:
            raise WorkerDied(f"the trainer ran {sentence}, while weights moved") from error
        self.set_fit(self.fit.reduce(longest))
        self._undo()
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    def _train_minibatches(self, share: Share, scale_shift: int) -> tuple[dict[str, float], str]:
        """The sums of the step's metrics, and why it was skipped, if it was; then nothing has moved."""
        self._moved, self._before = False, None
        self._seen.clear()
        minibatches = [self._pack(samples) for samples in share.minibatches]
        free = 0 if self.algorithm.needs_proximal else 1
        minibatches[free:] = [[self._with_proximal(part) for part in minibatch] for minibatch in minibatches[free:]]
        figures = [self._figures(share, number, minibatch) for number, minibatch in enumerate(minibatches)]
        if len(minibatches) > 1:
            self._before = {name: tensor.clone() for name, tensor in self._state().items()}
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.section, self.version)
        nonfinite = torch.zeros((), device=self.device)
        outcomes = []
        for minibatch, about in zip(minibatches, figures, strict=True):
            scale = gradient_scale(self._dtype, about.num_tokens, scale_shift)
            outcomes.append(self._optimizer_step(minibatch, about, nonfinite, scale))
            nonfinite = outcomes[-1].nonfinite
        metrics, skipped = read_back(outcomes)
        metrics["micro_batches"] = float(sum(map(len, minibatches)))
        if skipped:
            self.optimizer.zero_grad(set_to_none=True)
            self._undo()
        self._before = None
        return metrics, skipped

    def _figures(self, share: Share, number: int, minibatch: list[MicroBatch]) -> Figures:
        policies = [(part.proximal_M, part.behaviour_M) for part in minibatch if part.proximal_M is not None]
        return self.algorithm.figures(share, number, policies, self.ranks.total)

    def _pass_figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        passes = {"grad_norm": totals.get("grad_norm_max", 0.0), "num_micro_batches": totals.get("micro_batches", 0.0)}
        return passes | {"lr": self.optimizer.param_groups[0]["lr"]}

    def _optimizer_step(
        self, minibatch: list[MicroBatch], figures: Figures, nonfinite: Tensor, scale: float
    ) -> MinibatchOutcome:
        """One minibatch. Weights stay if its loss or gradient is not finite, or an earlier minibatch's was `nonfinite`.

        Passes compute gradients multiplied by `scale`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts = []
        for micro_batch in minibatch:
            output = self._loss(micro_batch, figures)
            (output.loss * scale).backward()
            parts.append(output.metrics | {"loss_sum": output.loss.detach() * figures.num_tokens})
        for master in self.masters.named.values():
            if scale != 1 and master.grad is not None:
                master.grad /= scale
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(self.masters.named.values(), self.section.clip_norm))
        metrics = self.ranks.combined(merge_metrics(parts)) | {"grad_norm_max": norm}
        finite = torch.isfinite(metrics["loss_sum"]) & torch.isfinite(norm)
        nonfinite = torch.maximum(nonfinite, (~finite).to(nonfinite.dtype))
        # The flag of torch's loss scaling for overflowed gradients: the fused step reads it on the device. Where every
        # token is masked, weights would move by momentum alone.
        idle = (metrics["weighted_count"] == 0).to(nonfinite.dtype)
        self.optimizer.found_inf = torch.maximum(nonfinite, idle)  # type: ignore[attr-defined]
        self._before_change()
        self.optimizer.step()
        self.masters.refresh()
        return MinibatchOutcome(figures.num_tokens, metrics, nonfinite)

    def _before_change(self) -> None:
        self._moved = True
        while self._copying:
            self._copying.pop().hold_changes()

    def _undo(self) -> None:
        """Restore the state that this training step began with, if earlier minibatches have moved it."""
        if self._before is not None:
            self._restore(self._before)

    def _pack(self, samples: Listed[Sample]) -> list[MicroBatch]:
        longest = max((len(sample.tokens) for sample in samples), default=0)
        # After memory ran out, the budget may be below the length of a sequence that comes later.
        budget = max(self.fit.token_budget, min(longest, self.section.token_budget))
        return micro_batches(samples, budget, self._cost, self.device, self.ranks.most)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.policy(*micro_batch.forward_arguments)
        return out

    def _loss(self, micro_batch: MicroBatch, figures: Figures) -> PolicyLossOutput:
        logprobs_M, entropy_M = self._forward(micro_batch)
        # Without a proximal pass this is the first minibatch: no weight has moved, so π_prox is π_θ.
        proximal_M = logprobs_M.detach() if micro_batch.proximal_M is None else micro_batch.proximal_M
        inputs = PolicyLossInput(
            logprobs_T=logprobs_M,
            proximal_T=proximal_M,
            behaviour_T=micro_batch.behaviour_M,
            advantages_T=micro_batch.advantages_M,
            mask_T=torch.ones_like(logprobs_M),
            counts_N=micro_batch.counts_N,
            reference_T=self._companions.reference_logprobs(micro_batch),
            entropy_T=entropy_M if figures.entropy_coef else None,
        )
        output = self.algorithm.loss(inputs, figures)
        # Tokens sampled under exactly these weights show how far engine and trainer disagree.
        gap_M = (proximal_M - micro_batch.behaviour_M).abs() * (micro_batch.versions_M == self.version)
        largest = torch.cat([gap_M, gap_M.new_zeros(1)]).max()  # there may be no token at all
        weighted = (output.weight_T != 0).sum().to(largest.dtype)
        extra = {"entropy_sum": entropy_M.detach().sum(), "logprob_gap_max": largest, "weighted_count": weighted}
        if self.section.record_tokens:
            rows = (proximal_M, logprobs_M.detach(), output.weight_T, output.fate_T)
            self._seen.append((micro_batch.samples, torch.stack([row.float() for row in rows])))
        return replace(output, metrics=output.metrics | extra)

    @torch.no_grad()
    def _with_proximal(self, micro_batch: MicroBatch) -> MicroBatch:
        return replace(micro_batch, proximal_M=self._forward(micro_batch)[0])

    def _state(self) -> dict[str, Tensor]:
        return state_tensors(self.masters, self.optimizer) | self._companions.state()

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's rows of weights and moments into place."""
        self._before_change()
        restore(self._state(), tensors)
        self.masters.refresh()
        self._companions.refresh()

    # Weights

    def published_weights(self) -> dict[str, Tensor]:
        """What engines receive from this rank: its rows of the cast tensors that the forward pass uses, or the adapter.

        Tied tensors stay one tensor; those of which this rank has no rows are left out.
        """
        if factors := self.masters.factors():
            return factors
        rows: dict[int, Tensor] = {}
        for tensor in named_weights(self._model).values():
            if id(tensor) not in rows:
                rows[id(tensor)] = local_rows(tensor.detach()).to(self._dtype)
        named = {name: rows[id(tensor)] for name, tensor in named_weights(self._model).items()}
        return {name: tensor for name, tensor in named.items() if len(tensor)}

    def publish(self) -> WeightUpdate:
        tensors = self.published_weights()
        base = self.masters.base(self._publish_on_device)
        update = self._publisher.publish(self.version, self._to_publish(tensors), base)
        # A GPU hashes its values itself, so that the record does not depend on how they travel from there.
        is_hashed_here = self._publish_on_device or self.device.type == "cpu"
        prints = update.fingerprints if is_hashed_here else fingerprints(tensors, on_device=True)
        update = replace(update, digest=digest(prints))
        return as_part(update, self._rows_published()) if self.ranks.num > 1 else update

    def _rows_published(self) -> dict[str, tuple[range, int]]:
        """Which rows of each published tensor this rank has, and how many there are."""
        sizes = {name: len(tensor) for name, tensor in named_weights(self._model).items()}
        return {name: (self.ranks.rows(size), size) for name, size in sizes.items()}

    def _to_publish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The published weights on the device or the host they are published from; tied tensors stay one tensor."""
        if self._publish_on_device or self.device.type == "cpu":
            return tensors
        held: dict[int, Tensor] = {}
        for tensor in tensors.values():
            if id(tensor) not in held:
                pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
                held[id(tensor)] = pinned.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize(self.device)
        return {name: held[id(tensor)] for name, tensor in tensors.items()}

    @torch.no_grad()
    def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        """Log-probs of every token but the first of each sequence; every rank scores all of them."""
        samples = [whole_sample(tokens, temperature) for tokens in sequences]
        found: dict[int, Floats] = {}
        for micro_batch in self._pack(samples):
            logprobs_M = self._forward(micro_batch)[0].cpu()
            counts = [len(sample.where) for sample in micro_batch.samples]
            for sample, logprobs in zip(micro_batch.samples, logprobs_M.split(counts), strict=True):
                found[id(sample)] = np.concatenate([np.zeros(1, np.float32), logprobs.numpy()])
        return Scores(self.version, tuple(found[id(sample)] for sample in samples))

    # Checkpoints and models

    def snapshot(self) -> None:
        """Copy the state of this version to the host, to be written by `save` while training continues."""
        self._snapshot = None  # two of them may not fit into memory
        self._snapshot = self._take_snapshot(self._state())
        self._copying.append(self._snapshot.state)

    def _take_snapshot(self, state: Mapping[str, Tensor]) -> _Snapshot:
        rows = {name: self.ranks.rows(len(master)) for name, master in self.masters.named.items()}
        whole = {name: len(master) for name, master in self.masters.named.items()}
        split = {key: tensor for key, tensor in state.items() if not key.startswith("critic/")}
        names = {key: key.partition("/")[2] for key, tensor in split.items() if tensor.ndim}
        # Scalars are the same on all ranks.
        mine = {key: tensor for key, tensor in state.items() if key in names or self.ranks.rank == 0}
        pieces = {key: (rows[name].start, whole[name]) for key, name in names.items()}
        return _Snapshot(self.version, HostCopy(mine, self.device), pieces)

    async def save(self, directory: str) -> CheckpointPart:
        """Write this rank's part of the snapshot, and release it."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            raise SaveFailed(f"cannot write {directory}: the trainer has restarted since and has no snapshot")
        return await asyncio.to_thread(self._write, Path(directory), snapshot)

    async def rescue(self, directory: str) -> CheckpointPart:
        """Write this rank's part of the state before this training step; the compute thread may be stuck in it."""
        return await asyncio.to_thread(self._rescue, Path(directory))

    def _rescue(self, directory: Path) -> CheckpointPart:
        # The stream of the pass is stuck, too.
        with torch.cuda.stream(torch.cuda.Stream(self.device) if self.device.type == "cuda" else None):
            return self._write(directory, self._take_snapshot(self._before or self._state()))

    def _write(self, directory: Path, snapshot: _Snapshot) -> CheckpointPart:
        file = f"state-{self.ranks.rank}-of-{self.ranks.num}.safetensors"
        return checkpoint.write_part(directory, file, snapshot.version, snapshot.state.tensors(), snapshot.pieces)

    def read(self, directory: str) -> None:
        """Read and check this rank's rows of a checkpoint, written by any number of ranks; nothing changes yet."""
        self._read = None
        read = checkpoint.load(Path(directory), lambda name, num_rows: self.ranks.rows(num_rows))
        self._check_same_model(read.shapes, directory)
        self._read = read

    def adopt(self) -> int:
        """Continue from the checkpoint that was read; returns its version."""
        assert self._read is not None
        read, self._read = self._read, None
        self._restore({**self._companions.state(), **read.tensors})  # a critic that a resume adds begins as new
        self.version = read.version
        return self.version

    def _check_same_model(self, shapes: Mapping[str, tuple[int, ...]], directory: str) -> None:
        theirs = {name: shape for name, shape in shapes.items() if name.startswith("weights/")}
        ours = {f"weights/{name}": tuple(master.shape) for name, master in self.masters.named.items()}
        differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if differing:
            there, here = (shapes.get(differing[0], "absent") for shapes in (theirs, ours))
            raise ConfigError(f"checkpoint {directory} is of another model: {differing[0]} is {there}, here {here}")

    def copy_model(self) -> None:
        """Copy this rank's tensors of the model, in the published type, to be written by `write_model` later."""
        self._model_copy = None
        owners = checkpoint.model_owners(self._model, self.ranks.num)
        mine = self.masters.adapter()
        for name, parameter in self._model.named_parameters() if self._writes_model else ():
            whole = full_tensor(parameter.detach())  # every rank takes part
            if owners[name] == self.ranks.rank:
                mine[name] = whole.to(self._dtype)
        self._model_copy = HostCopy(mine, self.device)
        self._copying.append(self._model_copy)

    async def write_model(self, directory: str) -> None:
        """Write this rank's part of the copied model, a transformers directory; rank 0 writes the rest, too."""
        copied, self._model_copy = self._model_copy, None
        if copied is None:
            raise SaveFailed(f"cannot write {directory}: the trainer has restarted since and has no copy of the model")
        await asyncio.to_thread(self._write_model, Path(directory), copied)

    def _write_model(self, directory: Path, copied: HostCopy) -> None:
        tensors = dict(copied.tensors())
        if isinstance(self.masters, LoraMasters):
            adapter = {name: tensors.pop(name) for name in self.masters.adapter()}
            checkpoint.write_adapter(directory, partial(self.masters.write_adapter, adapter))
        checkpoint.write_model_part(directory, tensors, self.ranks.rank, self.ranks.num)
        if self.ranks.rank == 0 and self._writes_model:
            tokenizer = load_tokenizer(self._model_path)
            checkpoint.describe_model(directory, self._model, self._dtype, tokenizer, self.ranks.num)


def check_batch(batch: Batch, version: int, worst_staleness: int | None) -> None:
    if batch.version != version:
        raise InvariantBroken(f"a batch for version {batch.version} reached a trainer at version {version}")
    worst = max(batch.staleness, default=0)
    if worst_staleness is not None and worst > worst_staleness:
        raise InvariantBroken(f"a batch is {worst} versions stale, beyond the bound of {worst_staleness}")
