"""Events of runs that never happened: consistent, deterministic by seed, and complete by the log's own schema."""

import random
import typing
from pathlib import Path
from typing import Any

import msgspec

from headway.record.events import KINDS, Event, TokenCounts
from headway.record.log import encode
from headway.types import StopReason

START = 1_700_000_000.0
GROUP_SIZE = 4


_ZEROS: dict[Any, Any] = {int: 0, float: 0.0, str: "", dict[str, Any]: {}, dict[str, float | None]: {}}


def blank(kind: str, **fields: Any) -> Event:
    """An event of that kind; fields that the caller does not care about are zero, empty or null."""
    made = KINDS[kind]
    for field in msgspec.structs.fields(made):
        if field.required and field.name not in fields:
            optional = type(None) in typing.get_args(field.type)
            fields[field.name] = None if optional else TokenCounts() if field.type is TokenCounts else _zero(field.type)
    return made(**fields)


def _zero(kind: Any) -> Any:
    return () if typing.get_origin(kind) is tuple else _ZEROS[kind]


class SyntheticRun:
    """Writes the events of an asynchronous run step by step; `crash` begins a second incarnation."""

    def __init__(
        self, steps: int, batch: int = 4, eta: int = 2, seed: int = 0, run_dir: str = "runs/synthetic"
    ) -> None:
        self.random = random.Random(seed)
        self.steps, self.batch, self.eta = steps, batch, eta
        self.now = START
        self.incarnation = 0
        self.version = self.num_admitted = self.num_finished = self.num_dropped = 0
        self.generated = 0.0  # tokens that no stats event has counted yet
        self.events: list[Event] = []
        config = {"run": {"dir": run_dir, "steps": steps}, "staleness": {"max_staleness": eta}}
        self.add(
            "run_started", config=config, hardware={}, num_prompts=100, worst_staleness=eta + 1, config_hash="cafe"
        )

    def add(self, kind: str, at: float | None = None, **fields: Any) -> None:
        time = self.now if at is None else at
        self.events.append(KINDS[kind](seq=len(self.events), time=time, **fields))

    def change(self, place: int, **fields: Any) -> None:
        """Give other values to an event that is in the log already."""
        self.events[place] = msgspec.structs.replace(self.events[place], **fields)

    def evaluate(self, label: str, accuracy: float | None, seconds: float = 2.0) -> None:
        if label != "step":
            self.now += seconds
        self.add(
            "evaluated", label=label, version=self.version, version_last=self.version, accuracy=accuracy, num=500,
            mean_tokens=40.0, seconds=seconds,
        )  # fmt: skip

    def admit(self) -> None:
        while self.num_admitted - self.num_dropped < (self.version + self.eta + 1) * self.batch:
            group = self.num_admitted
            self.add("admitted", group=group, prompt=group % 100, eta=self.eta, version=self.version)
            self.num_admitted += 1

    def finish(self, failed: bool = False) -> tuple[int, int, int]:
        """Finish the oldest unfinished group and return its id, its tokens and its oldest version."""
        group, progress = self.num_finished, self.version / self.steps
        self.num_finished += 1
        lengths = [max(1, int(self.random.lognormvariate(3.6 + 0.3 * progress, 0.6))) for _ in range(GROUP_SIZE)]
        oldest = max(0, self.version - self.random.randint(0, self.eta))
        self.generated += sum(lengths) * 1.02
        self.add(
            "finished", group=group, shard="groups-00000.bin", offset=0, num_bytes=9, checksum="00" * 8,
            lengths=tuple(lengths), rewards=tuple(float(self.random.random() < 0.3 + 0.5 * progress) for _ in lengths),
            stops=(StopReason.STOP,) * GROUP_SIZE, oldest=oldest, newest=self.version, seconds=1.5,
        )  # fmt: skip
        if failed:
            self.add("dropped", groups=(group,), reason="failed", tokens=sum(lengths))
            self.num_dropped += 1
        return group, sum(lengths), oldest

    def step(self, seconds: float = 1.0, wait_s: float = 0.25, drop: bool = False, **metrics: float | None) -> None:
        """One training step: admissions, the batch's groups, a look at the engine, the step, the swap."""
        self.admit()
        self.now += wait_s
        if drop:
            self.finish(failed=True)
        groups = [self.finish() for _ in range(self.batch)]
        ids = tuple(group for group, _, _ in groups)
        self.add("taken", version=self.version, groups=ids)
        started = self.now
        self.now += seconds
        self.look(wait_s + seconds, wait_s)
        stale = [self.version - oldest for _, _, oldest in groups]
        progress = self.version / self.steps
        self.version += 1
        numbers = {"loss": self.random.gauss(0, 0.02), "entropy": 1 - 0.5 * progress, **metrics}
        self.add(
            "trained", version=self.version, groups=ids, tokens=sum(tokens for _, tokens, _ in groups), started=started,
            seconds=seconds, wait_s=wait_s, staleness_mean=sum(stale) / len(stale), staleness_max=max(stale),
            reward=0.3 + 0.5 * progress + self.random.gauss(0, 0.03), metrics=numbers, digest="00",
        )  # fmt: skip
        self.now += 0.05
        self.add(
            "swapped", version=self.version, engine="engine-0", stage_s=0.04, pause_ms=2.0 + self.version % 3,
            interrupted=8, recomputed=300, parity_max_abs=1e-6 * (1 + self.version % 4),
        )  # fmt: skip

    def look(self, seconds: float, wait_s: float, engine: str = "engine-0") -> None:
        generated, self.generated = self.generated, 0.0
        self.add(
            "stats", engine=engine, version=self.version, seconds=seconds, generated=int(generated), prefilled=100,
            recomputed=300, preempted=0, busy_s=seconds * self.random.uniform(0.7, 1.0), running=12, waiting=3,
            kv_used=2048, kv_total=8192, inflight=9, ready=2, admission_wait_s=0.02, trainer_wait_s=wait_s,
        )  # fmt: skip

    def checkpoint(self) -> None:
        self.add("checkpointed", version=self.version, slot="ab"[self.version % 2], seconds=0.1)

    def crash(self, downtime_s: float = 1000.0, lost_tokens: int = 0) -> None:
        """The processes die; after a while the run is resumed by new ones."""
        self.now += downtime_s
        self.generated = 0.0
        self.incarnation += 1
        self.add("resume_started", incarnation=self.incarnation, hardware={})
        self.add(
            "resumed", version=self.version, checkpoint_version=self.version, num_regenerated=3, lost_tokens=lost_tokens
        )

    def end(self, status: str = "finished", cause: str = "") -> None:
        self.now += 0.5
        self.add("ended", status=status, cause=cause, tokens=TokenCounts())


def finished_run(steps: int = 20, **options: Any) -> list[Event]:
    run = SyntheticRun(steps, **options)
    run.now += 3.0
    run.evaluate("before", 0.4)
    for step in range(1, steps + 1):
        run.step(drop=step == 3)
        if step % 5 == 0 and step < steps:
            run.evaluate("step", 0.4 + 0.5 * step / steps, seconds=1.5)
            run.checkpoint()
    run.evaluate("after", 0.9)
    run.end()
    return run.events


def write_log(run_dir: Path, events: list[Event]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "events.jsonl").write_bytes(b"".join(encode(event) for event in events))
