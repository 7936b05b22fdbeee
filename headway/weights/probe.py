"""Verifies by scores of a fixed probe that an engine runs the published weights.

An engine that repacks weights has no bytes to take checksums of; it scores the probe instead, and so does the trainer.
Under the same weights the two differ by arithmetic, two versions differ by training. Mean absolute differences are
compared, not the largest: one unlikely token in 16 bits may be off by half a nat.
"""

import numpy as np

from headway.errors import RunFailed, WeightMismatch
from headway.types import Floats, Scores

BOUND = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.05}
"""The largest mean |Δ log-prob| of engine and trainer under the same weights. Seen with vLLM 0.32 on a CPU: 1e-6 in
float32, 0.04 in bfloat16; other weights of the same shape differ by 1 and more."""
PARITY = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""The same for an engine whose arithmetic follows the trainer's: at least five times what was seen on solutions to
GSM8K's questions (5.8e-6, 0.028, 0.0035), and far below the error of a broken kernel."""
_TELLING_RATIO = 2.0
"""How many times the arithmetic's difference two versions' scores must differ by to be distinguished."""
_NEGLIGIBLE = 1e-4
"""Versions that differ by less than this part of the bound may score the same in an engine that rounds otherwise."""


def distance(one: tuple[Floats, ...], other: tuple[Floats, ...]) -> float:
    """The mean absolute difference of two scores of the same tokens, first tokens left out."""
    pairs = zip(one, other, strict=True)
    return float(np.mean(np.abs(np.concatenate([(a - b)[1:] for a, b in pairs]))))


def check_finite(reference: Scores, dtype: str) -> None:
    """Raise if the trainer's own scores of the probe are not finite."""
    if not all(np.isfinite(logprobs).all() for logprobs in reference.logprobs):
        cause = (
            "training diverged; lower trainer.lr" if reference.version else "its numbers overflow; use another model"
        )
        raise RunFailed(
            f"the model of version {reference.version} gives the probe NaN as log-prob in {dtype}: {cause}, or set "
            "another model.dtype"
        )


def check_parity(engine: str, scores: Scores, reference: Scores, dtype: str) -> None:
    """Raise unless the embedded engine scores the probe as the trainer does, within the bound of the type."""
    off, bound = distance(scores.logprobs, reference.logprobs), PARITY[dtype]
    if not off <= bound:
        raise WeightMismatch(
            f"{engine} scores other log-probs than the trainer under version {reference.version}: its probe is off by "
            f"{off:.3g} nats a token, and the bound is {bound:g} in {dtype}; use engine.kind = vllm"
        )


class ScoreProof:
    """Verifies one engine's loads by score, each against the one before."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._last: tuple[Scores, Scores] | None = None

    def check(self, engine: str, scores: Scores, reference: Scores) -> None:
        """Raise unless the engine's scores are those of the reference's weights, and not of the version before."""
        off, bound = distance(scores.logprobs, reference.logprobs), BOUND[self._dtype]
        what = f"{engine} does not run version {reference.version}"
        if not off <= bound:
            raise WeightMismatch(f"{what}: its probe is off by {off:.3g} nats a token, and {bound:g} is the bound")
        if self._last is not None and self._last[1].version != reference.version:
            self._check_change(what, scores, reference)
        self._last = scores, reference

    def _check_change(self, what: str, scores: Scores, reference: Scores) -> None:
        assert self._last is not None
        before, old = self._last
        moved = distance(reference.logprobs, old.logprobs)
        is_same = all(np.array_equal(a, b) for a, b in zip(scores.logprobs, before.logprobs, strict=True))
        if is_same and moved > _NEGLIGIBLE * BOUND[self._dtype]:
            raise WeightMismatch(f"{what}: it scores the probe exactly as under version {old.version}")
        nearer_to_old = distance(scores.logprobs, old.logprobs) < distance(scores.logprobs, reference.logprobs)
        if nearer_to_old and moved > _TELLING_RATIO * distance(before.logprobs, old.logprobs):
            raise WeightMismatch(f"{what}: its probe is that of version {old.version}")
