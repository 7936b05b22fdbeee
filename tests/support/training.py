"""What tests of the training side share: batches without an engine, and the same loss by plain transformers.

The reference knows nothing of packing, micro-batches or fused log-probs: one padded tensor, `log_softmax`, autograd.
"""

import asyncio
import dataclasses
import math
from collections.abc import Sequence as Listed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.algorithm import AlgorithmSection
from headway.config import ModelSection, TrainerSection, WeightsSection
from headway.model.sharding import Masters, full_tensor
from headway.training import checkpoint
from headway.training.trainer import Trainer
from headway.types import (
    NOT_SAMPLED,
    Batch,
    Failure,
    Group,
    Reward,
    Sequence,
    StopReason,
    Trajectory,
)
from headway.weights.fingerprints import digest, fingerprints

VOCABULARY = 52  # of the tiny models
CLIP_EPS = 0.2


def make_trainer(path: str, worst_staleness: int | None = None, **knobs: Any) -> Trainer:
    """A trainer on one thread; knobs of the model, the trainer and the algorithm sections, by name. No cap, unless
    named: what it is compared with has none."""
    sections, knobs = [], {"behaviour_cap": 0.0, "lr": 2e-5} | knobs
    deterministic = knobs.pop("deterministic", False)
    weights = WeightsSection(transport=knobs.pop("transport", "shared_memory"))
    for section in (ModelSection, TrainerSection, AlgorithmSection):
        mine = {name: knobs.pop(name) for name in list(knobs) if name in section.model_fields}
        sections.append(section(**({"path": path} | mine if section is ModelSection else mine)))
    assert not knobs, knobs
    model, trainer, algorithm = sections
    torch.set_num_threads(1)
    return Trainer(model, trainer, algorithm, worst_staleness, weights, deterministic)  # type: ignore[arg-type]


def make_sequence(random: np.random.Generator, num_prompt: int, num_sampled: int, version: int) -> Sequence:
    versions = np.repeat(np.array([NOT_SAMPLED, version], np.int32), [num_prompt, num_sampled])
    sampled = versions != NOT_SAMPLED
    return Sequence(
        tokens=random.integers(3, VOCABULARY, len(versions)).astype(np.int32),
        loss_mask=sampled.astype(np.float32),
        logprobs=np.where(sampled, random.uniform(-6, -2, len(versions)), 0).astype(np.float32),
        versions=versions,
    )


def make_trajectory(
    random: np.random.Generator,
    index: int,
    reward: float,
    lengths: Listed[int] = (9,),
    version: int = 0,
    temperature: float = 1.0,
    num_prompt: int = 5,
) -> Trajectory:
    """One sequence for each of `lengths`, which are their numbers of sampled tokens; the reward is at the end."""
    sequences = tuple(make_sequence(random, num_prompt, length, version) for length in lengths)
    last = Reward(len(sequences) - 1, len(sequences[-1].tokens) - 1, reward)
    return Trajectory(index, sequences, (last,), temperature, (StopReason.STOP,) * len(sequences))


def make_group(
    id: int,
    rewards: Listed[float] = (1.0, 0.0, 0.0, 1.0),
    version: int = 0,
    temperature: float = 1.0,
    longest: int = 16,
    num_failed: int = 0,
) -> Group:
    random = np.random.default_rng(id)
    made = [
        make_trajectory(random, index, reward, (int(random.integers(1, longest)),), version, temperature)
        for index, reward in enumerate(rewards)
    ]
    failures = tuple(Failure(len(made) + number, "verifier: broken", 3) for number in range(num_failed))
    return Group(id, id, 0, len(made) + num_failed, tuple(made), failures)


def make_batch(version: int = 0, num_groups: int = 4, first: int = 0, data_version: int | None = None) -> Batch:
    made_by = version if data_version is None else data_version
    return Batch(version, tuple(make_group(first + number, version=made_by) for number in range(num_groups)))


def map_sequences(batch: Batch, change: Any) -> Batch:
    """The batch with `change(group id, trajectory, sequence)` in place of every sequence."""
    groups = []
    for group in batch.groups:
        trajectories = tuple(
            dataclasses.replace(t, sequences=tuple(change(group.id, t, s) for s in t.sequences))
            for t in group.trajectories
        )
        groups.append(dataclasses.replace(group, trajectories=trajectories))
    return Batch(batch.version, tuple(groups))


def near_policy(batch: Batch, model: PreTrainedModel, spread: float = 0.5) -> Batch:
    """The batch with behaviour log-probs scattered about those of `model`, as those of stale data are."""
    random = np.random.default_rng(batch.groups[0].id)

    def change(_: int, trajectory: Trajectory, sequence: Sequence) -> Sequence:
        with torch.no_grad():
            exact = reference_logprobs(model, [sequence.tokens], [trajectory.temperature])[0].numpy()
        noise = random.normal(0, spread, len(exact))
        logprobs = np.where(sequence.loss_mask > 0, np.minimum(exact + noise, -1e-3), 0)
        return dataclasses.replace(sequence, logprobs=logprobs.astype(np.float32))

    return map_sequences(batch, change)


