"""Per-token values of a training step, as the loss used them; for the record and the viewer."""

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headway.codec import message

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

TOKEN_FATES = ("trained", "clipped", "capped", "masked_token", "masked_sequence", "masked_moment", "masked_negative")
"""What the loss did with a token: full gradient, clipped by the surrogate, weight capped, or masked, by which mask."""


@message
class TrainedTokens:
    """Per-token values of one training step, concatenated sample by sample."""

    sources: Ints  # three numbers a sample: its group, trajectory and sequence
    counts: Ints  # trained tokens of each sample
    proximal: Floats
    current: Floats  # when the token's loss was computed; empty where all equal the proximal ones
    weights: Floats  # π_prox/π_behav as it was applied
    advantages: Floats
    fates: Ints  # places in TOKEN_FATES; empty where all are trained

    @classmethod
    def join(cls, parts: "Iterable[TrainedTokens]") -> "TrainedTokens":
        """Concatenate the tokens of several ranks."""
        whole = [dataclasses.replace(part, current=part.current_or_proximal, fates=part.all_fates) for part in parts]
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in whole]) for name in names}).compact()

    def compact(self) -> "TrainedTokens":
        """Empty the arrays that hold only their default."""
        current = self.current[:0] if np.array_equal(self.current, self.proximal) else self.current
        return dataclasses.replace(self, current=current, fates=self.fates if self.fates.any() else self.fates[:0])

    @property
    def current_or_proximal(self) -> Floats:
        return self.current if len(self.current) else self.proximal

    @property
    def all_fates(self) -> Ints:
        return self.fates if len(self.fates) else np.zeros(len(self.proximal), np.int32)

    def place(self, group: int, trajectory: int, sequence: int) -> slice | None:
        """The slice of one sequence's tokens in the arrays; None if it was not trained."""
        found = np.flatnonzero((self.sources.reshape(-1, 3) == (group, trajectory, sequence)).all(axis=1))
        if not len(found):
            return None
        start = int(self.counts[: found[0]].sum())
        return slice(start, start + int(self.counts[found[0]]))
