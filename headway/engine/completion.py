"""`PartialCompletion`: a completion while it is sampled, in the engines and in the rollout worker that collects chunks.

Invariants that live here:
  3. The engine stamps versions: every token carries the one its engine stamped it with.
  9. Explicit stop reasons travel with the completion: stop tokens, stop strings, `max_tokens` and the context differ.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headway.errors import RequestRefused
from headway.types import Chunk, Completion, Floats, Ints, Request, StopReason

DecodeText = Callable[[list[int]], str]
"""Tokens to text with special tokens written out, so that a stop string may name one."""

_MARGIN = 4
"""Tokens searched before a stop string's longest possible place: a few may add no bytes, or lose a leading space."""


class PartialCompletion:
    """The tokens sampled so far, each with log-prob and version, and the reason they ended, once they have.

        partial = PartialCompletion(request, context=4096, decode_text=decode)
        partial.extend(tokens, logprobs, versions=3)  # cut at a stop, which sets `partial.stop`
        partial.take_chunk()                          # what was added since the last chunk
        partial.completion()

    `tokens` begins with the prompt; `logprobs` and `versions` are parallel to it. `num_tokens` places are filled, from
    the start those of tokens that another engine sampled of the request.
    """

    def __init__(self, request: Request, context: int | None = None, decode_text: DecodeText | None = None):
        """Without `decode_text` stop strings are not searched for; without `context` there is no such limit."""
        sampling = request.sampling
        self.request, self.name, self.num_prompt = request, str(request.key), len(request.tokens)
        wanted = self.num_prompt + sampling.max_tokens
        self.limit = wanted if context is None else min(wanted, context)
        capacity = max(self.limit, self.num_prompt)
        self.tokens, self.versions = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
        self.logprobs = np.empty(capacity, np.float32)
        self.tokens[: self.num_prompt] = request.tokens
        self.num_tokens = self.num_prompt
        self.stop: StopReason | None = None
        self._decode_text = decode_text
        self._stop_tokens = frozenset(sampling.stop_tokens)
        self._stop_strings = sampling.stop_strings if decode_text is not None else ()
        # A token is at least one byte of the text, but for a few: a character may be four tokens.
        self._window = max((len(text.encode()) for text in self._stop_strings), default=0) + _MARGIN
        if request.sampled is not None:
            self.extend(request.sampled.tokens, request.sampled.logprobs, request.sampled.versions)
        else:
            self.stop = self._find_stop(self.num_tokens)
        self.num_sent = self.num_tokens

    @property
    def num_sampled(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def fresh(self) -> bool:
        """Nothing is sampled yet."""
        return self.num_tokens == self.num_prompt

    def extend(self, tokens: Ints, logprobs: Floats, versions: Ints | int) -> int:
        """Append sampled tokens up to the first stop among them; returns how many were appended."""
        start = self.num_tokens
        count = min(len(tokens), len(self.tokens) - start)
        part = slice(start, start + count)
        if count < len(tokens):
            tokens, logprobs = tokens[:count], logprobs[:count]
            versions = versions if isinstance(versions, int) else versions[:count]
        self.tokens[part], self.logprobs[part], self.versions[part] = tokens, logprobs, versions
        self.num_tokens = part.stop
        self.stop = self._find_stop(start)
        return self.num_tokens - start

    def truncate(self, num_tokens: int) -> None:
        """Discard all but the first `num_tokens`, the prompt's among them, and go on from there."""
        self.num_tokens, self.stop = num_tokens, None
        self.num_sent = min(self.num_sent, num_tokens)

    def _find_stop(self, start: int) -> StopReason | None:
        """The reason the completion ends at or after place `start`, if it does; tokens beyond a stop are cut off."""
        searches = start < self.num_tokens and (self._stop_tokens or self._stop_strings)
        if searches and (end := self._end_of_text(start)) is not None:
            self.num_tokens = end
            return StopReason.STOP
        if self.num_tokens < self.limit:
            return None
        return StopReason.LENGTH if self.num_sampled >= self.request.sampling.max_tokens else StopReason.CONTEXT

    def _end_of_text(self, start: int) -> int | None:
        """The place after the first stop token, or after the first token that completes a stop string."""
        new, end = self.tokens[start : self.num_tokens].tolist(), None
        if not self._stop_tokens.isdisjoint(new):
            end = next(place for place, token in enumerate(new, start + 1) if token in self._stop_tokens)
        last = end or self.num_tokens
        # All new tokens are decoded at once, and one by one only where a stop string is among them.
        if self._has_stop_string(start, last):
            return next(place for place in range(start + 1, last + 1) if self._has_stop_string(start, place))
        return end

    def _has_stop_string(self, start: int, end: int) -> bool:
        """Whether a stop string is complete within the tokens from `start` to `end` and those just before."""
        if not self._stop_strings or self._decode_text is None:
            return False
        text = self._decode_text(self.tokens[max(self.num_prompt, start - self._window) : end].tolist())
        return any(stop in text for stop in self._stop_strings)

    # Output

    def take_chunk(self, end: int | None = None) -> Chunk:
        """The tokens since the last chunk, up to place `end`."""
        part = slice(self.num_sent, self.num_tokens if end is None else end)
        self.num_sent = part.stop
        return self._chunk(part)

    def _chunk(self, part: slice) -> Chunk:
        return Chunk(self.tokens[part].copy(), self.logprobs[part].copy(), self.versions[part].copy())

    @property
    def sampled(self) -> Chunk:
        """All tokens sampled so far."""
        return self._chunk(slice(self.num_prompt, self.num_tokens))

    def remaining_request(self) -> Request:
        """The request for another engine to continue: with the tokens sampled so far."""
        return self.request if self.fresh else replace(self.request, sampled=self.sampled)

    def completion(self, stop: StopReason | None = None) -> Completion:
        """The completion, with the stop reason found or the one given."""
        reason, whole = stop or self.stop, self.sampled
        assert reason is not None, f"{self.name} has not ended"
        return Completion(whole.tokens, whole.logprobs, whole.versions, reason)


def check_tokens(what: str, tokens: Ints, context: int, vocab_size: int) -> None:
    if len(tokens) > context:
        raise RequestRefused(f"{what} has {len(tokens)} tokens, more than the context of {context}")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise RequestRefused(f"{what} holds a token outside the model's vocabulary of {vocab_size}")


def check_request(request: Request, context: int, vocab_size: int) -> None:
    """Refuse tokens outside the context or the vocabulary, and more sampled tokens than the request allows."""
    name, sampled = f"request {request.key}", request.sampled
    check_tokens(name, request.tokens, context, vocab_size)
    if sampled is None:
        return
    whole = np.concatenate([request.tokens, sampled.tokens])
    check_tokens(f"{name} with its sampled tokens", whole, context, vocab_size)
    if len(sampled.tokens) > request.sampling.max_tokens:
        limit = f"its max_tokens of {request.sampling.max_tokens}"
        raise RequestRefused(f"{name} comes with {len(sampled.tokens)} sampled tokens, more than {limit}")
