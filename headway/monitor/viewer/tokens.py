"""One trajectory token by token: its text, and everything that the record has of each token, as columns of one length.

Nothing is computed here: the engine recorded versions and behaviour log-probs, the trainer's loss the rest. A value
that the record does not hold for a token is None. Turns of an episode that are sequences of their own (branches) follow
one another, each with a heading.
"""

from typing import Any

import numpy as np

from headway.monitor.viewer.texts import Texts
from headway.trained_tokens import TOKEN_FATES, TrainedTokens
from headway.types import Sequence, Trajectory

RECORDED = ("proximal", "current", "weight", "advantage")
COLUMNS = ("text", "id", "sampled", "version", "behaviour", "turns", "reward", *RECORDED, "mask")

FATES = {
    "trained": "",
    "clipped": "the clip took its gradient",
    "capped": "importance weight over algorithm.behaviour_cap",
    "masked_token": "importance weight outside algorithm.mask_token_low…high",
    "masked_sequence": "its sequence's mean weight is outside algorithm.mask_sequence_low…high",
    "masked_moment": "over the second-moment budget, algorithm.mask_second_moment",
    "masked_negative": "negative advantage, and the policy has moved away already: algorithm.mask_negative_kl",
}


def token_columns(group: int, trajectory: Trajectory, texts: Texts, tokens: TrainedTokens | None) -> dict[str, Any]:
    """`tokens` are those of the training step that took the group; None: it was not trained, or not recorded."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    rewards = {(reward.sequence, reward.position): reward.value for reward in trajectory.rewards}
    for number, sequence in enumerate(trajectory.sequences):
        _add(columns, number, sequence, texts, several=len(trajectory.sequences) > 1)
        columns["reward"] += [rewards.get((number, place)) for place in range(len(sequence.tokens))]
        _add_trained(columns, sequence, tokens, (group, trajectory.index, number))
    return {**columns, "recorded": tokens is not None}


def _add(columns: dict[str, list[Any]], number: int, sequence: Sequence, texts: Texts, several: bool) -> None:
    sampled = sequence.versions >= 0
    columns["text"] += texts.pieces(sequence.tokens.tolist())
    columns["id"] += sequence.tokens.tolist()
    columns["sampled"] += sampled.tolist()
    columns["version"] += [version if version >= 0 else None for version in sequence.versions.tolist()]
    columns["behaviour"] += [
        float(logprob) if known else None for logprob, known in zip(sequence.logprobs, sampled, strict=True)
    ]
    columns["turns"] += _headings(number, sampled, sequence.roles, several)


def _add_trained(
    columns: dict[str, list[Any]], sequence: Sequence, tokens: TrainedTokens | None, source: tuple[int, int, int]
) -> None:
    """What the loss saw of each token, and why it was not trained where it was not; empty where it was."""
    length = len(sequence.tokens)
    found: dict[str, list[Any]] = {name: [None] * length for name in RECORDED}
    masks = ["not in the loss: loss mask 0" if version >= 0 else "" for version in sequence.versions.tolist()]
    place = tokens.place(*source) if tokens is not None else None
    where = np.flatnonzero(sequence.loss_mask).tolist()
    if tokens is None or place is None:
        reason = "not trained: its completion was cut off" if tokens is not None else ""
        for position in where:
            masks[position] = reason
    else:
        rows = tokens.proximal, tokens.current_or_proximal, tokens.weights, tokens.advantages
        for name, row in zip(RECORDED, rows, strict=True):
            for position, value in zip(where, row[place].tolist(), strict=True):
                found[name][position] = value
        for position, fate in zip(where, tokens.all_fates[place].tolist(), strict=True):
            masks[position] = FATES[TOKEN_FATES[fate]]
    for name in RECORDED:
        columns[name] += found[name]
    columns["mask"] += masks


def _headings(number: int, sampled: Any, roles: dict[int, str], several: bool) -> list[str]:
    """A heading before each part of a sequence: text that was given, and what the policy wrote."""
    headings = [""] * len(sampled)
    changes = (np.flatnonzero(np.diff(sampled.astype(np.int8))) + 1).tolist()
    starts = sorted({0, *changes, *roles})
    turn = 0
    for start in starts:
        if start < len(sampled):
            branch = f"sequence {number + 1}, " if several else ""
            turn += bool(sampled[start])
            many = len(starts) > 2
            name = f"policy, turn {turn}" if many else "policy"
            given = roles.get(start, "prompt" if start == 0 else "environment or tool")
            headings[start] = branch + (name if sampled[start] else given)
    return headings
