"""The `Engine` protocol, which the embedded, the vLLM and the fake engine implement; tokens in, tokens out.

Invariants that live here:
  3. The engine stamps versions: it stamps version and log-prob on every token at the moment it samples it.
 13. Non-blocking generation: a running sequence waits for the swap and, under recompute, for its own
     re-prefill; never for the transfer of weights.
"""

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from headway.errors import InvariantBroken
from headway.types import (
    Chunk,
    Completion,
    EngineStats,
    Ints,
    Request,
    RequestKey,
    Scores,
    SwapReport,
    WeightUpdate,
)

KvPolicy = Literal["recompute", "keep", "drain"]
"""What a swap does to the KV cache of sequences in flight: recompute it, keep it, or drain first: wait until they have
ended, so that every completion is of one version."""


class Engine(Protocol):
    def generate(self, request: Request) -> AsyncIterator[Chunk | Completion]:
        """Yield chunks as tokens are sampled, then the completion, exactly once and last.

        A request with tokens that another engine `sampled` continues from them: chunks hold the tokens sampled here,
        the completion holds all, and all count towards its limits.
        """
        ...

    async def abort(self, key: RequestKey) -> None:
        """End a request now; its completion arrives with stop reason `aborted`. Unknown keys are ignored."""
        ...

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        """Log-probs of the given tokens under the live weights, by teacher forcing."""
        ...

    async def stage_weights(self, update: WeightUpdate) -> None:
        """Receive an update into a second set of weights while generation goes on."""
        ...

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        """Make the staged version live between two decode steps; no request is lost."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


def check_follows(update: WeightUpdate, live: int) -> None:
    """Refuse to stage weights that are older than the live ones; version 0 may come again."""
    if update.version <= live and not (update.version == 0 == live):
        raise InvariantBroken(f"version {update.version} cannot follow version {live}: versions never go back")


def check_staged(version: int, staged: int | None) -> None:
    if staged != version:
        raise InvariantBroken(f"version {version} was not staged; staged is {staged}")
