"""Adaptive staleness: moves η between two bounds by what stale data does to the training steps.

After each training step it gets the effective sample size of the importance weights and the mismatch KL (the
divergence of behaviour and proximal policy), and under which η each group of the batch was admitted. A step counts only
if all its groups were admitted under the η in force: what was decided has to arrive before it is judged. The means of
four such steps decide:

    effective sample size below `min_ess`, or KL above `max_kl`     η is halved
    neither, and both within half of what is allowed                η rises by half, at least by one
    between the two                                                 η stays (hysteresis)

It begins at the upper bound. All it knows is in the event log, so a resumed run decides as the one that was lost.
"""

from collections.abc import Iterable, Mapping
from statistics import fmean

from headway.config import StalenessSection
from headway.record.events import EtaChanged

_NUM_STEPS = 4


class AdaptiveStaleness:
    """`eta` is the staleness bound in force; with equal bounds it never changes."""

    def __init__(self, section: StalenessSection) -> None:
        self._section = section
        self.eta = section.max_staleness
        self._recent: list[tuple[float, float]] = []

    def observe(self, version: int, metrics: Mapping[str, float | None], etas: Iterable[int]) -> EtaChanged | None:
        """Take in the training step that led to `version`; returns the decision, if it was time for one."""
        size, kl = metrics.get("effective_sample_size"), metrics.get("behaviour_kl")
        if self._section.lowest == self._section.max_staleness or not size or kl is None or set(etas) != {self.eta}:
            return None
        self._recent.append((size, kl))
        if len(self._recent) < _NUM_STEPS:
            return None
        size, kl = (fmean(figures) for figures in zip(*self._recent, strict=True))
        before, self.eta, self._recent = self.eta, self._decide(size, kl), []
        if self.eta == before:
            return None
        return EtaChanged(version=version, before=before, after=self.eta, effective_sample_size=size, behaviour_kl=kl)

    def _decide(self, size: float, kl: float) -> int:
        section, eta = self._section, self.eta
        if size < section.min_ess or kl > section.max_kl:
            return max(section.lowest, eta // 2)
        if 1 - size <= (1 - section.min_ess) / 2 and kl <= section.max_kl / 2:
            return min(section.max_staleness, eta + max(1, eta // 2))
        return eta
