"""What looks at engines tell: how many sequences one should hold, and whether it is far slower than the others."""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from headway.types import EngineStats

KV_FULL = 0.97
"""The share of key/value memory in use from which on an engine counts as pressed."""
FAR_SLOWER = 0.25
"""The share of the others' pace below which an engine counts as slow."""
PACE_WINDOW_S = 60.0


def next_limit(limit: int, most: int, before: EngineStats, now: EngineStats) -> int:
    """How many sequences an engine of `most` places should hold, after what two looks at it show; 0 is no limit.

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


class Pace:
    """Tokens per second and running sequence of one engine, over the last minute of its looks."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, int]] = deque()  # when, tokens so far, sequences running

    def look(self, now: float, stats: EngineStats) -> None:
        self._looks.append((now, stats.num_generated, stats.running))
        while len(self._looks) > 2 and self._looks[1][0] <= now - PACE_WINDOW_S:
            self._looks.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """None until it was looked at for the whole of the window, and while it hardly runs anything."""
        if not self._looks or self._looks[-1][0] - self._looks[0][0] < PACE_WINDOW_S:
            return None
        num_tokens = self._looks[-1][1] - self._looks[0][1]
        # Between two looks it ran, on average, what the looks saw; while it ran nothing, it had no pace.
        running_s = sum(one[2] * (other[0] - one[0]) for one, other in pairwise(self._looks))
        return num_tokens / running_s if running_s > PACE_WINDOW_S / 10 else None


def far_slower(paces: Mapping[str, float]) -> dict[str, float]:
    """The engines that stay far behind, each with the others' middle pace."""
    slow = {}
    for name, pace in paces.items():
        others = [other for key, other in paces.items() if key != name]
        if others and pace < FAR_SLOWER * median(others):
            slow[name] = median(others)
    return slow
