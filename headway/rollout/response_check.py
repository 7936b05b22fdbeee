"""Validates every answer of an engine: one pure function that each chunk and each completion has to pass.

Invariants that live here:
  3. The engine stamps versions: they never decrease while one engine samples, and none exceeds what engines were sent.
  9. Explicit stop reasons travel with the completion, and must not contradict it.
"""

import numpy as np

from headway.engine.completion import PartialCompletion
from headway.types import Chunk, Completion, Request, StopReason

_ROUNDING = 1e-3
"""A log-prob may exceed 0 by this much: fp32 rounding of a token of probability 1."""


class NonFinite(str):
    """A violation whose cause may be the request: its activations overflow on any engine."""


def find_violation(
    partial: PartialCompletion, answer: Chunk | Completion, num_before: int, vocab_size: int, newest: int
) -> str:
    """Why the answer cannot be valid, or nothing; `newest` is the newest version that any engine was sent.

    `partial` is what was received so far; its first `num_before` tokens, prompt included, came from other engines.
    """
    request, num_tokens = partial.request, partial.num_tokens
    last_version = int(partial.versions[num_tokens - 1]) if num_tokens > num_before else 0
    if isinstance(answer, Chunk):
        num_sampled = partial.num_sampled + len(answer.tokens)
        return _wrong_numbers(answer, last_version, vocab_size, newest) or _wrong_length(request, num_sampled)
    before = partial.tokens[partial.num_prompt : num_tokens]
    if not np.array_equal(answer.tokens[: len(before)], before):
        return f"its completion of {len(answer.tokens)} tokens does not begin with the {len(before)} it streamed before"
    return (
        _wrong_numbers(rest_of(answer, len(before)), last_version, vocab_size, newest)
        or _wrong_length(request, len(answer.tokens))
        or _wrong_stop(request, answer)
    )


def rest_of(completion: Completion, num_tokens: int) -> Chunk:
    """What follows the first `num_tokens` tokens."""
    part = slice(num_tokens, None)
    return Chunk(completion.tokens[part], completion.logprobs[part], completion.versions[part])


def _wrong_numbers(new: Chunk, last_version: int, vocab_size: int, newest: int) -> str:
    if not len(new.tokens):
        return ""
    if not 0 <= new.tokens.min() <= new.tokens.max() < vocab_size:
        return f"a token lies outside the vocabulary of {vocab_size}"
    if not np.isfinite(new.logprobs).all():
        return NonFinite("a log-prob is not a finite number")
    if new.logprobs.max() > _ROUNDING:
        return "a log-prob is above 0"
    if new.versions[0] < last_version or (np.diff(new.versions) < 0).any():
        return "its versions decrease"
    if new.versions[-1] > newest:
        return f"a token has version {new.versions[-1]}, and engines were sent {newest} at most"
    return ""


def _wrong_length(request: Request, num_tokens: int) -> str:
    limit = request.sampling.max_tokens
    return f"{num_tokens} tokens are more than the {limit} asked for" if num_tokens > limit else ""


def _wrong_stop(request: Request, completion: Completion) -> str:
    sampling, stop = request.sampling, completion.stop
    is_stop_T = np.isin(completion.tokens, sampling.stop_tokens)
    if is_stop_T[:-1].any():
        return "it continued after a stop token"
    if stop == StopReason.STOP and not (is_stop_T[-1:].any() or (sampling.stop_strings and len(is_stop_T))):
        # Without stop tokens or strings of the request's, an engine may have an end token of its own.
        return "it stopped without a stop token" if sampling.stop_tokens or not len(is_stop_T) else ""
    if stop == StopReason.LENGTH and len(completion.tokens) != sampling.max_tokens:
        return f"it reports {sampling.max_tokens} tokens reached with {len(completion.tokens)}"
    return ""
