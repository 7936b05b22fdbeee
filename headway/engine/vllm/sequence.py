"""A completion sampled by a vLLM server, in one submission or, after swaps and aborts, several.

Invariants that live here:
  3. The engine stamps versions: a token's version is that of the server's spans; before they arrive, it is known only
     if no swap began since the submission. Only tokens whose version is known are sent to the caller.
  9. Explicit stop reasons travel with the completion.
"""

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from headway.engine.completion import DecodeText, PartialCompletion
from headway.engine.vllm.messages import ServerFailed, Span, StreamPart, Submission, seed_of
from headway.errors import InvariantBroken
from headway.types import NOT_SAMPLED, Chunk, Completion, Request, StopReason

_UNKNOWN = NOT_SAMPLED
_MAX_FRUITLESS = 3
"""Submissions in a row that the server may end without a token before that counts as its failure."""


class ServedSequence(PartialCompletion):
    """A request at a vLLM server: its completion so far, its current submission, and the queue of its caller."""

    def __init__(self, request: Request, context: int, decode_text: DecodeText):
        self._version = _UNKNOWN
        super().__init__(request, context, decode_text)
        self.task: asyncio.Task[None] | None = None  # serves it
        self.reading: asyncio.Task[None] | None = None  # reads its current submission
        self._items: asyncio.Queue[Chunk | Completion | BaseException] = asyncio.Queue()
        self.submission: Submission | None = None  # the current one, or the last
        self._num_submissions = self._num_fruitless = 0
        self._is_interrupted = False
        self._start = self.num_tokens  # before the current submission
        self._num_known = self.num_tokens  # tokens whose version is known; the others wait for the server's spans

    @property
    def has_new(self) -> bool:
        """Whether the current submission returned any token."""
        return self.num_tokens > self._start

    @property
    def stamps(self) -> bool:
        """Whether the version of new tokens is known without the server's spans."""
        return self._version != _UNKNOWN

    # Submissions

    def submit(self, version: int, salt: str, model: str) -> Submission:
        """The next submission, for the missing tokens, made while the weights of `version` are live."""
        self._start, self._version = self.num_tokens, version
        self._num_submissions += 1
        self._is_interrupted = False
        self.submission = Submission(
            name=f"{self.name}/{self._num_submissions}/{salt}",
            model=model,
            tokens=self.tokens[: self.num_tokens].tolist(),
            sampling=self.request.sampling,
            max_tokens=self.limit - self.num_tokens,
            seed=seed_of(self.request, self.num_sampled),
            salt=salt,
        )
        return self.submission

    def interrupt(self) -> None:
        """The server is about to abort the current submission; the next one continues from its last token."""
        self._is_interrupted = True

    def forget_version(self) -> None:
        """A swap begins: from now on only the server's spans tell which weights sample this submission's tokens."""
        self._version = _UNKNOWN

    def take(self, part: StreamPart) -> int:
        """Append a part's tokens, up to a stop; returns how many were appended."""
        if len(part.tokens) != len(part.logprobs):
            raise ServerFailed(f"{len(part.tokens)} tokens came with {len(part.logprobs)} log-probs")
        if self.stop is not None:
            return 0
        count = self.extend(np.array(part.tokens, np.int32), np.array(part.logprobs, np.float32), self._version)
        if self.stamps:
            self._num_known = self.num_tokens
        self._send_known()
        return count

    def end_submission(self, finish: str, spans: tuple[Span, ...] | None) -> None:
        """Handle the end of a submission: the server's finish reason, and its version spans if it has them."""
        for span in spans or ():
            self._stamp(span)
        if (self.versions[self._start : self.num_tokens] == _UNKNOWN).any():
            raise InvariantBroken(f"the server did not report which weights sampled the tokens of request {self.name}")
        self._num_known = self.num_tokens
        self._num_fruitless = 0 if self.has_new or self._is_interrupted else self._num_fruitless + 1
        if self.stop is not None:
            return
        if finish == "stop":
            self.stop = StopReason.STOP
        elif finish == "length":
            full = self.num_sampled >= self.request.sampling.max_tokens
            self.stop = StopReason.LENGTH if full else StopReason.CONTEXT
        elif finish != "abort" or self._num_fruitless >= _MAX_FRUITLESS:
            raise ServerFailed(f"it ended request {self.name} with {finish!r}")

    def _stamp(self, span: Span) -> None:
        stamped = self.versions[self._start + span.start : min(self._start + span.end, self.num_tokens)]
        if (other := stamped[(stamped != _UNKNOWN) & (stamped != span.version)]).size:
            raise InvariantBroken(f"the server reports versions {other[0]} and {span.version} for the same token")
        stamped[:] = span.version

    # Output

    async def items(self) -> AsyncIterator[Chunk | Completion]:
        while True:
            item = await self._items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if isinstance(item, Completion):
                return

    def _send_known(self) -> None:
        if self._num_known > self.num_sent:
            self._items.put_nowait(self.take_chunk(self._num_known))

    def finish(self, stop: StopReason) -> None:
        """Send the completion, with all tokens whose version is known."""
        self._send_known()
        self.truncate(self._num_known)
        self.stop = stop
        self._items.put_nowait(self.completion())

    def fail(self, error: BaseException) -> None:
        self._items.put_nowait(error)
