"""A completion being sampled by a server, over as many submissions as swaps and aborts make of it.

Invariants that live here:
  3. The engine stamps versions: a token is stamped with what the server's spans say; before they come, only where no
     swap began since its submission, and nothing is handed out whose version is not known.
  9. Explicit stop reasons travel with the completion.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np

from headway.engine.vllm.messages import Part, ServerFailed, Span, Submission, seed_of
from headway.errors import InvariantBroken, RequestRefused
from headway.types import (
    Chunk,
    Completion,
    Floats,
    Ints,
    Request,
    StopReason,
)

_UNKNOWN = -1
_MOST_FRUITLESS = 3
"""Submissions in a row that the server may end without a token before that counts as its failure."""


class Live:
    def __init__(self, request: Request, context: int, decode_text: Callable[[list[int]], str]):
        self.request, self.name = request, str(request.key)
        self._context, self._decode_text = context, decode_text
        self._prompt: list[int] = request.tokens.tolist()
        given = request.sampled
        self.tokens: list[int] = given.tokens.tolist() if given else []
        self._logprobs: list[float] = given.logprobs.tolist() if given else []
        self._versions: list[int] = given.versions.tolist() if given else []
        self.stop: StopReason | None = None
        self.task: asyncio.Task[None] | None = None  # serves it
        self.reading: asyncio.Task[None] | None = None  # reads its present submission
        self._items: asyncio.Queue[Chunk | Completion | BaseException] = asyncio.Queue()
        self.submission: Submission | None = None  # the present one, or the last
        self._num_submissions = self._num_fruitless = 0
        self._is_interrupted = False
        self._version = _UNKNOWN
        self._look_for_stop(0)
        self._num_sent = self._start = len(self.tokens)  # told to the caller; before the present submission
        self._num_known = len(self.tokens)  # tokens whose version is; those after them wait for the server's spans

    @property
    def num_tokens(self) -> int:
        """Of prompt and completion."""
        return len(self._prompt) + len(self.tokens)

    @property
    def has_new(self) -> bool:
        """Whether the present submission brought anything."""
        return len(self.tokens) > self._start

    @property
    def stamps(self) -> bool:
        """Whether the version of what comes is known without the server's spans."""
        return self._version != _UNKNOWN

    # Submissions

    def submit(self, version: int, salt: str) -> Submission:
        """The call for what is still missing, begun while the weights of `version` are live."""
        sampling = self.request.sampling
        self._start, self._version = len(self.tokens), version
        self._num_submissions += 1
        self._is_interrupted = False
        self.submission = Submission(
            name=f"{self.name}/{self._num_submissions}/{salt}",
            tokens=self._prompt + self.tokens,
            sampling=sampling,
            max_tokens=min(sampling.max_tokens - len(self.tokens), self._context - self.num_tokens),
            seed=seed_of(self.request, len(self.tokens)),
            salt=salt,
        )
        return self.submission

    def interrupt(self) -> None:
        """The server is about to be told to abort the present submission; the next goes on from there."""
        self._is_interrupted = True

    def blur(self) -> None:
        """A swap begins: from here on, only the server knows which weights sample this submission's tokens."""
        self._version = _UNKNOWN

    def take(self, part: Part) -> int:
        """Add what came; how many tokens that were. Beyond a stop nothing is added."""
        if len(part.tokens) != len(part.logprobs):
            raise ServerFailed(f"{len(part.tokens)} tokens came with {len(part.logprobs)} log-probs")
        num_before = len(self.tokens)
        if self.stop is None:
            self.tokens += part.tokens
            self._logprobs += part.logprobs
            self._versions += [self._version] * len(part.tokens)
            self._look_for_stop(num_before)
            if self.stamps:
                self._num_known = len(self.tokens)
            self._hand_out()
        return len(self.tokens) - num_before

    def end_submission(self, finish: str, spans: tuple[Span, ...] | None) -> None:
        """The server said why it ended, and perhaps which weights sampled what."""
        for span in spans or ():
            self._stamp(span)
        if _UNKNOWN in self._versions[self._start :]:
            raise InvariantBroken(f"the server did not say which weights sampled the tokens of request {self.name}")
        self._num_known = len(self.tokens)
        self._num_fruitless = 0 if self.has_new or self._is_interrupted else self._num_fruitless + 1
        if self.stop is not None:
            return
        if finish == "stop":
            self.stop = StopReason.STOP
        elif finish == "length":
            full = len(self.tokens) >= self.request.sampling.max_tokens
            self.stop = StopReason.LENGTH if full else StopReason.CONTEXT
        elif finish != "abort" or self._num_fruitless >= _MOST_FRUITLESS:
            raise ServerFailed(f"it ended request {self.name} with {finish!r}")

    def _stamp(self, span: Span) -> None:
        for place in range(self._start + span.start, min(self._start + span.end, len(self.tokens))):
            if self._versions[place] not in (_UNKNOWN, span.version):
                known = self._versions[place]
                raise InvariantBroken(f"a token of version {known} was sampled by {span.version}, the server says")
            self._versions[place] = span.version

    def _look_for_stop(self, num_before: int) -> None:
        """Find, among the tokens from `num_before` on, one that ends the completion; what lies beyond it is cut off.

        The server looks too, but not across the border of two submissions.
        """
        sampling = self.request.sampling
        for place in range(num_before, len(self.tokens)) if sampling.stop_tokens or sampling.stop_strings else ():
            if self.tokens[place] in sampling.stop_tokens or self._ends_with_stop_string(place + 1):
                for values in (self.tokens, self._logprobs, self._versions):
                    del values[place + 1 :]
                self.stop = StopReason.STOP
                return
        if len(self.tokens) >= sampling.max_tokens:
            self.stop = StopReason.LENGTH
        elif self.num_tokens >= self._context:
            self.stop = StopReason.CONTEXT

    def _ends_with_stop_string(self, num_tokens: int) -> bool:
        texts = self.request.sampling.stop_strings
        if not texts:
            return False
        # A stop string of n characters lies within the last n tokens plus a few that share its first character.
        tail = self._decode_text(self.tokens[max(0, num_tokens - max(map(len, texts)) - 4) : num_tokens])
        return any(text in tail for text in texts)

    # What its caller is told

    async def items(self) -> AsyncIterator[Chunk | Completion]:
        while True:
            item = await self._items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if isinstance(item, Completion):
                return

    def _hand_out(self) -> None:
        if self._num_known > self._num_sent:
            self._items.put_nowait(Chunk(*self._arrays(slice(self._num_sent, self._num_known))))
            self._num_sent = self._num_known

    def _arrays(self, part: slice) -> tuple[Ints, Floats, Ints]:
        return (
            np.array(self.tokens[part], np.int32),
            np.array(self._logprobs[part], np.float32),
            np.array(self._versions[part], np.int32),
        )

    def finish(self, stop: StopReason) -> None:
        """The completion, with all tokens whose version is known."""
        self.stop = stop
        self._hand_out()
        self._items.put_nowait(Completion(*self._arrays(slice(0, self._num_known)), stop))

    def fail(self, error: BaseException) -> None:
        self._items.put_nowait(error)


class Slots:
    """So many submissions at a time, urgent ones first, and none to begin while the gate is shut."""

    def __init__(self, num: int):
        self._num_free = num
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._num_asked = 0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, urgent: bool) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_asked += 1
        self._waiting.append((not urgent, self._num_asked, place))
        self._hand_on()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        self._num_free += 1
        self._hand_on()

    def _hand_on(self) -> None:
        self._waiting = [entry for entry in self._waiting if not entry[2].done()]
        self._waiting.sort(key=lambda entry: entry[:2])
        while self._waiting and self._num_free and self._open.is_set():
            self._num_free -= 1
            self._waiting.pop(0)[2].set_result(None)

    async def opened(self) -> None:
        while not self._open.is_set():  # it may be shut again before whoever waited comes to run
            await self._open.wait()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
        self._hand_on()


def check(request: Request, context: int, vocab_size: int) -> None:
    """Refuse what no server could continue."""
    tokens = request.tokens
    if len(tokens) > context:
        raise RequestRefused(f"request {request.key} has {len(tokens)} tokens, more than the context of {context}")
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise RequestRefused(f"request {request.key} holds a token outside the model's vocabulary of {vocab_size}")
