"""What must hold of a run after a fault, by its event log and its files: each problem found is a sentence."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from system import check_admissions, check_fates, check_finished, check_prompts, check_versions

from headway.config import Config
from headway.errors import HeadwayError
from headway.monitor.report import summarise
from headway.record.events import Event
from headway.record.run import Run, fold
from headway.record.shards import Record
from headway.types import Batch, Group


def problems_of(config: Config, events: list[Event], directory: Path, vocab_size: int) -> list[str]:
    """Of a run at any moment: the ledger, Eq. 3, every prompt once, versions in order, the bytes of every group."""
    found = _tried("the fold of the log", lambda: fold(events))
    if found:
        return found
    found += _tried("Eq. 3", lambda: check_admissions(config, events))
    found += _tried("every prompt once", lambda: check_prompts(config, events))
    found += _tried("versions", lambda: check_versions(config, events))
    found += _tried("the ledger", lambda: check_fates(events))
    found += _tried("trained once", lambda: check_trained_once(events))
    found += _tried("the record", lambda: check_groups(config, events, directory, vocab_size))
    found += _tried("the report", lambda: summarise(Run.read(directory)).to_json())
    return found


def problems_of_the_end(config: Config, events: list[Event], expected_digest: str = "") -> list[str]:
    """Of a run that came to its end: everything admitted has left, and at η = 0 there is one outcome."""
    found = _tried("the end", lambda: check_finished(config, events))
    digest = fold(events).digests.get(config.run.steps, "none")
    if not found and expected_digest and digest != expected_digest:
        found.append(f"the outcome: at η = 0 the weights should be {expected_digest}, and are {digest}")
    return found


def problems_of_a_stop(events: list[Event], directory: Path, was_impatient: bool) -> list[str]:
    """Of a run that was asked to end: it says so, and all that it trained is saved, if it was given the time."""
    state = fold(events)
    if state.began and state.status != "stopped":
        return [f"it was asked to stop, and its log says {state.status or 'nothing'} ({state.cause})"]
    if state.num_trained and not was_impatient and state.began:
        saved = state.checkpoints[0][0] if state.checkpoints else 0
        if saved != state.num_trained or not (directory / "model" / "config.json").exists():
            return [f"it stopped at version {state.num_trained}, and version {saved} is saved"]
    return []


def _tried(what: str, check: Callable[[], object]) -> list[str]:
    try:
        check()
    except (AssertionError, HeadwayError, ValueError) as error:
        return [f"{what}: {error or type(error).__name__}"]
    return []


def check_trained_once(events: Iterable[Event]) -> None:
    """No group is in two batches, and none that was dropped is in any."""
    trained: set[int] = set()
    dropped: set[int] = set()
    for event in events:
        if event.kind == "trained":
            again = trained & set(event.groups) or dropped & set(event.groups)
            assert not again, f"groups {sorted(again)} were trained twice, or after they were dropped"
            assert len(set(event.groups)) == len(event.groups), f"a group is twice in {event.groups}"
            trained |= set(event.groups)
        elif event.kind in ("dropped", "skipped"):
            again = trained & set(event.groups)
            assert not again, f"groups {sorted(again)} were dropped after they were trained"
            dropped |= set(event.groups)


def check_groups(config: Config, events: list[Event], directory: Path, vocab_size: int) -> None:
    """Every group that the log calls finished lies in the record, whole and possible, as old as the log says."""
    state = fold(events)
    record = Record(directory / "record")
    groups = {group.id: record.load(group.ref) for group in state.groups if group.ref}
    finished = {event.group: event for event in events if event.kind == "finished"}
    for group_id, group in groups.items():
        assert group.id == group_id, f"the bytes of group {group_id} are those of {group.id}"
        assert group.num_sampled == finished[group_id].tokens, f"group {group_id} holds another number of tokens"
        assert group.prompt_index == state.groups[group_id].prompt, f"group {group_id} answers another prompt"
        _check_group(group, vocab_size, state)
    for event in events:
        if event.kind == "trained" and event.tokens_at is not None:
            tokens = record.load_tokens(event.tokens_at)
            assert {*tokens.sources[::3].tolist()} <= {*event.groups}, f"version {event.version} saw other groups"
            assert tokens.counts.sum() == len(tokens.proximal), f"version {event.version} saw other numbers of tokens"
    _check_staleness(config, events, groups)
    _check_oldest(config, events, groups)


def _check_oldest(config: Config, events: list[Event], groups: dict[int, Group]) -> None:
    """No token is older than its group's admission, and Eq. 3 holds of the version that the oldest was sampled under.

    Only a group that was dropped for that may have met older weights.
    """
    eta, batch = config.staleness.max_staleness, config.trainer.batch_groups
    dropped = set[int]()
    unused = {group for event in events if event.kind == "dropped" for group in event.groups}
    for event in events:
        if event.kind == "dropped":
            dropped |= set(event.groups)
        elif event.kind == "admitted" and event.group in groups and event.group not in unused:
            oldest = groups[event.group].oldest_version
            if oldest is not None:
                assert oldest >= event.version, f"group {event.group} met version {oldest}, admitted at {event.version}"
                room = (oldest + eta + 1) * batch
                assert event.group - len(dropped) < room, f"group {event.group} breaks Eq. 3 with version {oldest}"


def _check_group(group: Group, vocab_size: int, state: Run) -> None:
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            sampled = sequence.loss_mask > 0
            assert 0 <= sequence.tokens.min() <= sequence.tokens.max() < vocab_size, (
                f"group {group.id}: impossible token"
            )
            logprobs = sequence.logprobs[sampled]
            assert np.isfinite(logprobs).all() and (logprobs <= 1e-3).all(), f"group {group.id}: impossible log-prob"
            assert sequence.versions[sampled].max(initial=0) <= state.num_trained, f"group {group.id}: a version ahead"


def _check_staleness(config: Config, events: list[Event], groups: dict[int, Group]) -> None:
    worst = next(event.worst_staleness for event in events if event.kind == "run_started")
    for event in events:
        if event.kind == "trained":
            batch = Batch(event.version - 1, tuple(groups[group] for group in event.groups))
            staleness = max(batch.staleness)
            assert worst is None or staleness <= worst, f"version {event.version} was trained on data {staleness} old"
            assert staleness == event.staleness_max, f"version {event.version}: staleness {staleness} is not told"
