"""What one engine more or fewer would bring: an estimate from what trainer and engines waited for.

Shares are of the run's time. While the trainer waits for groups, generation alone decides the pace; the rest of what
the engines do overlaps training. With n engines become m, all of it takes n/m as long. The estimate takes work to
spread evenly and engines not to take anything from each other or from the trainer, which on one machine they may.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The shares that were seen, and the estimates: how much faster with one engine more, slower with one fewer."""

    num_engines: int
    trainer_waited: float
    engines_idle: float
    one_more: float
    one_fewer: float | None  # None where there is only one

    def __str__(self) -> str:
        seen = f"trainer waited {self.trainer_waited:.0%}, {_engines(self.num_engines)} idle {self.engines_idle:.0%}"
        more = f"one engine more would bring about {self.one_more:.0%} more steps a second"
        fewer = "" if self.one_fewer is None else f", one fewer would cost about {self.one_fewer:.0%}"
        return f"{seen}: {more}{fewer} (estimates)"


def estimate(num_engines: int, trainer_waited: float, engine_busy: float) -> Split:
    """From the share of time that the trainer waited for groups, and the share that engines worked."""
    busy = min(1.0, max(0.0, engine_busy))
    waited = min(busy, max(0.0, trainer_waited))  # what it waited for beyond that was not generation
    saved = min(waited, busy / (num_engines + 1))
    return Split(
        num_engines=num_engines,
        trainer_waited=trainer_waited,
        engines_idle=1 - busy,
        one_more=1 / (1 - saved) - 1 if saved < 1 else 0.0,
        one_fewer=_cost_of_one_fewer(num_engines, waited, busy),
    )


def _cost_of_one_fewer(num_engines: int, waited: float, busy: float) -> float | None:
    if num_engines < 2:
        return None
    longer = num_engines / (num_engines - 1)
    # What the trainer waits for grows; what overlaps training may grow until it fills that time.
    added = waited * (longer - 1) + max(0.0, (busy - waited) * longer - (1 - waited))
    return 1 - 1 / (1 + added)


def _engines(num: int) -> str:
    return f"{num} engines" if num > 1 else "the engine"
