"""Decisions from engine health samples: how many sequences an engine should hold, and whether it is far too slow."""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from headway.types import EngineStats

KV_FULL = 0.97
"""The share of key/value memory in use above which an engine is under memory pressure."""
FAR_SLOWER = 0.25
"""The share of the others' decode rate below which an engine counts as slow."""
RATE_WINDOW_S = 60.0


def next_limit(limit: int, most: int, before: EngineStats, now: EngineStats) -> int:
    """How many sequences an engine of `most` places should hold, given two samples of it; 0 is no limit.

    When it preempted or its memory is nearly full, a tenth fewer than run now; else a sixteenth more than before, until
    all places may be taken again.
    """
    if now.num_preempted > before.num_preempted or now.kv_used > KV_FULL * now.kv_total:
        fewer = max(1, now.running * 9 // 10)
        return min(limit, fewer) if limit else fewer
    if not limit:
        return 0
    more = limit + max(1, most // 16)
    return 0 if more >= most else more


class DecodeRate:
    """Tokens per second and running sequence of one engine, over the last minute of its samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()  # when, tokens so far, sequences running

    def sample(self, now: float, stats: EngineStats) -> None:
        self._samples.append((now, stats.num_generated, stats.running))
        while len(self._samples) > 2 and self._samples[1][0] <= now - RATE_WINDOW_S:
            self._samples.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """None before it was sampled for a whole window, and while it hardly runs anything."""
        if not self._samples or self._samples[-1][0] - self._samples[0][0] < RATE_WINDOW_S:
            return None
        num_tokens = self._samples[-1][1] - self._samples[0][1]
        # Between two samples it ran, on average, what the samples show; while it ran nothing, it had no rate.
        running_s = sum(one[2] * (other[0] - one[0]) for one, other in pairwise(self._samples))
        return num_tokens / running_s if running_s > RATE_WINDOW_S / 10 else None


def far_slower(rates: Mapping[str, float]) -> dict[str, float]:
    """The engines far slower than the others, each with the others' median rate."""
    slow = {}
    for name, rate in rates.items():
        others = [other for key, other in rates.items() if key != name]
        if others and rate < FAR_SLOWER * median(others):
            slow[name] = median(others)
    return slow
