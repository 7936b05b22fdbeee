"""Durations of start-up phases, and training steps that took far longer than those before them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from headway.record.events import (
    Checkpointed,
    CheckpointFailed,
    EngineJoined,
    Evaluated,
    Event,
    Phase,
    ResumeStarted,
    RunStarted,
    Swapped,
    Trained,
    WorkerLost,
)
from headway.record.run import Run

SLOW = 3.0
"""Times the median of the steps before it."""
_WINDOW, _MIN_STEPS, _MIN_S = 50, 5, 1.0


@dataclass(frozen=True)
class SlowStep:
    """A training step from the end of the one before it to its own end.

    step 86 took 7.0 s, median 1.3 s: a checkpoint's snapshot (5.2 s)
    """

    version: int
    seconds: float
    median_s: float
    causes: tuple[str, ...]  # empty: the log does not say

    def __str__(self) -> str:
        causes = ", ".join(self.causes) or "cause unknown"
        return f"step {self.version} took {self.seconds:.1f} s, median {self.median_s:.1f} s: {causes}"


def startup(run: Run) -> dict[str, float]:
    """Seconds of each phase of the latest process until its first new training step; those of workers overlap."""
    events: list[RunStarted | ResumeStarted] = [*run.all(RunStarted), *run.all(ResumeStarted)]
    if not events:
        return {}
    begun = events[-1]
    first = next((step.event for step in run.steps if step.event.seq > begun.seq), None)
    until = first.seq if first else float("inf")
    found = {"imports, model and prompts": begun.startup_s}
    for phase in run.all(Phase):
        if begun.seq < phase.seq < until:
            found[phase.name] = phase.seconds
    if first is not None:
        swaps = [each for each in run.all(Swapped) if begun.seq < each.seq < first.seq]
        found["first weights to engines"] = max((each.stage_s for each in swaps), default=0.0)
        found["waiting for the first batch"] = first.wait_s
        found["first training step"] = first.seconds
        found["in all"] = begun.startup_s + first.time - begun.time
    return found


def slow_steps(run: Run, since: int = 0) -> Iterator[SlowStep]:
    """The slow ones among the steps after version `since`, in order. The first of a process is start-up, not a step."""
    begun = [incarnation.start for incarnation in run.clock.incarnations[1:]]
    first = max(0, since - _WINDOW - 1)
    steps = [step.event for step in run.steps[first:]]
    known: list[float] = []
    for before, step in pairwise(steps):
        if any(before.time < start <= step.time for start in begun):
            continue
        seconds, usual = step.time - before.time, median(known[-_WINDOW:]) if known else 0.0
        if step.version > since and len(known) >= _MIN_STEPS and seconds > max(_MIN_S, SLOW * usual):
            yield SlowStep(step.version, seconds, usual, tuple(_causes(run, before, step, usual)))
        known.append(seconds)


def _causes(run: Run, before: Trained, step: Trained, usual: float) -> Iterator[str]:
    def during(event: Event, seconds: float = 0.0) -> bool:
        return event.time > before.time and event.time - seconds < step.time

    if step.wait_s > usual:
        yield f"waited {step.wait_s:.1f} s for finished groups"
    stalls = [each for each in run.all(Checkpointed) if each.version == before.version and each.stall_s > usual / 2]
    yield from (f"a checkpoint's snapshot ({each.stall_s:.1f} s)" for each in stalls)
    yield from (f"a checkpoint failed ({each.version})" for each in run.all(CheckpointFailed) if during(each))
    yield from (f"{each.worker} was lost" for each in run.all(WorkerLost) if during(each))
    yield from (f"{each.engine} joined" for each in run.all(EngineJoined) if during(each))
    yield from ("an evaluation" for each in run.all(Evaluated) if each.label == "step" and during(each, each.seconds))
    swaps = [each for each in run.all(Swapped) if during(each) and each.stage_s + each.pause_ms / 1e3 > usual]
    yield from (f"{each.engine} took {each.stage_s:.1f} s to receive weights" for each in swaps)
    budget, last_budget = (each.metrics.get("token_budget") for each in (step, before))
    if budget is not None and last_budget is not None and budget < last_budget:
        yield "memory ran out, and micro-batches became smaller"
    elif step.seconds > SLOW * max(before.seconds, usual / SLOW):
        yield f"training itself took {step.seconds:.1f} s"
