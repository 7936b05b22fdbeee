"""How an episode runs. A workflow is a class with one coroutine, `run(episode) -> Trajectory`; it is user code.

It lives in a rollout worker and sees the world through its `Episode`: it may generate, verify, and turn tokens into
text and back. Everything it samples goes through `Episode.generate`, which keeps tokens, log-probs and versions exact.
`single_turn` is the shortest workflow.
"""

from typing import Protocol

from headway.errors import HeadwayError
from headway.types import Completion, Ints, Prompt, Trajectory


class VerifierBroken(HeadwayError):
    """The verifier itself failed; this is never a reward."""


class Episode(Protocol):
    """One trajectory in the making."""

    prompt: Prompt
    index: int
    temperature: float

    async def generate(self, tokens: Ints, max_tokens: int | None = None) -> Completion:
        """Continue the given tokens with the policy, by `sampling.max_tokens` at most, or by fewer."""
        ...

    async def verify(self, text: str) -> float:
        """The verifier's score of a text for this prompt; raises `VerifierBroken` when there is none."""
        ...

    def text(self, tokens: Ints) -> str: ...

    def tokens(self, text: str) -> Ints: ...


class Workflow(Protocol):
    async def run(self, episode: Episode) -> Trajectory: ...
