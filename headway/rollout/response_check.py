"""Is what an engine answered possible at all? One pure function that every chunk and every completion has to pass.

Invariants that live here:
  3. The engine stamps versions, and a stamp is believed only if it is possible: versions never go back while one engine
     samples, and none lies ahead of what engines were given.
  9. Explicit stop reasons travel with the completion, and must not contradict it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.types import Chunk, Completion, Request, StopReason

_ROUNDING = 1e-3
"""A log-prob may exceed 0 by so much: fp32 rounding of a token that is all but certain."""


@dataclass(frozen=True)
class Known:
    """What was received of a completion before the next answer."""

    parts: Sequence[Chunk] = ()
    num_tokens: int = 0
    last_version: int = 0  # of the token that this engine sampled last, if it sampled any


def nonsense(request: Request, known: Known, answer: Chunk | Completion, vocab_size: int, newest: int) -> str:
    """Why the answer cannot be true, or nothing; `newest` is the newest version that any engine was given."""
    if isinstance(answer, Chunk):
        num_tokens = known.num_tokens + len(answer.tokens)
        return _wrong_numbers(answer, known.last_version, vocab_size, newest) or _wrong_length(request, num_tokens)
    before = Chunk.join(known.parts).tokens
    if not np.array_equal(answer.tokens[: len(before)], before):
        return f"its completion of {len(answer.tokens)} tokens is not what it sent before ({len(before)} tokens)"
    return (
        _wrong_numbers(rest_of(answer, len(before)), known.last_version, vocab_size, newest)
        or _wrong_length(request, len(answer.tokens))
        or _wrong_stop(request, answer)
    )


def rest_of(completion: Completion, num_tokens: int) -> Chunk:
    """What follows the first so many tokens."""
    part = slice(num_tokens, None)
    return Chunk(completion.tokens[part], completion.logprobs[part], completion.versions[part])


def _wrong_numbers(new: Chunk, last_version: int, vocab_size: int, newest: int) -> str:
    if not len(new.tokens):
        return ""
    if not 0 <= new.tokens.min() <= new.tokens.max() < vocab_size:
        return f"a token lies outside the vocabulary of {vocab_size}"
    if not np.isfinite(new.logprobs).all() or new.logprobs.max() > _ROUNDING:
        return "a log-prob is no number, or above 0"
    if new.versions[0] < last_version or (np.diff(new.versions) < 0).any():
        return "its versions go back"
    if new.versions[-1] > newest:
        return f"version {new.versions[-1]} sampled a token, and engines were given {newest} at most"
    return ""


def _wrong_length(request: Request, num_tokens: int) -> str:
    limit = request.sampling.max_tokens
    return f"{num_tokens} tokens are more than the {limit} asked for" if num_tokens > limit else ""


def _wrong_stop(request: Request, completion: Completion) -> str:
    sampling, stop = request.sampling, completion.stop
    is_stop_T = np.isin(completion.tokens, sampling.stop_tokens)
    if is_stop_T[:-1].any():
        return "it went on after a stop token"
    if stop == StopReason.STOP and not (is_stop_T[-1:].any() or (sampling.stop_strings and len(is_stop_T))):
        # Without stop tokens or strings of the request's, an engine may know an end of its own.
        return "it stopped without a stop token" if sampling.stop_tokens or not len(is_stop_T) else ""
    if stop == StopReason.LENGTH and len(completion.tokens) != sampling.max_tokens:
        return f"it says that {sampling.max_tokens} tokens were reached with {len(completion.tokens)}"
    return ""
