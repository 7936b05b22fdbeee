"""The report of a run, made from its event log alone: summary.json, a table, and one picture with curves and timeline.

It works on any log with at least one event: of a finished run, of one that still goes on, of one that was killed and
of one that was resumed. Time in which no process of the run lived counts nowhere.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table
from rich.text import Text

from headway.errors import HeadwayError
from headway.monitor.audit import audit
from headway.monitor.metrics import rebuild
from headway.monitor.plot import draw
from headway.monitor.scaling import Split, estimate
from headway.monitor.view import clean, duration
from headway.record.events import Event, TokenCounts
from headway.record.history import History
from headway.record.ledger import ledger
from headway.record.log import EVENTS_NAME, read
from headway.types import DropReason

SUMMARY_FILE = "summary.json"
PICTURE_FILE = "report.png"


@dataclass(frozen=True)
class Lengths:
    """Sampled tokens per trajectory, by what became of it: long completions that starve would show here."""

    sampled_mean: float | None = None
    sampled_p95: float | None = None
    trained_mean: float | None = None
    trained_p95: float | None = None
    untrained_mean: float | None = None
    num_untrained: int = 0


@dataclass(frozen=True)
class Summary:
    """What a run came to. Seconds are of training alone in `wall_s`, of the processes' whole lives in `total_s`."""

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
    eval_num: int
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
    parity_max_abs: float | None
    sampled_gap_max_abs: float | None
    pause_ms_mean: float | None
    pause_ms_max: float | None
    num_dropped: int
    dropped: dict[str, int]
    losses: dict[str, int]
    restarts: int
    continued_requests: int
    continued_tokens: int
    trainer_busy_share: float | None
    engine_busy_share: float | None
    trainer_wait_s: float
    admission_wait_s: float
    split: Split | None
    lengths: Lengths
    audit: tuple[str, ...]  # trained against sampled data
    ledger: TokenCounts
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        extra = values.pop("extra")
        return {**values, "ledger": msgspec.to_builtins(self.ledger), "wall_s_sync": None, **extra}


def summarise(events: Sequence[Event], extra: dict[str, Any] | None = None) -> Summary:
    history = History(events)
    head = history["run_started"][0].fields if history["run_started"] else {}
    ended = next((event for life in history.lives[-1:] for event in life if event.kind == "ended"), None)
    trained = history["trained"]
    wall_s = sum(end - begin for begin, end in history.training())
    evaluated = history["evaluated"]
    before = [event["accuracy"] for event in evaluated if event["label"] == "before"]
    after = [event["accuracy"] for event in evaluated if event["label"] == "after" and event["version"] >= len(trained)]
    dropped = Counter(_dropped(history).values())
    fates = ledger(events)
    pauses = _present(history["swapped"], "pause_ms")
    engine_busy_share = _engine_busy_share(history)
    trainer_wait_s = sum(_present(trained, "wait_s"))
    tenth = math.ceil(len(trained) / 10)
    rewards = _present(trained, "reward")
    return Summary(
        run_dir=str(head.get("config", {}).get("run", {}).get("dir", "")),
        status=str(ended["status"]) if ended else "unfinished",
        cause=str(ended["cause"]) if ended else "",
        config_hash=str(head.get("config_hash", "")),
        steps=len(trained),
        resumed=len(history["resumed"]),
        wall_s=wall_s,
        total_s=history.total_s,
        eval_before=before[0] if before else None,
        eval_after=after[-1] if after else None,
        eval_latest=evaluated[-1]["accuracy"] if evaluated else None,
        eval_num=evaluated[-1]["num"] if evaluated else 0,
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        tokens_generated=fates.generated,
        tokens_trained=fates.trained,
        goodput=fates.trained / fates.generated if fates.generated else None,
        recomputed_tokens=fates.recomputed,
        lost_tokens=fates.lost,
        staleness_mean=_mean(_present(trained, "staleness_mean")),
        staleness_max=max(map(int, _present(trained, "staleness_max")), default=None),
        staleness_bound=head.get("worst_staleness"),
        parity_max_abs=max(_present(history["swapped"], "parity_max_abs"), default=None),
        sampled_gap_max_abs=max(_sampled_gaps(history), default=None),
        pause_ms_mean=_mean(pauses),
        pause_ms_max=max(pauses, default=None),
        num_dropped=dropped.total(),
        dropped=dict(dropped),
        losses=dict(Counter(str(event["worker"]) for event in history["worker_lost"])),
        restarts=len(history["worker_restarted"]),
        continued_requests=sum(event["requests"] for event in history["continued"]),
        continued_tokens=sum(event["tokens"] for event in history["continued"]),
        trainer_busy_share=sum(_present(trained, "seconds")) / wall_s if wall_s else None,
        engine_busy_share=engine_busy_share,
        trainer_wait_s=trainer_wait_s,
        admission_wait_s=sum(_present(history["stats"], "admission_wait_s")),
        split=_split(history, trainer_wait_s / wall_s if wall_s else None, engine_busy_share),
        lengths=_lengths(history),
        audit=tuple(str(each) for each in audit(history)),
        ledger=fates.counts(),
        extra=extra or {},
    )


