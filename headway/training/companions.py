"""Models on the trainer's side that are never published: the reference policy of a KL term, and the critic of PPO.

Shape suffixes: T packed tokens of one micro-batch, M the trained tokens among them, C hidden size.
"""

from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from headway.algorithm import AlgorithmSection
from headway.config import TrainerSection
from headway.model.attention import PackedAttention
from headway.model.loading import load_model
from headway.model.logprobs import Policy, hidden_states
from headway.model.sharding import Masters
from headway.training.algorithms.credit import Advantages, Key, batch_advantages
from headway.training.algorithms.losses import kl
from headway.training.batches import MicroBatch, samples_of
from headway.training.optimizer import adamw
from headway.types import Batch, Floats, Sample

Pack = Callable[[list[Sample]], list[MicroBatch]]


class Reference:
    """A policy that stays as it was loaded. Every rank has all of it."""

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device, chunk: int):
        self._policy = Policy(load_model(path, dtype), chunk).eval().requires_grad_(False).to(device)

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        found: Tensor = self._policy(*micro_batch.forward_arguments)[0]
        return found


class Critic(nn.Module):
    """Estimates the return that follows a state: the model it starts from with a head of one output, first 0.

    The model computes in `dtype` from fp32 masters, as the policy does; the head is fp32.
    """

    def __init__(self, path: str, section: TrainerSection, lr: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self._model = load_model(path, torch.float32).train()
        self._head = nn.Linear(self._model.config.hidden_size, 1)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self.to(device)
        head = cast(nn.Linear, self._model.lm_head).weight
        tied = any(head is weight for weight in cast(nn.Module, self._model.model).parameters())
        self._body = Masters(self._model, None if dtype == torch.float32 else dtype)
        self._masters = {f"_model.{name}": master for name, master in self._body.named.items()}
        self._masters |= {f"_head.{name}": weight for name, weight in self._head.named_parameters()}
        self._learned = [master for name, master in self._masters.items() if tied or name != "_model.lm_head.weight"]
        self._optimizer = adamw(self._learned, section, lr)
        self._clip_norm = section.clip_norm
        self._loss = torch.zeros(())

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """The estimate before each trained token was sampled."""
        tokens_T, positions_T, lengths, where_M, _ = micro_batch.forward_arguments
        hidden_TC = hidden_states(self._model, tokens_T, positions_T, PackedAttention(lengths, tokens_T.device))
        return cast(Tensor, self._head(hidden_TC.index_select(0, where_M - 1).float()).squeeze(-1))

    def learn(self, micro_batches: Iterable[MicroBatch], num_tokens: int) -> None:
        """Gradients towards the returns, which stand in for advantages, of half the mean squared error."""
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for micro_batch in micro_batches:
            loss = (self(micro_batch) - micro_batch.advantages_M).square().sum() / (2 * max(1, num_tokens))
            loss.backward()
            total = total + loss.detach().cpu()
        self._loss = total

    def step(self) -> dict[str, float]:
        norm = nn.utils.clip_grad_norm_(self._learned, self._clip_norm)
        finite = bool(torch.isfinite(norm)) and bool(torch.isfinite(self._loss))
        if finite:
            self._optimizer.step()
            self.refresh()
        self._optimizer.zero_grad(set_to_none=True)  # the memory is the policy's until the next batch
        return {"critic_loss": float(self._loss), "critic_grad_norm": float(norm), "critic_skipped": float(not finite)}

    def refresh(self) -> None:
        """Cast the masters again after they moved."""
        self._body.refresh()

    def recompute(self) -> None:
        """Compute activations again in the backward pass instead of storing them."""
        self._model.gradient_checkpointing_enable({"use_reentrant": False})

    def state(self) -> dict[str, Tensor]:
        """The live tensors of weights and moments, by the names they have in a checkpoint."""
        tensors = {}
        for name, weight in self._masters.items():
            tensors[f"critic/weights/{name}"] = weight.detach()
            for moment, value in self._optimizer.state.get(weight, {}).items():
                tensors[f"critic/{moment}/{name}"] = value
        return tensors


class Companions:
    """The models an algorithm asks for, if any: what they add to a batch's advantages, and what they learn from it."""

    def __init__(
        self, chosen: AlgorithmSection, path: str, section: TrainerSection, dtype: torch.dtype, device: torch.device
    ):
        self._chosen, self._device = chosen, device
        self._reference: Reference | None = None
        self._critic: Critic | None = None
        if chosen.needs_reference:
            self._reference = Reference(chosen.reference or path, dtype, device, section.logprob_chunk)
        if chosen.needs_critic:
            self._critic = Critic(path, section, chosen.critic_lr, dtype, device)

    def advantages(self, batch: Batch, pack: Pack) -> Advantages:
        """Of the whole batch; a critic, or a KL penalty in the reward, looks at it before any weight moves."""
        penalties = values = None
        if self._reference is not None and self._chosen.kl_place == "reward":
            penalties = each_token(batch, pack, self._penalty)
        if self._critic is not None:
            values = each_token(batch, pack, self._critic)
        return batch_advantages(batch, self._chosen, penalties, values)

    def learn(self, batch: Batch, advantages: Advantages, pack: Pack) -> None:
        """The critic's gradients towards the returns that the advantages were estimated with; nothing moves."""
        if self._critic is not None:
            samples = [sample for group in batch.groups for sample in samples_of(group, advantages.returns)]
            self._critic.learn(pack(samples), sum(len(sample.where) for sample in samples))

    def step(self) -> dict[str, float]:
        """The critic's optimizer step on what it has learned; figures for the report."""
        return self._critic.step() if self._critic else {}

    def reference_logprobs(self, micro_batch: MicroBatch) -> Tensor | None:
        return self._reference.logprobs(micro_batch) if self._reference else None

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of them; the reference is as it was loaded."""
        return self._critic.state() if self._critic else {}

    def refresh(self) -> None:
        """What is computed with follows from weights that were restored."""
        if self._critic is not None:
            self._critic.refresh()

    def recompute(self) -> None:
        if self._critic is not None:
            self._critic.recompute()

    def _penalty(self, micro_batch: MicroBatch) -> Tensor:
        assert self._reference is not None
        reference_M = self._reference.logprobs(micro_batch)
        return self._chosen.kl_coef * kl(micro_batch.behaviour_M, reference_M, self._chosen.kl_estimator)


@torch.no_grad()
def each_token(batch: Batch, pack: Pack, figure: Callable[[MicroBatch], Tensor]) -> dict[Key, Floats]:
    """A figure of every trained token, by trajectory: its sequences' tokens in order."""
    nums = {
        (group.id, trajectory.index): sum(int(sequence.loss_mask.sum()) for sequence in trajectory.sequences)
        for group in batch.groups
        for trajectory in group.trajectories
    }
    blank = {key: np.zeros(num, np.float32) for key, num in nums.items()}
    samples = [sample for group in batch.groups for sample in samples_of(group, blank)]
    found: dict[tuple[int, int, int], Floats] = {}
    for micro_batch in pack(samples):
        counts = [len(sample.where) for sample in micro_batch.samples]
        for sample, own in zip(micro_batch.samples, figure(micro_batch).cpu().split(counts), strict=True):
            found[sample.source] = own.numpy()
    parts: dict[Key, list[Floats]] = {key: [np.zeros(0, np.float32)] for key in nums}
    for sample in samples:
        parts[sample.source[:2]].append(found[sample.source])
    return {key: np.concatenate(own) for key, own in parts.items()}
