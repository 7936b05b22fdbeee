"""What the engine's tests share: a core to step by hand, requests, other weights, and references by plain transformers.

The references use none of Headway's attention, memory or sampling: transformers' own sdpa attention and its own cache.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from headway.config import EngineSection
from headway.engine.embedded.scheduler import EngineCore, Output
from headway.engine.protocol import Engine, KvPolicy
from headway.errors import HeadwayError
from headway.model.loading import load_model, named_weights
from headway.model.tokenizer import decode, load_tokenizer
from headway.types import (
    Chunk,
    Completion,
    Floats,
    Ints,
    Request,
    RequestKey,
    Sampling,
    SwapReport,
)
from headway.weights.publish import Publisher

torch.set_num_threads(1)
DEVICE = "cpu"
"""Where cores are made; tests of the GPU set it."""
Event = Callable[[EngineCore], object]


@lru_cache
def _loaded(path: str, dtype: torch.dtype) -> PreTrainedModel:
    return load_model(path, dtype)


@lru_cache
def _tokenizer(path: str) -> Any:
    return load_tokenizer(path)


def make_core(
    path: str, deterministic: bool = True, dtype: torch.dtype = torch.float32, context: int = 512, **settings: Any
) -> EngineCore:
    section = EngineSection(**{"max_num_seqs": 8, "kv_tokens": 65536, "prefill_chunk": 64, **settings})
    model = copy.deepcopy(_loaded(path, dtype)).to(torch.device(DEVICE))
    return EngineCore(
        model, section, context, deterministic, lambda tokens: decode(_tokenizer(path), tokens, special=True)
    )


def prompt(length: int, seed: int = 0) -> Ints:
    """Tokens of the tiny models' alphabet; none of them ends a text."""
    return np.random.default_rng(seed).integers(3, 50, length).astype(np.int32)


def make_request(tokens: Ints, group: int = 0, trajectory: int = 0, seed: int = 7, **sampling: Any) -> Request:
    key = RequestKey(group, trajectory, 0, sampling.pop("stream", "train"))
    urgent = sampling.pop("urgent", False)
    return Request(key, tokens, Sampling(**{"max_tokens": 24, **sampling}), seed, urgent)


def group_of(size: int, tokens: Ints, group: int = 0, **sampling: Any) -> list[Request]:
    return [make_request(tokens, group, trajectory, **sampling) for trajectory in range(size)]


class Outcome:
    """Each request's output: its chunks, then exactly one completion or error and nothing after it."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[Chunk]] = {}
        self.completions: dict[str, Completion] = {}
        self.errors: dict[str, HeadwayError] = {}

    def take(self, outputs: Sequence[Output]) -> None:
        for name, item in outputs:
            assert name not in self.completions | self.errors, f"{name} has output after its end"
            if isinstance(item, Completion):
                self.completions[name] = item
            elif isinstance(item, HeadwayError):
                self.errors[name] = item
            else:
                self.chunks.setdefault(name, []).append(item)

    def __getitem__(self, request: Request) -> Completion:
        return self.completions[str(request.key)]


def drive(
    core: EngineCore,
    requests: Sequence[Request],
    arrivals: Sequence[int] | None = None,
    events: Mapping[int, Event] | None = None,
    max_steps: int = 5000,
) -> Outcome:
    """Step until every request is complete; request i arrives before step `arrivals[i]`, events happen just after."""
    outcome = Outcome()
    due = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    for step in range(max_steps):
        while due and due[0][0] <= step:
            core.submit(requests[due.pop(0)[1]])
        if events and step in events:
            events[step](core)
        outcome.take(core.step())
        if not due and not core.has_work:
            break
    assert {**outcome.completions, **outcome.errors}.keys() == {str(request.key) for request in requests}
    return outcome


def alone(path: str, request: Request, **settings: Any) -> Completion:
    """The request in an engine of its own, undisturbed."""
    return drive(make_core(path, **settings), [request])[request]


def plain_model(path: str, noise_seed: int | None = None, noise: float = 0.03) -> PreTrainedModel:
    """The model as transformers alone runs it; with a seed, other weights of the same shape."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    if noise_seed is not None:
        generator = torch.Generator().manual_seed(noise_seed)
        for parameter in model.parameters():
            parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return model.eval().requires_grad_(False)


class Swapper:
    """Publishes weights and swaps them in, each time under the next version."""

    def __init__(self) -> None:
        self.publisher = Publisher()
        self.reports: list[SwapReport] = []

    def swap(self, core: EngineCore, model: PreTrainedModel, kv: KvPolicy) -> SwapReport:
        tensors = {name: tensor.to(core.model.dtype) for name, tensor in named_weights(model).items()}
        update = self.publisher.publish(core.version + 1, tensors)
        core.stage(update)
        report = core.swap(update.version, kv)
        assert report.fingerprints == update.fingerprints
        self.reports.append(report)
        return report


def teacher_forced(model: PreTrainedModel, tokens: Ints, temperature: float = 1.0) -> Floats:
    """Log-prob of each token given what precedes it; position 0 is 0."""
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0, :-1].float() / temperature
    targets = torch.from_numpy(tokens[1:]).long()
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    return np.concatenate([np.zeros(1, np.float32), logprobs.numpy()])


def forced_with_kept_kv(models: Sequence[PreTrainedModel], tokens: Ints, num_prompt: int, versions: Ints) -> Floats:
    """Log-probs of the sampled tokens where each token's keys and values come from the weights that read it.

    The weights that sample a token are those that read the one before it; the prompt is read by those that begin.
    """
    cache, logprobs = DynamicCache(), []
    with torch.inference_mode():
        if num_prompt > 1:
            models[versions[0]](torch.from_numpy(tokens[: num_prompt - 1]).long()[None], past_key_values=cache)
        for position, version in enumerate(versions, start=num_prompt):
            last = torch.tensor([[int(tokens[position - 1])]])
            logits = models[version](last, past_key_values=cache).logits[0, -1].float()
            logprobs.append(float(logits.log_softmax(-1)[int(tokens[position])]))
    return np.array(logprobs, np.float32)


async def complete(engine: Engine, request: Request) -> tuple[list[Chunk], Completion]:
    """Everything an engine says of a request: its chunks, and the completion that ends them."""
    items = [item async for item in engine.generate(request)]
    completion = items.pop()
    assert isinstance(completion, Completion)
    chunks = [item for item in items if isinstance(item, Chunk)]
    assert len(chunks) == len(items), "the completion comes once, and last"
    return chunks, completion