def plain_model(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as anyone loads it, with transformers' own attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    model.train()
    return model


def reference_logprobs(model: PreTrainedModel, rows: Listed[Any], temperatures: Listed[float]) -> list[Tensor]:
    """Log-probs of every token of each row given those before it; 0 for the first. One padded tensor."""
    width = max(len(row) for row in rows)
    tokens = torch.tensor([[*map(int, row), *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits = model(input_ids=tokens, attention_mask=mask).logits.float()
    scaled = logits / torch.tensor(list(temperatures)).view(-1, 1, 1)
    picked = torch.log_softmax(scaled[:, :-1], -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    padded = torch.cat([torch.zeros(len(rows), 1), picked], dim=1)
    return [padded[number, : len(row)] for number, row in enumerate(rows)]


@dataclasses.dataclass
class Row:
    """One sequence of a batch as the reference sees it."""

    sequence: Sequence
    temperature: float
    advantage: float

    @property
    def trained(self) -> list[int]:
        return [place for place, bit in enumerate(self.sequence.loss_mask) if bit]


def rows_of(groups: Listed[Group]) -> list[Row]:
    """Rewards normalised within each group, by the schoolbook formula."""
    rows: list[Row] = []
    for group in groups:
        rewards = [sum(reward.value for reward in t.rewards) for t in group.trajectories]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            advantage = (reward - mean) / (deviation + 1e-6) if deviation else 0.0
            rows.extend(Row(s, trajectory.temperature, advantage) for s in trajectory.sequences)
    return [row for row in rows if row.trained]


def row_logprobs(model: PreTrainedModel, rows: list[Row]) -> list[Tensor]:
    """Log-probs of the trained tokens of each row."""
    found = reference_logprobs(model, [row.sequence.tokens for row in rows], [row.temperature for row in rows])
    return [logprobs[row.trained] for row, logprobs in zip(rows, found, strict=True)]


def reference_loss(
    model: PreTrainedModel, rows: list[Row], proximal: list[Tensor] | None = None, objective: str = "decoupled"
) -> Tensor:
    """Eq. 5, or plain PPO, as the mean over the trained tokens of all rows; π_prox is π_θ where none is given."""
    current = row_logprobs(model, rows)
    total, count = torch.zeros(()), 0
    for number, row in enumerate(rows):
        behaviour = torch.from_numpy(row.sequence.logprobs[row.trained])
        before = current[number].detach() if proximal is None else proximal[number]
        weight = (before - behaviour).exp() if objective == "decoupled" else torch.ones_like(before)
        ratio = (current[number] - (before if objective == "decoupled" else behaviour)).exp()
        clipped = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
        total = total - (weight * torch.minimum(ratio * row.advantage, clipped * row.advantage)).sum()
        count += len(row.trained)
    return total / count


def gradients_of(source: torch.nn.Module | Masters, prefix: str = "") -> dict[str, Tensor]:
    """The gradient of every parameter, or master, by its name in the plain model."""
    weights = source.named if isinstance(source, Masters) else dict(source.named_parameters())
    named = {name.removeprefix(prefix): weight.grad for name, weight in weights.items()}
    assert all(gradient is not None for gradient in named.values())
    return {name: full_tensor(gradient).clone() for name, gradient in named.items() if gradient is not None}


def trained_gradients(path: str, batch: Batch, **knobs: Any) -> dict[str, Tensor]:
    """The gradient a trainer of one minibatch steps with, unclipped."""
    trainer = make_trainer(path, clip_norm=1e9, **knobs)
    report = trainer.train(batch)
    assert not report.skipped
    return gradients_of(trainer.masters, "model.")


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference, relative to the norm."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in other.values()))


def state_of(trainer: Trainer, directory: Path) -> dict[str, Tensor]:
    """Master weights and optimizer, as a checkpoint holds them."""
    save_state(trainer, directory)
    return checkpoint.load(directory).tensors


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """The masters, by their names in the plain model."""
    named = trainer.masters.named.items()
    return {name.removeprefix("model."): full_tensor(master.detach()).clone() for name, master in named}


def stale_batch(path: str, version: int = 0, first: int = 0, num_groups: int = 4) -> Batch:
    return near_policy(make_batch(version, num_groups, first), plain_model(path))


def save_state(trainer: Trainer, directory: Path) -> None:
    checkpoint.begin(directory)
    trainer.snapshot()
    checkpoint.finish(directory, [asyncio.run(trainer.save(str(directory)))])


def load_state(trainer: Trainer, directory: Path) -> int:
    trainer.read(str(directory))
    return trainer.adopt()


def write_model(trainer: Trainer, directory: Path) -> None:
    checkpoint.begin(directory)
    trainer.copy_model()
    asyncio.run(trainer.write_model(str(directory)))
    checkpoint.finish_model(directory)


def digest_of(trainer: Trainer) -> str:
    return digest(fingerprints({name: tensor.cpu() for name, tensor in trainer.published_weights().items()}))
