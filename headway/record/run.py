"""Folds the event log into a `Run`, the state that resume, report, view, plots and metrics read.

    run = Run.read("runs/mine")
    run.steps[-1].event.reward, run.tokens.counts(), run.groups[7].rewards

It takes events one at a time, so it can also follow a live run: `log.subscribe(run.on_event)`.

Invariants that live here:
  2. Conservation: every admitted group leaves exactly once, trained or dropped with a reason.
 14. Crash safety: no prompt is skipped, none trained twice, and versions never decrease.
"""

import gc
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from headway.errors import InvariantBroken
from headway.record import events
from headway.record.clock import Clock
from headway.record.events import Event, FailedTrajectory, Place
from headway.record.health import HealthWarning, diagnose
from headway.record.log import EVENTS_NAME, scan
from headway.record.steps import Step
from headway.record.tokens import TokenAccount
from headway.types import DropReason, StopReason

E = TypeVar("E", bound=Event)
T = TypeVar("T")

_MOST_SHARED = 10_000
"""Rewards and stops that many groups have in common are held once, up to this many of them."""


class GroupState(msgspec.Struct, gc=False):
    """State of one group: admitted, finished, taken for a training step, or dropped with a reason."""

    id: int
    prompt: int  # row
    eta: int
    version: int  # at admission
    repeats: int | None = None  # the requeued group whose prompt this is
    ref: Place | None = None  # where its bytes lie, once it has finished
    lengths: Sequence[int] = ()  # sampled tokens of each trajectory
    rewards: tuple[float | None, ...] = ()  # of each trajectory
    stops: tuple[StopReason | None, ...] = ()  # of each trajectory, of its last completion
    failures: tuple[FailedTrajectory, ...] = ()
    tokens: int = 0  # sampled, of its trajectories
    oldest: int | None = None  # versions of its oldest and newest sampled token
    newest: int | None = None
    seconds: float = 0.0  # from admission to the last reward
    taken: int | None = None  # the version that was trained on it
    dropped: str = ""  # the reason

    def is_trained(self, version: int) -> bool:
        """Whether a run that has reached this version has trained it."""
        return self.taken is not None and self.taken < version

    @property
    def zero_variance(self) -> bool:
        """Whether all its rewards are equal, so that group-relative advantages are zero."""
        rewards = self.rewards
        return len(rewards) > 1 and rewards.count(rewards[0]) == len(rewards)

    @property
    def num_truncated(self) -> int:
        stops = self.stops
        return stops.count(StopReason.LENGTH) + stops.count(StopReason.CONTEXT)


