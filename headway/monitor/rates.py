"""Recent rates of a run: the last seconds for engines, the last training steps for the trainer."""

from dataclasses import dataclass

from headway.record.events import Stats
from headway.record.run import Run
from headway.record.steps import Step

RECENT_S = 15.0
RECENT_STEPS = 10


@dataclass(frozen=True)
class Rates:
    """Shares are of recent time, of all engines together where they concern engines."""

    generated_per_s: float = 0.0
    trained_per_s: float = 0.0
    engine_busy: float = 0.0
    trainer_busy: float = 0.0
    trainer_wait: float = 0.0
    admission_wait: float = 0.0


def rates(run: Run) -> Rates:
    stats, steps = _recent_stats(run), _recent_steps(run)
    by_engine: dict[str, list[Stats]] = {}
    for event in stats:
        by_engine.setdefault(event.engine, []).append(event)
    seconds = sum(event.seconds for event in stats)
    longest = max((sum(event.seconds for event in own) for own in by_engine.values()), default=0.0)
    return Rates(
        generated_per_s=sum(
            sum(event.generated for event in own) / max(1e-9, sum(event.seconds for event in own))
            for own in by_engine.values()
        ),
        trained_per_s=_over_steps(steps, [step.event.tokens for step in steps]),
        engine_busy=_share(sum(event.busy_s for event in stats), seconds),
        trainer_busy=_over_steps(steps, [step.event.seconds for step in steps]),
        trainer_wait=_share(sum(event.trainer_wait_s for event in stats), longest),
        admission_wait=_share(sum(event.admission_wait_s for event in stats), longest),
    )


def left_s(run: Run, now: float) -> float | None:
    """Seconds to the last step at the recent pace; None before the first step of this incarnation."""
    steps = _recent_steps(run)
    if not steps or not run.num_steps:
        return None
    last = steps[-1].event
    pace = (last.time - steps[0].event.time) / max(len(steps) - 1, 1) or last.seconds + last.wait_s
    return max(0.0, (run.num_steps - run.num_trained) * pace - max(0.0, now - last.time))


def _recent_stats(run: Run) -> list[Stats]:
    """Of the engines that serve; of each at least the latest, however far apart they come."""
    serving = dict(run.engines)
    newest = max((event.time for event in serving.values()), default=0.0)
    found: list[Stats] = []
    seen: set[str] = set()
    for event in reversed(run.all(Stats)):
        if event.time < _began(run) or (event.time < newest - RECENT_S and seen >= serving.keys()):
            break
        if event.engine in serving and (event.time >= newest - RECENT_S or event.engine not in seen):
            found.append(event)
            seen.add(event.engine)
    return found


def _recent_steps(run: Run) -> list[Step]:
    return [step for step in run.steps[-RECENT_STEPS - 1 :] if step.event.time >= _began(run)]


def _began(run: Run) -> float:
    return run.clock.incarnations[-1].start if run.clock.incarnations else 0.0


def _over_steps(steps: list[Step], amounts: list[float]) -> float:
    """The sum of an amount of each step, per second of the time that the steps span."""
    if len(steps) == 1:
        return amounts[0] / max(1e-9, steps[0].event.seconds + steps[0].event.wait_s)
    if len(steps) < 2:
        return 0.0
    return sum(amounts[1:]) / max(1e-9, steps[-1].event.time - steps[0].event.time)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
