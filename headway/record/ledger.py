"""The folds of the log: the state a resume starts from, and the fate of every generated token.

Invariants that live here:
  2. Conservation: every admitted group leaves exactly once, trained or dropped with a reason.
 14. Crash safety: no prompt is skipped, none trained twice, and versions never go back.

Both folds take events one at a time, so they can also follow a run as it goes: `log.subscribe(state.on_event)`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from headway.errors import InvariantBroken
from headway.record.events import Event, TokenCounts
from headway.record.shards import ShardRef
from headway.types import DropReason


@dataclass(frozen=True)
class Admitted:
    prompt: int
    eta: int
    version: int
    repeats: int | None = None


@dataclass
class RunState:
    """What the events so far say of a run."""

    config: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    rows: str = ""  # the fingerprint of the training rows
    configs: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # each from the version it holds for
    num_prompts: int = 0
    admitted: dict[int, Admitted] = field(default_factory=dict)
    finished: dict[int, ShardRef] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    requeued: list[int] = field(default_factory=list)  # groups of an outage whose prompts are still to be repeated
    batches: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # (version trained, groups)
    num_trained: int = 0
    digests: dict[int, str] = field(default_factory=dict)  # of the weights each training step made
    samples: dict[int, tuple[float, ...]] = field(default_factory=dict)  # of those weights
    metrics: dict[int, dict[str, float | None]] = field(default_factory=dict)  # of those steps
    num_checkpoints: int = 0
    evaluations: list[Event] = field(default_factory=list)
    status: str = ""  # empty until the run ended
    cause: str = ""
    _slots: dict[str, int] = field(default_factory=dict)
    _taken: dict[int, int] = field(default_factory=dict)  # group to the version it was taken for
    _skipped: set[int] = field(default_factory=set)  # their dropped event is still to come

    @property
    def untrained_batch(self) -> tuple[int, ...] | None:
        """The groups of a batch that was taken and neither trained nor skipped yet, if there is one."""
        return self.batches[-1][1] if len(self.batches) > self.num_trained else None

    @property
    def unfinished(self) -> list[int]:
        """Admitted groups that must be generated again after a crash."""
        return [group for group in self.admitted if group not in self.finished and group not in self.dropped]

    @property
    def waiting(self) -> list[int]:
        """Finished groups that no batch has taken."""
        return sorted(group for group in self.finished if group not in self._taken and group not in self.dropped)

    @property
    def checkpoints(self) -> list[tuple[int, str]]:
        """(version, slot) of every checkpoint not yet written over, the newest first."""
        return sorted(((version, slot) for slot, version in self._slots.items()), reverse=True)

    def on_event(self, event: Event) -> None:
        match event.kind:
            case "run_started":
                self._on_run_started(event)
            case "resume_started":
                self.status = self.cause = ""
            case "config_changed":
                self._on_config_changed(event)
            case "resumed":
                self._on_resumed(event)
            case "admitted":
                self._on_admitted(event)
            case "requeued":
                self.requeued += event["groups"]
            case "finished":
                self._on_finished(event)
            case "dropped":
                self._on_dropped(event)
            case "taken":
                self._on_taken(event)
            case "trained":
                self._on_trained(event)
            case "retrained":
                self._on_retrained(event)
            case "skipped":
                self._on_skipped(event)
            case "evaluated":
                self.evaluations.append(event)
            case "checkpointed":
                self._slots[event["slot"]] = event["version"]
                self.num_checkpoints += 1
            case "ended":
                self.status, self.cause = event["status"], event["cause"]

    def _on_run_started(self, event: Event) -> None:
        if self.config_hash:
            _broken(event, "a second run starts in the same log")
        self.config, self.config_hash, self.rows = event["config"], event["config_hash"], event["rows"]
        self.configs.append((0, self.config))
        self.num_prompts = event["num_prompts"]

    def _on_config_changed(self, event: Event) -> None:
        config = {section: dict(knobs) for section, knobs in self.config.items()}
        for key, (_, value) in event["changes"].items():
            section, _, knob = key.partition(".")
            config.setdefault(section, {})[knob] = value
        self.config = config
        self.configs.append((event["version"], config))

    def _on_resumed(self, event: Event) -> None:
        if event["version"] != self.num_trained:
            _broken(event, f"the run resumes at version {event['version']} after version {self.num_trained} was made")
        self.status = self.cause = ""

    def _on_admitted(self, event: Event) -> None:
        group = event["group"]
        if group in self.admitted:
            _broken(event, f"group {group} is admitted twice")
        if group != len(self.admitted):
            _broken(event, f"group {group} is admitted before group {len(self.admitted)}, whose prompt is skipped")
        self.admitted[group] = Admitted(event["prompt"], event["eta"], event["version"], event["repeats"])
        if event["repeats"] is not None:
            self.requeued.remove(event["repeats"])

    def _on_finished(self, event: Event) -> None:
        group = event["group"]
        self._check_present(event, group)
        if group in self.finished:
            _broken(event, f"group {group} is finished twice")
        self.finished[group] = ShardRef(event["shard"], event["offset"], event["num_bytes"], event["checksum"])

    def _on_dropped(self, event: Event) -> None:
        for group in event["groups"]:
            if group in self._skipped:
                self._skipped.remove(group)
                continue
            self._check_present(event, group)
            self.dropped[group] = event["reason"]

    def _on_taken(self, event: Event) -> None:
        version, groups = event["version"], tuple(event["groups"])
        if version != self.num_trained:
            _broken(event, f"a batch is taken for version {version} while the weights are at {self.num_trained}")
        if self.untrained_batch is not None:
            _broken(event, f"a second batch is taken for version {version}")
        for group in groups:
            self._check_present(event, group)
            if group not in self.finished:
                _broken(event, f"group {group} is taken before it is finished")
            self._taken[group] = version
        self.batches.append((version, groups))

    def _on_trained(self, event: Event) -> None:
        version = event["version"]
        if version <= self.num_trained:
            _broken(event, f"version {version} is trained twice")
        self._check_taken(event, version - 1)
        self.num_trained = version
        self.digests[version] = event["digest"]
        self.samples[version], self.metrics[version] = event["weights_sample"], event["metrics"]

    def _on_retrained(self, event: Event) -> None:
        if event["version"] not in self.digests:
            _broken(event, f"version {event['version']} is retrained but was never trained")
        self.digests[event["version"]] = event["digest"]

    def _on_skipped(self, event: Event) -> None:
        """The groups leave here and not with the dropped event that follows: a crash may come between the two."""
        self._check_taken(event, event["version"])
        self.batches.pop()
        for group in event["groups"]:
            del self._taken[group]
            self.dropped[group] = DropReason.NON_FINITE.value
            self._skipped.add(group)

    def _check_taken(self, event: Event, version: int) -> None:
        if version != self.num_trained or self.untrained_batch != tuple(event["groups"]):
            _broken(event, f"groups {event['groups']} were not the batch taken for version {version}")

    def _check_present(self, event: Event, group: int) -> None:
        """A group may finish, be dropped or be taken only while it is admitted and has not left."""
        if group not in self.admitted:
            _broken(event, f"group {group} is {event.kind} but was never admitted")
        if group in self.dropped:
            _broken(event, f"group {group} is {event.kind} after it was dropped as {self.dropped[group]}")
        if group in self._taken:
            _broken(event, f"group {group} is {event.kind} after it was taken for version {self._taken[group]}")


def fold(events: Iterable[Event]) -> RunState:
    state = RunState()
    for event in events:
        state.on_event(event)
    return state


def _broken(event: Event, sentence: str) -> NoReturn:
    raise InvariantBroken(f"the event log contradicts itself at line {event.seq + 1}: {sentence}")


class Ledger:
    """Generated tokens by fate: generated = trained + waiting + in flight + dropped + lost, at every moment.

    What the engines counted and no group has brought home is in flight: while the run goes on, it is being written, or
    was lost with a worker; when the run has finished or was resumed, it is lost; when it ended early, it stays
    unfinished. Tokens that engines sampled after the last look at them are counted when the next look or their group
    comes; those that an engine took with it when it died, and no rollout worker had received, nobody can count.
    """

    def __init__(self) -> None:
        self.finished = 0  # in trajectories of finished groups
        self.trained = 0
        self.lost = 0
        self.dropped: Counter[str] = Counter()
        self.status = ""
        self._untrained: dict[int, int] = {}  # tokens by group, of those finished, not yet trained and not dropped
        self._skipped: set[int] = set()  # their dropped event is still to come
        self._dropped_finished = 0  # the part of `dropped` that is also in `finished`
        self._brought_home = 0  # in this process life, whatever became of them
        self._lost_here = 0  # in this process life
        self._has_lost_engines = False  # then what they sampled after their last look was never counted
        self._generated_before = 0  # in earlier process lives
        self.recomputed = 0  # tokens whose keys and values were computed again; work, not a fate
        self._counted = 0  # by engines, in this process life

    @property
    def generated(self) -> int:
        return self._generated_before + self._brought_home + self._lost_here + self.in_flight

    @property
    def waiting(self) -> int:
        """Tokens of finished groups that are neither trained nor dropped."""
        return sum(self._untrained.values())

    @property
    def in_flight(self) -> int:
        return max(0, self._counted - self._brought_home - self._lost_here)

    def on_event(self, event: Event) -> None:
        match event.kind:
            case "stats":
                self._counted += event["generated"]
                self.recomputed += event["recomputed"]
            case "finished":
                self._on_finished(event)
            case "trained":
                self.trained += event["tokens"]
                for group in event["groups"]:
                    self._untrained.pop(group, None)
            case "dropped":
                self._on_dropped(event)
            case "skipped":
                self._on_skipped(event)
            case "resumed":
                self._on_resumed(event)
            case "worker_lost":
                self._on_worker_lost(event)
            case "ended":
                self.status = event["status"]
                if self.status == "finished":
                    self.finish()

    def _on_worker_lost(self, event: Event) -> None:
        self._has_lost_engines |= event["worker"].startswith("engine")

    def finish(self) -> None:
        """Every group has left: what no group has brought home is not being written any more."""
        self.status = "finished"
        self._lose(self.in_flight)

    def _lose(self, num_tokens: int) -> None:
        self.lost += num_tokens
        self._lost_here += num_tokens

    def _on_finished(self, event: Event) -> None:
        self.finished += event["tokens"]
        self._untrained[event["group"]] = event["tokens"]
        self._brought_home += event["tokens"]
        for failure in event["failures"]:
            self.dropped[f"trajectory: {_short(failure.reason)}"] += failure.tokens
            self._brought_home += failure.tokens

    def _on_dropped(self, event: Event) -> None:
        groups = [group for group in event["groups"] if group not in self._skipped]
        self._skipped.difference_update(event["groups"])
        all_finished = all(group in self._untrained for group in groups)
        known = self._drop_finished(groups, event["reason"])
        if not all_finished:  # the event alone knows what a group that never finished had sampled
            unfinished = max(0, event["tokens"] - known)
            self.dropped[event["reason"]] += unfinished
            self._brought_home += unfinished

    def _on_skipped(self, event: Event) -> None:
        self._drop_finished(event["groups"], DropReason.NON_FINITE.value)
        self._skipped.update(event["groups"])

    def _drop_finished(self, groups: list[int], reason: str) -> int:
        known = sum(self._untrained.pop(group, 0) for group in groups)
        self.dropped[reason] += known
        self._dropped_finished += known
        return known

    def _on_resumed(self, event: Event) -> None:
        self._lose(max(self.in_flight, event["lost_tokens"]))
        self._generated_before += self._brought_home + self._lost_here
        self._brought_home = self._lost_here = self._counted = 0
        self._has_lost_engines = False
        self.status = ""

    def check(self) -> None:
        """Raise unless every token has exactly one fate."""
        parts = {"trained": self.trained, "waiting": self.waiting, "dropped": self._dropped_finished}
        if self.finished != sum(parts.values()):
            told = ", ".join(f"{tokens} {fate}" for fate, tokens in parts.items())
            raise InvariantBroken(f"the ledger does not add up: {self.finished} tokens finished, but {told}")
        exact = self._counted and not self._has_lost_engines
        if self.status == "finished" and exact and self._counted < self._brought_home:
            missing = self._brought_home - self._counted
            raise InvariantBroken(f"the ledger does not add up: groups hold {missing} tokens that no engine generated")

    def rows(self) -> list[tuple[str, int]]:
        """(fate, tokens): the whole first, then its parts, then the work that was done twice."""
        return [
            ("generated", self.generated),
            ("trained", self.trained),
            ("waiting", self.waiting),
            ("unfinished at the end" if self.status else "in flight", self.in_flight),
            *((f"dropped: {reason}", tokens) for reason, tokens in sorted(self.dropped.items())),
            ("lost", self.lost),
            ("recomputed", self.recomputed),
        ]

    def counts(self) -> TokenCounts:
        return TokenCounts(
            generated=self.generated,
            trained=self.trained,
            waiting=self.waiting,
            in_flight=self.in_flight,
            dropped=dict(sorted(self.dropped.items())),
            lost=self.lost,
            recomputed=self.recomputed,
        )


def ledger(events: Iterable[Event]) -> Ledger:
    made = Ledger()
    for event in events:
        made.on_event(event)
    return made


def _short(reason: str) -> str:
    """The kind of a failure, without what makes each one different."""
    return reason.partition(":")[0].strip()[:40] or "unknown"
