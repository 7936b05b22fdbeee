"""The report of a run, made from its event log alone: summary.json, a table, and one picture with curves and timeline.

It works on any log with at least one event: of a finished run, a live one, one that was killed, one that was resumed.
Time in which no process of the run lived counts nowhere.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table
from rich.text import Text

from headway.errors import HeadwayError
from headway.monitor.audit import audit, corrections
from headway.monitor.plot import draw
from headway.monitor.scaling import Split, estimate
from headway.monitor.text import clean, duration, figure, share
from headway.record.events import (
    Checkpointed,
    EtaChanged,
    Evaluated,
    ResumeStarted,
    Retried,
    Stats,
    Swapped,
    TokenCounts,
    WorkerLost,
    WorkerRestarted,
)
from headway.record.log import EVENTS_NAME, writing
from headway.record.run import Run
from headway.record.timings import slow_steps, startup

SUMMARY_FILE = "summary.json"
PICTURE_FILE = "report.png"


@dataclass(frozen=True)
class Lengths:
    """Sampled tokens per trajectory, trained or not: long completions that starve would show here."""

    sampled_mean: float | None = None
    sampled_p95: float | None = None
    trained_mean: float | None = None
    trained_p95: float | None = None
    untrained_mean: float | None = None
    num_untrained: int = 0


@dataclass(frozen=True)
class Summary:
    """The result of a run. Seconds are of training alone in `wall_s`, of all its incarnations in `total_s`."""

    run_dir: str
    status: str
    cause: str
    config_hash: str
    steps: int
    resumed: int
    wall_s: float
    total_s: float
    eval_before: float | None
    eval_after: float | None
    eval_latest: float | None
    eval_versions: dict[str, tuple[int, int]]  # before, latest, after: the first and last version that sampled it
    eval_num: int
    eval_num_failed: int  # problems without a verdict, which the accuracy leaves out
    reward_first: float | None
    reward_last: float | None
    tokens_generated: int
    tokens_trained: int
    goodput: float | None
    recomputed_tokens: int
    lost_tokens: int
    staleness_mean: float | None
    staleness_max: int | None
    staleness_bound: int | None
    eta: tuple[int, ...]  # the bound η, at first and after each change
    parity_max_abs: float | None
    sampled_gap_max_abs: float | None
    pause_ms_mean: float | None
    pause_ms_max: float | None
    num_dropped: int
    dropped: dict[str, int]
    failures: dict[str, int]  # trajectories without a reward, by cause
    truncated_share: float | None
    zero_variance_share: float | None  # of trained groups: all rewards equal
    stops: dict[str, int]  # trained trajectories by why their last completion stopped
    startup: dict[str, float]  # seconds of each phase of the latest process until its first training step
    slow_steps: tuple[str, ...]
    checkpoint_stall_s: tuple[float, float]  # for which training waited: the mean and the longest
    warnings: dict[str, str]  # by kind: that a run learns little, and the remedy
    losses: dict[str, int]
    restarts: int
    retried_requests: int
    retried_tokens: int
    trainer_busy_share: float | None
    engine_busy_share: float | None
    trainer_wait_s: float
    admission_wait_s: float
    split: Split | None
    lengths: Lengths
    audit: tuple[str, ...]  # trained against sampled data
    tokens: TokenCounts  # by fate
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        extra = values.pop("extra")
        return {**values, "tokens": msgspec.to_builtins(self.tokens), "wall_s_sync": None, **extra}


def summarise(run: Run, extra: dict[str, Any] | None = None) -> Summary:
    trained = [step.event for step in run.steps]
    wall_s = sum(end - start for start, end in run.clock.training())
    evaluated, stats = run.all(Evaluated), run.all(Stats)
    before = [event for event in evaluated if event.label == "before"]
    after = [event for event in evaluated if event.label == "after" and event.version >= run.num_trained]
    dropped, stops = Counter(run.dropped.values()), sum((step.stops for step in run.steps), Counter[Any]())
    num_trajectories = sum(step.num_trajectories for step in run.steps)
    tokens = run.tokens.counts()
    pauses = [event.pause_ms for event in run.all(Swapped)]
    stalls = [event.stall_s for event in run.all(Checkpointed)]
    engine_busy_share = _engine_busy_share(run)
    trainer_wait_s = sum(event.wait_s for event in trained)
    tenth = math.ceil(len(trained) / 10)
    rewards = [event.reward for event in trained if event.reward is not None]
    gaps = [gap for event in trained if (gap := event.metrics.get("logprob_gap_max")) is not None]
    retried = run.all(Retried)
    return Summary(
        run_dir=run.directory,
        status=run.status or "unfinished",
        cause=run.cause,
        config_hash=run.config_hash,
        steps=len(trained),
        resumed=len(run.all(ResumeStarted)),
        wall_s=wall_s,
        total_s=run.clock.total_s,
        eval_before=before[0].accuracy if before else None,
        eval_after=after[-1].accuracy if after else None,
        eval_latest=evaluated[-1].accuracy if evaluated else None,
        eval_versions={
            name: (events[place].version, events[place].version_last)
            for name, place, events in (("before", 0, before), ("latest", -1, evaluated), ("after", -1, after))
            if events
        },
        eval_num=evaluated[-1].num if evaluated else 0,
        eval_num_failed=evaluated[-1].num_failed if evaluated else 0,
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        tokens_generated=tokens.generated,
        tokens_trained=tokens.trained,
        goodput=tokens.trained / tokens.generated if tokens.generated else None,
        recomputed_tokens=tokens.recomputed,
        lost_tokens=tokens.lost,
        staleness_mean=_mean([event.staleness_mean for event in trained]),
        staleness_max=max((event.staleness_max for event in trained), default=None),
        staleness_bound=run.worst_staleness,
        eta=(*(event.before for event in run.all(EtaChanged)), run.eta),
        parity_max_abs=max((gap for e in run.all(Swapped) if (gap := e.parity_max_abs) is not None), default=None),
        sampled_gap_max_abs=max(gaps, default=None),
        pause_ms_mean=_mean(pauses),
        pause_ms_max=max(pauses, default=None),
        num_dropped=dropped.total(),
        dropped=dict(dropped),
        failures=dict(run.failures.most_common()),
        truncated_share=_ratio(sum(step.num_truncated for step in run.steps), num_trajectories),
        zero_variance_share=_ratio(
            sum(step.num_zero_variance for step in run.steps), sum(step.num_groups for step in run.steps)
        ),
        stops={stop.value: num for stop, num in stops.most_common() if stop},
        startup=startup(run),
        slow_steps=tuple(map(str, slow_steps(run))),
        checkpoint_stall_s=(_mean(stalls) or 0.0, max(stalls, default=0.0)),
        warnings={kind: f"since step {found.since}: {found.message}" for kind, found in run.past_warnings.items()},
        losses=dict(Counter(event.worker for event in run.all(WorkerLost))),
        restarts=len(run.all(WorkerRestarted)),
        retried_requests=sum(event.requests for event in retried),
        retried_tokens=sum(event.tokens for event in retried),
        trainer_busy_share=sum(event.seconds for event in trained) / wall_s if wall_s else None,
        engine_busy_share=engine_busy_share,
        trainer_wait_s=trainer_wait_s,
        admission_wait_s=sum(event.admission_wait_s for event in stats),
        split=_split(run, trainer_wait_s / wall_s if wall_s else None, engine_busy_share),
        lengths=_lengths(run),
        audit=tuple(str(each) for each in (*audit(run), *corrections(run))),
        tokens=tokens,
        extra=extra or {},
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if len(values) else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _engine_busy_share(run: Run) -> float | None:
    spans = run.clock.training()
    during = [
        event
        for event in run.all(Stats)
        if any(start <= event.time - event.seconds and event.time <= end for start, end in spans)
    ]
    seconds = sum(event.seconds for event in during)
    return sum(event.busy_s for event in during) / seconds if seconds else None


def _split(run: Run, trainer_waited: float | None, engine_busy: float | None) -> Split | None:
    """Over the engines that serve at the end."""
    if not run.engines or trainer_waited is None or engine_busy is None:
        return None
    return estimate(len(run.engines), trainer_waited, engine_busy)


def _lengths(run: Run) -> Lengths:
    is_trained = [group.is_trained(run.num_trained) for group in run.groups]
    trained = [n for group, yes in zip(run.groups, is_trained, strict=True) if yes for n in group.lengths]
    untrained = [n for group, yes in zip(run.groups, is_trained, strict=True) if not yes for n in group.lengths]
    sampled = trained + untrained
    return Lengths(
        sampled_mean=_mean(sampled),
        sampled_p95=_percentile(sampled, 95),
        trained_mean=_mean(trained),
        trained_p95=_percentile(trained, 95),
        untrained_mean=_mean(untrained),
        num_untrained=len(untrained),
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def write_report(run_dir: str | Path, extra: dict[str, Any] | None = None) -> Summary:
    """Make summary.json and report.png of a run from its log; `extra` adds keys to the summary."""
    run_dir = Path(run_dir)
    run = Run.read(run_dir)
    if not run.began:
        raise HeadwayError(f"{run_dir / EVENTS_NAME} holds no events yet; there is nothing to report on")
    summary = write_summary(run_dir, run, extra)
    draw(run, _headline(summary), summary.staleness_bound, run_dir / PICTURE_FILE)
    return summary


def write_summary(run_dir: Path, run: Run, extra: dict[str, Any] | None = None) -> Summary:
    """Write summary.json. Keys that an earlier summary of the same run was given as `extra` stay."""
    summary = summarise(run)
    summary = replace(summary, extra={**_earlier_extra(run_dir / SUMMARY_FILE, summary), **(extra or {})})
    unfinished = run_dir / f"{SUMMARY_FILE}.new"
    with writing(run_dir / SUMMARY_FILE):
        unfinished.write_text(json.dumps(summary.to_json(), indent=2) + "\n")
        os.replace(unfinished, run_dir / SUMMARY_FILE)
    return summary


def _headline(summary: Summary) -> str:
    first = f"{clean(summary.run_dir, 60) or 'run'}: {summary.steps:,} steps in {duration(summary.wall_s)}"
    parts = [first, clean(summary.status, 20)]
    if summary.eval_before is not None and summary.eval_latest is not None:
        parts.append(f"held-out {summary.eval_before:.1%} → {summary.eval_latest:.1%}")
    if summary.goodput is not None:
        parts.append(f"{summary.goodput:.0%} of generated tokens trained")
    return "  ·  ".join(parts)


def _earlier_extra(path: Path, summary: Summary) -> dict[str, Any]:
    earlier: Any = {}
    with suppress(OSError, ValueError):
        earlier = json.loads(path.read_bytes())
    if not isinstance(earlier, dict) or earlier.get("config_hash") != summary.config_hash:
        return {}
    computed = asdict(summary)
    return {name: value for name, value in earlier.items() if name not in computed}


def _latest(summary: Summary) -> str:
    """The accuracy after training, or the latest of a run that ended earlier."""
    if summary.eval_after is None and summary.eval_latest is not None and summary.eval_latest != summary.eval_before:
        return f"{share(summary.eval_latest)} at the last evaluation"
    return share(summary.eval_after)


def _versions(summary: Summary) -> str:
    """Which versions the two accuracies are of; an evaluation during training spans several."""
    ends = "before", "latest" if summary.eval_after is None else "after"
    spans = [summary.eval_versions[name] for name in ends if name in summary.eval_versions]
    shown = " → ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
    return f"version {shown}; " if shown else ""


def table(summary: Summary) -> Table:
    """The summary as a person reads it at the end of a run."""
    lengths = summary.lengths
    rows = {
        "status": summary.status + (f": {summary.cause}" if summary.cause else ""),
        "training steps": f"{summary.steps:,}" + (f", resumed {summary.resumed}×" if summary.resumed else ""),
        "training time": f"{duration(summary.wall_s)} of {duration(summary.total_s)} in all",
        "held-out accuracy": f"{share(summary.eval_before)} → {_latest(summary)} "
        f"({_versions(summary)}{_evaluated(summary)})",
        "reward, first and last tenth": f"{figure(summary.reward_first)} → {figure(summary.reward_last)}",
        "tokens generated": f"{summary.tokens_generated:,}",
        "tokens trained": f"{summary.tokens_trained:,} ({share(summary.goodput)} of those generated)",
        "staleness": f"mean {figure(summary.staleness_mean)}, max {figure(summary.staleness_max)}, "
        f"bound {'none' if summary.staleness_bound is None else summary.staleness_bound}, "
        f"η {' → '.join(map(str, summary.eta))}",
        "log-prob parity": f"largest difference {figure(summary.parity_max_abs)} on the probe, "
        f"{figure(summary.sampled_gap_max_abs)} on sampled tokens",
        "pause for new weights": f"mean {figure(summary.pause_ms_mean)} ms, max {figure(summary.pause_ms_max)} ms",
        "busy": f"engine {share(summary.engine_busy_share)}, trainer {share(summary.trainer_busy_share)}",
        "waited": f"trainer for groups {summary.trainer_wait_s:,.1f} s, "
        f"generation for admission {summary.admission_wait_s:,.1f} s",
        "split": str(summary.split) if summary.split else "–",
        "mean completion length": f"sampled {figure(lengths.sampled_mean)}, trained {figure(lengths.trained_mean)}, "
        f"untrained {figure(lengths.untrained_mean)}",
        "trained against sampled": "; ".join(summary.audit) or "–",
        "truncated": f"{share(summary.truncated_share)} of trained trajectories; stopped by "
        + (", ".join(f"{stop} {num:,}" for stop, num in summary.stops.items()) or "–"),
        "zero variance": f"{share(summary.zero_variance_share)} of trained groups (equal rewards, no gradient)",
        "failed trajectories": ", ".join(f"{num:,} {cause}" for cause, num in summary.failures.items()) or "none",
        "groups dropped": ", ".join(f"{num:,} {reason}" for reason, num in summary.dropped.items()) or "none",
        "workers lost": _losses(summary),
        "start-up": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in summary.startup.items()) or "–",
        "slow steps": "; ".join(summary.slow_steps) or "none",
        "checkpoint stall": f"mean {figure(summary.checkpoint_stall_s[0])} s, "
        f"longest {figure(summary.checkpoint_stall_s[1])} s",
        "tokens by fate": ", ".join(f"{num:,} {fate}" for fate, num in _fates(summary.tokens)),
        **{f"warning: {kind}": message for kind, message in summary.warnings.items()},
        **{name: str(value) for name, value in summary.extra.items() if value is not None},
    }
    made = Table(title=Text(f"headway · {clean(summary.run_dir, 60)}"), title_justify="left", show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows.items():
        made.add_row(Text(clean(name, 60)), Text(clean(value)))
    return made


def _evaluated(summary: Summary) -> str:
    failed = f", {summary.eval_num_failed} more without a verdict" if summary.eval_num_failed else ""
    return f"{summary.eval_num} problems{failed}"


def _losses(summary: Summary) -> str:
    if not summary.losses:
        return "none"
    each = ", ".join(f"{clean(worker, 40)} {num}×" for worker, num in summary.losses.items())
    brought = f"{summary.retried_requests:,} requests retried on other engines with {summary.retried_tokens:,} tokens"
    return f"{each}; restarted {summary.restarts}×; {brought}"


def _fates(fates: TokenCounts) -> list[tuple[str, int]]:
    dropped = [(f"dropped ({reason})", num) for reason, num in fates.dropped.items()]
    kept = [
        (name.replace("_", " "), getattr(fates, name))
        for name in ("trained", "waiting", "in_flight", "lost", "recomputed")
    ]
    return [(name, num) for name, num in kept + dropped if num]
