"""Turns the counters of engine processes, which restart with each process, into differences for the log."""

import time

from headway.record.events import Stats
from headway.types import EngineStats

_ZERO = EngineStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0)


class StatsMeter:
    """One for each incarnation of the run. Counters that it has not seen before count from zero."""

    def __init__(self) -> None:
        self._began = time.time()
        self._last: dict[str, tuple[float, EngineStats]] = {}
        self._admission_wait_s = self._trainer_wait_s = 0.0

    def begin(self, engine: str) -> None:
        """A new incarnation of an engine serves: its counters start from zero."""
        self._last[engine] = time.time(), _ZERO

    def measure(
        self,
        engine: str,
        stats: EngineStats,
        *,
        inflight: int,
        ready: int,
        admission_wait_s: float,
        trainer_wait_s: float,
    ) -> Stats:
        """The event for what an engine's counters, and the run's two total waits, say now."""
        now = time.time()
        since, before = self._last.get(engine, (self._began, _ZERO))
        self._last[engine] = now, stats
        event = Stats(
            engine=engine,
            version=stats.version,
            seconds=max(0.0, now - since),
            generated=stats.num_generated - before.num_generated,
            prefilled=stats.num_prefilled - before.num_prefilled,
            recomputed=stats.num_recomputed - before.num_recomputed,
            preempted=stats.num_preempted - before.num_preempted,
            busy_s=stats.busy_s - before.busy_s,
            running=stats.running,
            waiting=stats.waiting,
            kv_used=stats.kv_used,
            kv_total=stats.kv_total,
            inflight=inflight,
            ready=ready,
            admission_wait_s=admission_wait_s - self._admission_wait_s,
            trainer_wait_s=trainer_wait_s - self._trainer_wait_s,
        )
        self._admission_wait_s, self._trainer_wait_s = admission_wait_s, trainer_wait_s
        return event
