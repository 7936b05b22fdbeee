"""Turns the counters of engine processes, which restart with each process, into differences for the log."""

import time

from headway.record.events import Stats
from headway.types import EngineStats

_ZERO = EngineStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0)


class StatsMeter:
    """One for each incarnation of the run. Counters that it has not seen before count from zero."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last: dict[str, tuple[float, EngineStats]] = {}
        self._waits_s = 0.0, 0.0

    def begin(self, engine: str) -> None:
        """A new incarnation of an engine serves: its counters start from zero."""
        self._last[engine] = time.monotonic(), _ZERO

    def measure(
        self,
        engine: str,
        stats: EngineStats,
        queues: tuple[int, int],
        waits_s: tuple[float, float],
    ) -> Stats:
        """The event for what an engine's counters say now.

        `queues` are the groups in flight and ready; `waits_s` the total waits so far for admission and of the trainer.
        """
        now = time.monotonic()
        since, before = self._last.get(engine, (self._began, _ZERO))
        self._last[engine] = now, stats
        event = Stats(
            engine=engine,
            version=stats.version,
            seconds=now - since,
            generated=stats.num_generated - before.num_generated,
            prefilled=stats.num_prefilled - before.num_prefilled,
            recomputed=stats.num_recomputed - before.num_recomputed,
            preempted=stats.num_preempted - before.num_preempted,
            busy_s=stats.busy_s - before.busy_s,
            running=stats.running,
            waiting=stats.waiting,
            kv_used=stats.kv_used,
            kv_total=stats.kv_total,
            inflight=queues[0],
            ready=queues[1],
            admission_wait_s=waits_s[0] - self._waits_s[0],
            trainer_wait_s=waits_s[1] - self._waits_s[1],
        )
        self._waits_s = waits_s
        return event
