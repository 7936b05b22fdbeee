"""Builds requests to a vLLM server and parses its answers; no I/O.

Two endpoints can generate. `/inference/v1/generate` is token in, token out, and its last chunk says which weights
sampled which tokens (spans); it exists with `--enable-scale-out`. `/v1/completions` is on every server and knows
nothing of versions. Log-probs come with the sampled token (`logprobs = 0`), at the temperature it was sampled at:
under `--logprobs-mode processed_logprobs` vLLM gives log-softmax(logits ÷ temperature) after top-k and top-p, under
`raw_logprobs` log-softmax(logits). The first is right for a full distribution, the second for a truncated one at
temperature 1.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from headway.errors import CAUSE, InvariantBroken, RequestRefused, translated
from headway.types import Floats, Ints, Request, Sampling, Truncatable, truncates

Message = dict[str, Any]

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
_NAME_PREFIX = "generate-tokens-"  # what the server puts before the name we give a request


class ServerFailed(Exception):
    """The server answered 5xx, with invalid data, or not at all."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` of one submission were sampled by the weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class StreamPart:
    """One chunk of a stream. `finish` is the server's finish reason, empty before the end."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    spans: tuple[Span, ...] | None


@dataclass(frozen=True)
class Submission:
    """One request for the rest of a completion: the prompt with the tokens sampled so far, and the sampling."""

    name: str
    model: str  # the served model, or the adapter of a version
    tokens: list[int]
    sampling: Sampling
    max_tokens: int
    seed: int
    salt: str


def seed_of(request: Request, position: int) -> int:
    """A seed for the tokens from `position` on: the same for the same request, whichever engine serves it."""
    return xxhash.xxh3_64_intdigest(f"{request.seed}/{request.key}/{position}".encode()) >> 1


def logprobs_mode(sampling: Truncatable) -> str:
    """The mode in which a server gives log-probs before top-k and top-p."""
    return RAW if truncates(sampling) else PROCESSED


def check_mode(sampling: Sampling, mode: str, what: str) -> None:
    """Refuse sampling for which the server would not report log-probs before top-k and top-p."""
    if mode == RAW and sampling.temperature not in (0.0, 1.0):
        raise RequestRefused(f"{what} is sampled at temperature {sampling.temperature:g}, and the server gives {RAW}")
    if mode == PROCESSED and truncates(sampling) and sampling.temperature > 0:
        raise RequestRefused(f"{what} is sampled with top-k or top-p, and the server gives {PROCESSED}")


def _sampling_params(submission: Submission) -> Message:
    sampling = submission.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,  # explicit, because a model's generation_config.json may set another
        "max_tokens": submission.max_tokens,
        "seed": submission.seed,
        "logprobs": 0,
        # Only the stop tokens of the request count, among them the model's own end of text.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_tokens),
        "stop": list(sampling.stop_strings),
        "skip_special_tokens": False,  # or a stop string that names one is never found
    }


def generate_body(submission: Submission, chunk_tokens: int) -> Message:
    params = _sampling_params(submission)
    params |= {"detokenize": bool(submission.sampling.stop_strings), "stream_interval": chunk_tokens}
    return {
        "request_id": submission.name,
        "model": submission.model,
        "token_ids": submission.tokens,
        "sampling_params": params,
        "cache_salt": submission.salt,
        "stream": True,
    }


def completions_body(submission: Submission) -> Message:
    return {
        "model": submission.model,
        "prompt": submission.tokens,
        "cache_salt": submission.salt,
        "return_token_ids": True,
        "stream": True,
        **_sampling_params(submission),
    }


def abort_body(name: str) -> Message:
    return {"request_ids": [_NAME_PREFIX + name]}


def stream_part(message: Message) -> StreamPart | None:
    """Parse one event of either endpoint's stream; None if it carries no tokens, such as usage."""
    if "error" in message:
        raise ServerFailed(error_in(message))
    if not message.get("choices"):
        return None
    choice = message["choices"][0]
    tokens = choice.get("token_ids") or []
    return StreamPart(tokens, _logprobs(choice.get("logprobs")), choice.get("finish_reason") or "", _spans(choice))


def _logprobs(found: Message | None) -> list[float]:
    if found is None:
        return []
    if "token_logprobs" in found:  # /v1/completions
        return list(found["token_logprobs"])
    return [entry["logprob"] for entry in found["content"] or []]


def _spans(choice: Message) -> tuple[Span, ...] | None:
    found = choice.get("weight_versions")
    if found is None:
        return None
    with translated(ValueError, InvariantBroken, f"the server stamps tokens with a version that is not ours ({CAUSE})"):
        return tuple(Span(int(span["version"]), span["start"], span["end"]) for span in found)


def score_body(tokens: Ints, model: str, endpoint: str) -> Message:
    """A request for the log-probs of a prompt's tokens; the one token that must be sampled is ignored."""
    params = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}
    if endpoint == COMPLETIONS:
        return {"model": model, "prompt": tokens.tolist(), **params}
    return {"model": model, "token_ids": tokens.tolist(), "sampling_params": {**params, "detokenize": False}}


def scores_of(answer: Message, tokens: Ints) -> Floats:
    """Log-probs of `tokens`, each given those before it; 0 for the first."""
    found = answer.get("prompt_logprobs") or answer["choices"][0].get("prompt_logprobs")
    if found is None or len(found) != len(tokens):
        raise ServerFailed(f"it scored {len(found or [])} of {len(tokens)} tokens")
    values = [0.0] + [entry[str(token)]["logprob"] for entry, token in zip(found[1:], tokens[1:].tolist(), strict=True)]
    return np.array(values, np.float32)


def error_in(answer: Any) -> str:
    """The message of an error answer, on one line."""
    error = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:300]


def text_error(body: str) -> str:
    with suppress(ValueError):
        return error_in(json.loads(body))
    return " ".join(body.split())[:300]


def metrics_of(text: str) -> dict[str, float]:
    """Parse Prometheus' text format: values by name, summed over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("vllm:")
            values[name] = values.get(name, 0.0) + float(value)
    return values
