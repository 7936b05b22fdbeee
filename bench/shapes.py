"""Models and workloads for benchmarks, made on the spot: no download, no training.

A model directory has the shape of a known model, random weights and a tokenizer of ten digits. A workload has lengths
as reasoning has them: log-normal with a long tail, up to a maximum, the same for the same seed.
Lengths are forced (a completion stops where its length says), so systems can be compared without a trained model.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from headway.types import Floats, Group, Ints

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "rms_norm_eps": 1e-5,
    },
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}


def model_directory(shape: str, parent: Path, device: str = "cpu", dtype: str = "bfloat16", seed: int = 0) -> Path:
    """A transformers directory of the shape, its weights drawn on `device`; made if it is not there yet."""
    directory = parent / f"{shape}-{dtype}"
    if (directory / "config.json").is_file():
        return directory
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headway.model.tokenizer import build_character_tokenizer
    from headway.training.checkpoint import save_model

    tokenizer = build_character_tokenizer("0123456789")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = dict(SHAPES[shape])
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes, **ends, tie_word_embeddings=True)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    parent.mkdir(parents=True, exist_ok=True)
    save_model(directory, model, tokenizer)
    return directory


def vocabulary_of(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


@dataclass(frozen=True)
class LongTailed:
    """Lengths by group and trajectory: log-normal, cut at `longest`, with this mean after the cut.

    Each is drawn from its own key, so that it does not depend on the order, or the process, in which it is asked for.
    """

    mean: float
    longest: int
    spread: float = 1.0
    shortest: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.shortest <= self.mean <= self.longest:
            raise ValueError(f"a mean of {self.mean} does not lie between {self.shortest} and {self.longest}")

    @cached_property
    def location(self) -> float:
        """Of the normal distribution below: the mean of min(X, longest) rises with it, so it can be bisected."""
        low, high = math.log(self.mean) - 10 * self.spread, math.log(self.longest) + 10 * self.spread
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(middle) < self.mean else (low, middle)
        return (low + high) / 2

    def _mean_at(self, location: float) -> float:
        cut = (math.log(self.longest) - location) / self.spread
        whole = math.exp(location + self.spread**2 / 2)
        return whole * _below(cut - self.spread) + self.longest * (1 - _below(cut))

    def length(self, group: int, trajectory: int = 0) -> int:
        key = np.array([self.seed, (group << 20) + trajectory], np.uint64)
        draw = np.random.Generator(np.random.Philox(key=key)).standard_normal()
        return int(np.clip(round(math.exp(self.location + self.spread * draw)), self.shortest, self.longest))

    def lengths(self, num_groups: int, group_size: int = 1, first: int = 0) -> list[list[int]]:
        groups = range(first, first + num_groups)
        return [[self.length(group, index) for index in range(group_size)] for group in groups]


def _below(value: float) -> float:
    """The share of the standard normal distribution below `value`."""
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))


def prompt_tokens(group: int, num_tokens: int, vocabulary: int, seed: int = 0) -> "Ints":
    """A prompt of random tokens, none of them special: the same for the same group and seed."""
    random = np.random.default_rng([seed, group, 1])
    return random.integers(vocabulary // 100 + 3, vocabulary, num_tokens).astype(np.int32)


def trained_groups(
    lengths: Sequence[Sequence[int]], num_prompt: int, vocabulary: int, seed: int = 0, version: int = 0
) -> "list[Group]":
    """Finished groups with completions of these lengths: random tokens, rewards of 0 and 1, log-probs near uniform."""
    from headway.types import Group

    made = []
    for group, inner in enumerate(lengths):
        random = np.random.default_rng([seed, group, 2])
        prompt = prompt_tokens(group, num_prompt, vocabulary, seed)
        trajectories = [_trajectory(random, index, prompt, n, vocabulary, version) for index, n in enumerate(inner)]
        made.append(Group(group, group, 0, len(inner), tuple(trajectories)))
    return made


def _trajectory(random: Any, index: int, prompt: "Ints", length: int, vocabulary: int, version: int) -> Any:
    from headway.types import NOT_SAMPLED, Reward, Sequence, StopReason, Trajectory

    def after_prompt(values: Any, before: float) -> "Floats":
        return np.concatenate([np.full(len(prompt), before), values]).astype(np.float32)

    sequence = Sequence(
        tokens=np.concatenate([prompt, random.integers(3, vocabulary, length)]).astype(np.int32),
        loss_mask=after_prompt(np.ones(length), 0),
        logprobs=after_prompt(-math.log(vocabulary) + random.normal(0, 0.3, length), 0),
        versions=after_prompt(np.full(length, version), NOT_SAMPLED).astype(np.int32),
    )
    reward = Reward(0, len(sequence.tokens) - 1, float(random.integers(2)))
    return Trajectory(index, (sequence,), (reward,), 1.0, (StopReason.LENGTH,))