def _present(events: Iterable[Event], name: str) -> list[float]:
    """The values of a field where they are numbers; what was not finite is null in the log."""
    return [event[name] for event in events if event[name] is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if len(values) else None


def _sampled_gaps(history: History) -> list[float]:
    """What engine and trainer made of the same tokens under the same weights, step by step."""
    gaps = (event["metrics"].get("logprob_gap_max") for event in history["trained"])
    return [float(gap) for gap in gaps if gap is not None]


def _dropped(history: History) -> dict[int, str]:
    """Every group that left untrained, with its reason."""
    skipped = {group: DropReason.NON_FINITE.value for event in history["skipped"] for group in event["groups"]}
    return skipped | {group: str(event["reason"]) for event in history["dropped"] for group in event["groups"]}


def _engine_busy_share(history: History) -> float | None:
    spans = history.training()
    looks = [look for look in history.looks if any(begin <= look.start and look.end <= end for begin, end in spans)]
    seconds = sum(look.seconds for look in looks)
    return sum(look.busy_s for look in looks) / seconds if seconds else None


def _split(history: History, trainer_waited: float | None, engine_busy: float | None) -> Split | None:
    """Over the engines that the run's last life ended with."""
    num_engines = len(history.last_stats()[-1]) if history.lives else 0
    if not num_engines or trainer_waited is None or engine_busy is None:
        return None
    return estimate(num_engines, trainer_waited, engine_busy)


def _lengths(history: History) -> Lengths:
    sampled = {event["group"]: event["lengths"] for event in history["finished"]}
    trained = {group for event in history["trained"] for group in event["groups"]}
    kept = [length for group, lengths in sampled.items() if group in trained for length in lengths]
    left = [length for group, lengths in sampled.items() if group not in trained for length in lengths]
    everything = kept + left
    return Lengths(
        sampled_mean=_mean(everything),
        sampled_p95=_percentile(everything, 95),
        trained_mean=_mean(kept),
        trained_p95=_percentile(kept, 95),
        untrained_mean=_mean(left),
        num_untrained=len(left),
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def write_report(run_dir: str | Path, extra: dict[str, Any] | None = None) -> Summary:
    """Make summary.json, metrics.jsonl and report.png of a run from its log; `extra` adds keys to the summary."""
    run_dir = Path(run_dir)
    events = read(run_dir / EVENTS_NAME)
    if not events:
        raise HeadwayError(f"{run_dir / EVENTS_NAME} holds no events yet; there is nothing to report on")
    summary = write_summary(run_dir, events, extra)
    rebuild(events, run_dir)
    draw(History(events), _headline(summary), summary.staleness_bound, run_dir / PICTURE_FILE)
    return summary


def write_summary(run_dir: Path, events: Sequence[Event], extra: dict[str, Any] | None = None) -> Summary:
    """Write summary.json. Keys that an earlier summary of the same run was given as `extra` stay."""
    summary = summarise(events)
    summary = replace(summary, extra={**_earlier_extra(run_dir / SUMMARY_FILE, summary), **(extra or {})})
    unfinished = run_dir / f"{SUMMARY_FILE}.new"
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
    try:
        earlier = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(earlier, dict) or earlier.get("config_hash") != summary.config_hash:
        return {}
    computed = asdict(summary)
    return {name: value for name, value in earlier.items() if name not in computed}


def _latest(summary: Summary) -> str:
    """The accuracy after training, or what was last seen of it in a run that did not come so far."""
    if summary.eval_after is None and summary.eval_latest is not None and summary.eval_latest != summary.eval_before:
        return f"{_share(summary.eval_latest)} at the last look"
    return _share(summary.eval_after)


def table(summary: Summary) -> Table:
    """The summary as a person reads it at the end of a run."""
    lengths = summary.lengths
    rows = {
        "status": summary.status + (f": {summary.cause}" if summary.cause else ""),
        "training steps": f"{summary.steps:,}" + (f", resumed {summary.resumed}×" if summary.resumed else ""),
        "training time": f"{duration(summary.wall_s)} of {duration(summary.total_s)} in all",
        "held-out accuracy": f"{_share(summary.eval_before)} → {_latest(summary)} ({summary.eval_num} rows)",
        "reward, first and last tenth": f"{_figure(summary.reward_first)} → {_figure(summary.reward_last)}",
        "tokens generated": f"{summary.tokens_generated:,}",
        "tokens trained": f"{summary.tokens_trained:,} ({_share(summary.goodput)} of those generated)",
        "staleness": f"mean {_figure(summary.staleness_mean)}, max {_figure(summary.staleness_max)}, "
        f"bound {'none' if summary.staleness_bound is None else summary.staleness_bound}",
        "log-prob parity": f"largest difference {_figure(summary.parity_max_abs)} on the probe, "
        f"{_figure(summary.sampled_gap_max_abs)} on sampled tokens",
        "pause for new weights": f"mean {_figure(summary.pause_ms_mean)} ms, max {_figure(summary.pause_ms_max)} ms",
        "busy": f"engine {_share(summary.engine_busy_share)}, trainer {_share(summary.trainer_busy_share)}",
        "waited": f"trainer for groups {summary.trainer_wait_s:,.1f} s, "
        f"generation for admission {summary.admission_wait_s:,.1f} s",
        "split": str(summary.split) if summary.split else "–",
        "mean completion length": f"sampled {_figure(lengths.sampled_mean)}, trained {_figure(lengths.trained_mean)}, "
        f"untrained {_figure(lengths.untrained_mean)}",
        "trained against sampled": "; ".join(summary.audit) or "–",
        "groups dropped": ", ".join(f"{num:,} {reason}" for reason, num in summary.dropped.items()) or "none",
        "workers lost": _losses(summary),
        "tokens by fate": ", ".join(f"{num:,} {fate}" for fate, num in _fates(summary.ledger)),
        **{name: str(value) for name, value in summary.extra.items() if value is not None},
    }
    made = Table(title=Text(f"headway · {clean(summary.run_dir, 60)}"), title_justify="left", show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows.items():
        made.add_row(Text(clean(name, 60)), Text(clean(value)))
    return made


def _losses(summary: Summary) -> str:
    if not summary.losses:
        return "none"
    each = ", ".join(f"{clean(worker, 40)} {num}×" for worker, num in summary.losses.items())
    brought = f"{summary.continued_requests:,} requests went on elsewhere with {summary.continued_tokens:,} tokens"
    return f"{each}; restarted {summary.restarts}×; {brought}"


def _fates(fates: TokenCounts) -> list[tuple[str, int]]:
    dropped = [(f"dropped ({reason})", num) for reason, num in fates.dropped.items()]
    kept = [
        (name.replace("_", " "), getattr(fates, name))
        for name in ("trained", "waiting", "in_flight", "lost", "recomputed")
    ]
    return [(name, num) for name, num in kept + dropped if num]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