@dataclass
class Run:
    """The state of a run after the events so far."""

    config: dict[str, Any] = field(default_factory=dict)
    configs: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # each from the version it holds for
    config_hash: str = ""
    num_prompts: int = 0
    rows: str = ""
    held_out_rows: str = ""
    model: str = ""
    worst_staleness: int | None = None
    groups: list[GroupState] = field(default_factory=list)  # by id
    batches: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # (version trained, groups)
    steps: list[Step] = field(default_factory=list)
    num_trained: int = 0
    digests: dict[int, str] = field(default_factory=dict)  # of the weights each training step made
    dropped: dict[int, str] = field(default_factory=dict)  # group to reason
    failing: list[int] = field(default_factory=list)  # groups that failed whole since the last that did not
    requeued: list[int] = field(default_factory=list)  # groups of an outage whose prompts are still to be repeated
    failures: Counter[str] = field(default_factory=Counter)  # failed trajectories by cause
    engines: dict[str, events.Stats] = field(default_factory=dict)  # the latest of each that serves
    warnings: dict[str, HealthWarning] = field(default_factory=dict)  # by kind; those that hold now
    past_warnings: dict[str, HealthWarning] = field(default_factory=dict)  # by kind; the latest of those that held
    phase: events.Phase | None = None  # in progress
    status: str = ""  # empty until the run ended
    cause: str = ""
    tokens: TokenAccount = field(default_factory=TokenAccount)
    clock: Clock = field(default_factory=Clock)
    _by_kind: dict[type[Event], list[Event]] = field(default_factory=dict)
    _slots: dict[str, int] = field(default_factory=dict)
    _shared: dict[Any, Any] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)  # their dropped event is still to come
    _handlers: dict[type[Event], Callable[[Any], None]] = field(init=False)

    def __post_init__(self) -> None:
        self._handlers = {kind: method for kind in events.KINDS.values() if (method := self._handler(kind))}

    def _handler(self, kind: type[Event]) -> Callable[[Any], None] | None:
        return getattr(self, f"_on_{kind.__struct_config__.tag}", None)

    @classmethod
    def read(cls, directory: str | Path) -> "Run":
        """The run in a directory, from its event log."""
        return fold(scan(Path(directory) / EVENTS_NAME))

    def on_event(self, event: Event) -> None:
        kind = type(event)
        self.clock.on_event(event)
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(event)
        if kind not in _NOT_LISTED:
            self._by_kind.setdefault(kind, []).append(event)

    def all(self, kind: type[E]) -> list[E]:
        """Every event of a kind, in order, of `Phase` those that finished; of `Admitted`, `Finished` and `Taken` see
        `groups` and `batches`."""
        return cast(list[E], self._by_kind.get(kind, []))

    @property
    def directory(self) -> str:
        return str(self.config.get("run", {}).get("dir", ""))

    @property
    def num_steps(self) -> int:
        """How many training steps are configured."""
        return int(self.config.get("run", {}).get("steps", 0))

    @property
    def began(self) -> bool:
        return bool(self.clock.incarnations)

    @property
    def is_resumed(self) -> bool:
        """Whether the run was resumed at least once."""
        return len(self.clock.incarnations) > 1

    def ref(self, group: int) -> Place:
        """Position of a finished group in the record."""
        found = self.groups[group].ref
        assert found is not None, f"group {group} has not finished"
        return found

    @property
    def eta(self) -> int:
        """The staleness bound in force."""
        changed = self.all(events.EtaChanged)
        return changed[-1].after if changed else int(self.config.get("staleness", {}).get("max_staleness", 0))

    @property
    def observed(self) -> list[tuple[int, Mapping[str, float | None], list[int]]]:
        """Input of the adaptive staleness bound: each training step's metrics and its groups' bounds."""
        trained = (step.event for step in self.steps)
        return [(each.version, each.metrics, [self.groups[group].eta for group in each.groups]) for each in trained]

    @property
    def untrained_batch(self) -> tuple[int, ...] | None:
        """The groups of a batch that was taken and neither trained nor skipped yet, if there is one."""
        return self.batches[-1][1] if len(self.batches) > self.num_trained else None

    @property
    def unfinished(self) -> list[int]:
        """Admitted groups that must be generated again after a crash."""
        return [group.id for group in self.groups if group.ref is None and not group.dropped]

    @property
    def waiting(self) -> list[int]:
        """Finished groups that no batch has taken."""
        return [group.id for group in self.groups if group.ref and group.taken is None and not group.dropped]

    @property
    def checkpoints(self) -> list[tuple[int, str]]:
        """(version, slot) of every checkpoint that was not overwritten, the newest first."""
        return sorted(((version, slot) for slot, version in self._slots.items()), reverse=True)

    def finish(self) -> None:
        """Close the account of a run that ended: tokens in flight are lost, and every token must have one fate."""
        self.tokens.finish()
        self.tokens.check(finished=True)

    def check_tokens(self) -> None:
        """Raise unless every generated token has exactly one fate."""
        self.tokens.check(finished=self.status == "finished")

    def _on_run_started(self, event: events.RunStarted) -> None:
        if self.config_hash or self.groups:
            _contradiction(event, "a second run starts in the same log")
        self.config, self.config_hash, self.num_prompts = event.config, event.config_hash, event.num_prompts
        self.rows, self.held_out_rows, self.model = event.rows, event.held_out_rows, event.model
        self.worst_staleness = event.worst_staleness
        self.configs.append((0, self.config))

    def _on_config_changed(self, event: events.ConfigChanged) -> None:
        config = {section: dict(knobs) for section, knobs in self.config.items()}
        for key, (_, value) in event.changes.items():
            section, _, knob = key.partition(".")
            config.setdefault(section, {})[knob] = value
        self.config = config
        self.configs.append((event.version, config))

    def _on_resume_started(self, event: events.ResumeStarted) -> None:
        self.status = self.cause = ""
        self.phase = None
        self.engines.clear()

    def _on_resumed(self, event: events.Resumed) -> None:
        if event.version != self.num_trained:
            _contradiction(event, f"the run resumes at version {event.version} after version {self.num_trained}")
        self.status = self.cause = ""
        self.tokens.on_resumed(event)

    def show_phase(self, event: events.Phase) -> None:
        """Track the phase in progress; a nested one, such as the start of one worker, does not end it."""
        if event.state in ("started", "progress"):
            self.phase = event
        elif self.phase is not None and self.phase.name == event.name:
            self.phase = None

    def _on_phase(self, event: events.Phase) -> None:
        self.show_phase(event)
        if event.state == "finished":
            self._by_kind.setdefault(events.Phase, []).append(event)

    def _on_admitted(self, event: events.Admitted) -> None:
        group, expected = event.group, len(self.groups)
        if group < expected:
            _contradiction(event, f"group {group} is admitted twice")
        if group > expected:
            _contradiction(event, f"group {group} is admitted before group {expected}, whose prompt is skipped")
        self.groups.append(GroupState(group, event.prompt, event.eta, event.version, event.repeats))
        if event.repeats is not None:
            if event.repeats not in self.requeued:
                _contradiction(event, f"group {group} repeats group {event.repeats}, which is not requeued")
            self.requeued.remove(event.repeats)

    def _on_requeued(self, event: events.Requeued) -> None:
        if kept := [group for group in event.groups if group not in self.dropped]:
            _contradiction(event, f"group {kept[0]} is requeued but was not dropped")
        self.requeued += event.groups
        self.failing = [group for group in self.failing if group not in event.groups]

    def _on_finished(self, event: events.Finished) -> None:
        group = self._present(event, event.group)
        if group.ref is not None:
            _contradiction(event, f"group {group.id} is finished twice")
        group.ref = Place(sys.intern(event.shard), event.offset, event.num_bytes, event.checksum)
        group.lengths, group.tokens = array("l", event.lengths), sum(event.lengths)
        group.rewards, group.stops = self._share(event.rewards), self._share(event.stops)
        group.oldest, group.newest, group.seconds = event.oldest, event.newest, event.seconds
        if event.failures:
            self._add_failures(group, event.failures)
        self.failing.clear()
        self.tokens.on_finished(event, group.tokens)

    def _share(self, value: T) -> T:
        """Intern a value that many events repeat, so that a million groups fit into memory."""
        known = self._shared
        return cast(T, known.setdefault(value, value) if len(known) < _MOST_SHARED else known.get(value, value))

    def _add_failures(self, group: GroupState, failures: tuple[FailedTrajectory, ...]) -> None:
        group.failures = failures
        self.failures.update(failure.cause for failure in failures)

    def _on_dropped(self, event: events.Dropped) -> None:
        leaving = [group for group in event.groups if group not in self._skipped]
        self._skipped.difference_update(event.groups)
        groups = [self._present(event, group) for group in leaving]
        for group in groups:
            group.dropped = self.dropped[group.id] = event.reason
            if event.failures:
                self._add_failures(group, event.failures)
            if event.reason == DropReason.FAILED:
                self.failing.append(group.id)
        all_finished = all(group.ref is not None for group in groups)
        self.tokens.on_dropped(event, sum(group.tokens for group in groups), all_finished)

    def _on_taken(self, event: events.Taken) -> None:
        version = event.version
        if version != self.num_trained:
            _contradiction(event, f"a batch is taken for version {version} while the weights are at {self.num_trained}")
        if self.untrained_batch is not None:
            _contradiction(event, f"a second batch is taken for version {version}")
        for id in event.groups:
            group = self._present(event, id)
            if group.ref is None:
                _contradiction(event, f"group {id} is taken before it is finished")
            group.taken = version
        self.batches.append((version, event.groups))

    def _on_trained(self, event: events.Trained) -> None:
        if event.version <= self.num_trained:
            _contradiction(event, f"version {event.version} is trained twice")
        self._check_taken(event, event.version - 1, event.groups)
        self.num_trained = event.version
        self.digests[event.version] = event.digest
        groups = [self.groups[group] for group in event.groups]
        self.tokens.on_trained(event, sum([group.tokens for group in groups]))
        step = Step(
            event,
            num_groups=len(groups),
            num_trajectories=sum([len(group.rewards) for group in groups]),
            num_truncated=sum([group.num_truncated for group in groups]),
            num_zero_variance=sum([group.zero_variance for group in groups]),
            num_failed=sum([len(group.failures) for group in groups]),
            stops=Counter(chain.from_iterable([group.stops for group in groups])),
        )
        self.steps.append(step)
        self._diagnose()

    def _on_retrained(self, event: events.Retrained) -> None:
        if event.version not in self.digests:
            _contradiction(event, f"version {event.version} is retrained but was never trained")
        self.digests[event.version] = event.digest

    def _diagnose(self) -> None:
        found = dict(diagnose(self.steps, self.config.get("sampling", {}).get("max_tokens")))
        for kind in self.warnings.keys() - found.keys():
            del self.warnings[kind]
        for kind, message in found.items():
            since = self.warnings[kind].since if kind in self.warnings else self.num_trained
            self.warnings[kind] = self.past_warnings[kind] = HealthWarning(kind, since, message)

    def _on_skipped(self, event: events.Skipped) -> None:
        """Drop the groups here, not at the `dropped` event that follows: a crash may come between the two."""
        self._check_taken(event, event.version, event.groups)
        self.batches.pop()
        reason = DropReason.SKIPPED.value
        for id in event.groups:
            group = self.groups[id]
            group.taken = None
            group.dropped = self.dropped[id] = reason
            self._skipped.add(id)
        self.tokens.drop_finished(reason, sum(self.groups[id].tokens for id in event.groups))

    def _on_stats(self, event: events.Stats) -> None:
        self.engines[event.engine] = event
        self.tokens.on_stats(event)

    def _on_worker_lost(self, event: events.WorkerLost) -> None:
        self.tokens.lost_engines |= event.worker.startswith("engine")
        self.engines.pop(event.worker, None)

    def _on_engine_left(self, event: events.EngineLeft) -> None:
        self.engines.pop(event.engine, None)

    def _on_checkpointed(self, event: events.Checkpointed) -> None:
        self._slots[event.slot] = event.version

    def _on_ended(self, event: events.Ended) -> None:
        self.status, self.cause, self.phase = event.status, event.cause, None
        if event.status == "finished":
            self.tokens.finish()

    def _check_taken(self, event: Event, version: int, groups: tuple[int, ...]) -> None:
        if version != self.num_trained or self.untrained_batch != groups:
            _contradiction(event, f"groups {list(groups)} were not the batch taken for version {version}")

    def _present(self, event: Event, id: int) -> GroupState:
        """The group of an event; raise unless it was admitted and neither dropped nor taken yet."""
        if not 0 <= id < len(self.groups):
            _contradiction(event, f"group {id} is {event.kind} but was never admitted")
        group = self.groups[id]
        if group.dropped:
            _contradiction(event, f"group {id} is {event.kind} after it was dropped as {group.dropped}")
        if group.taken is not None:
            _contradiction(event, f"group {id} is {event.kind} after it was taken for version {group.taken}")
        return group


_NOT_LISTED = {events.Admitted, events.Finished, events.Taken, events.Phase}


def fold(log: Iterable[Event]) -> Run:
    """Fold events into a run."""
    run = Run()
    with without_collection():
        for event in log:
            run.on_event(event)
    return run


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection: millions of small objects without cycles would make it half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _contradiction(event: Event, sentence: str) -> NoReturn:
    raise InvariantBroken(f"the event log contradicts itself at line {event.seq + 1}: {sentence}")
