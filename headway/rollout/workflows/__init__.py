"""How an episode runs. A workflow is a class with one coroutine, `run(episode) -> Trajectory`; it is user code.

It runs in a rollout worker and sees the world through its `Episode`: it may generate, verify, and turn tokens into
text and back. Everything it samples goes through `Episode.generate`, which keeps tokens, log-probs and versions exact.
`single_turn` is the shortest workflow; `conversation` makes one of several turns a matter of lines, as `multi_turn`
(try again until it is right), `tools` (functions and a Python interpreter), `agent` (any client of the OpenAI API) and
`environment` (those of the package verifiers) show.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from headway.errors import HeadwayError
from headway.types import Completion, Ints, Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class VerifierBroken(HeadwayError):
    """The verifier itself failed; this is never a reward."""


class LimitReached(HeadwayError):
    """The episode may sample nothing more: its turns, its tokens or the model's context are used up."""


class Episode(Protocol):
    """One trajectory in the making."""

    prompt: Prompt
    index: int
    temperature: float
    stop_tokens: tuple[int, ...]
    tokenizer: "PreTrainedTokenizerBase"
    context: int  # the longest sequence of an engine
    components: dict[str, float]  # of the last verdict

    async def generate(
        self, tokens: Ints, max_tokens: int | None = None, stop_strings: tuple[str, ...] = ()
    ) -> Completion:
        """Continue the given tokens with the policy, by `sampling.max_tokens` at most, or by fewer; `LimitReached`
        where the episode's limits or the context leave room for none."""
        ...

    def room(self, num_tokens: int) -> int:
        """How many tokens `generate` would sample at most after `num_tokens`; raises `LimitReached` for none."""
        ...

    async def verify(self, text: str) -> float:
        """The verifier's score of a text for this prompt; raises `VerifierBroken` when there is none."""
        ...

    def text(self, tokens: Ints) -> str: ...

    def tokens(self, text: str) -> Ints: ...


class Workflow(Protocol):
    async def run(self, episode: Episode) -> Trajectory: ...


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a blocking function returns. Its thread is its own and ends with the process: one that hangs holds up
    neither the other episodes nor the end."""
    loop, future = asyncio.get_running_loop(), asyncio.Future[Any]()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(*args, **kwargs), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future
