"""One trajectory token by token: its text, and everything that the record has of each token, as columns of one length.

A value that is not recorded for a token is None. Turns of an episode that are sequences of their own (branches) follow
one another, each with a heading.
"""

from typing import Any

import numpy as np

from headway.monitor.viewer.texts import Texts
from headway.types import Sequence, Trajectory

COLUMNS = ("text", "id", "sampled", "trained", "version", "behaviour", "turns", "reward")


def token_columns(trajectory: Trajectory, texts: Texts) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    rewards = {(reward.sequence, reward.position): reward.value for reward in trajectory.rewards}
    for number, sequence in enumerate(trajectory.sequences):
        _add(columns, number, sequence, texts, several=len(trajectory.sequences) > 1)
        columns["reward"] += [rewards.get((number, place)) for place in range(len(sequence.tokens))]
    return {**columns, "mask": _mask(columns)}


def _add(columns: dict[str, list[Any]], number: int, sequence: Sequence, texts: Texts, several: bool) -> None:
    sampled = sequence.versions >= 0
    columns["text"] += texts.pieces(sequence.tokens.tolist())
    columns["id"] += sequence.tokens.tolist()
    columns["sampled"] += sampled.tolist()
    columns["trained"] += (sequence.loss_mask != 0).tolist()
    columns["version"] += [version if version >= 0 else None for version in sequence.versions.tolist()]
    columns["behaviour"] += [
        float(logprob) if known else None for logprob, known in zip(sequence.logprobs, sampled, strict=True)
    ]
    columns["turns"] += _headings(number, sampled, several)


def _headings(number: int, sampled: Any, several: bool) -> list[str]:
    """A heading before each part of a sequence: text that was given, and what the policy wrote."""
    headings = [""] * len(sampled)
    starts = [0, *(np.flatnonzero(np.diff(sampled.astype(np.int8))) + 1).tolist()]
    for start in starts:
        if start < len(sampled):
            branch = f"sequence {number}: " if several else ""
            headings[start] = branch + ("the policy" if sampled[start] else "prompt" if start == 0 else "given")
    return headings


def _mask(columns: dict[str, list[Any]]) -> list[str]:
    """Why a sampled token was not trained; empty where it was."""
    pairs = zip(columns["sampled"], columns["trained"], strict=True)
    return ["left out by the loss mask" if sampled and not trained else "" for sampled, trained in pairs]
