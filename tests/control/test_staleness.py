"""Invariant 1: single admission authority; invariant 2: conservation; and the bound that counter and order give."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.control.staleness import StalenessControl, resolve_window
from headway.errors import InvariantBroken

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=150)


@dataclass
class Reference:
    """The rules written down without any cleverness: one state per group, everything counted anew each time."""

    batch: int
    eta: int
    window: int | None
    states: list[str] = field(default_factory=list)  # untaken, taken, trained, dropped

    def may_admit(self, version: int) -> bool:
        return len(self.states) - self.states.count("dropped") < (version + self.eta + 1) * self.batch

    def takeable(self) -> set[int]:
        oldest = next((g for g, state in enumerate(self.states) if state == "untaken"), len(self.states))
        inside = [g for g in range(oldest, len(self.states)) if self.states[g] != "dropped"][: self.window]
        return {g for g in inside if self.states[g] == "untaken"}


@dataclass
class Loop:
    """A run in miniature: engines whose version lags, groups that finish in any order, drops, skipped steps."""

    control: StalenessControl
    chance: random.Random
    drop_rate: float
    version: int = 0  # of the trainer
    loaded: int = 0  # by every engine
    admitted_at: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    collected: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    etas: list[int] = field(default_factory=list)  # each group's, in force when it was admitted
    moves: bool = False  # whether η changes on the way

    def __post_init__(self) -> None:
        self.reference = Reference(self.control.batch_groups, self.control.max_staleness, self.control.window)

    def check(self) -> None:
        """The fast arithmetic says what the plain rules say, and the ledger adds up."""
        states = self.reference.states
        self.control.check_ledger()
        assert {g for g in range(len(states)) if self.control.may_take(g)} == self.reference.takeable()
        assert self.control.may_admit(self.loaded) == self.reference.may_admit(self.loaded)
        counts = self.control.num_untaken, self.control.num_taken, self.control.num_trained, self.control.num_dropped
        assert counts == tuple(map(states.count, ("untaken", "taken", "trained", "dropped")))

    def admit(self) -> bool:
        if not self.control.may_admit(self.loaded):
            with pytest.raises(InvariantBroken, match=r"Eq\. 3"):
                self.control.admit(self.loaded)
            return False
        alive = len(self.admitted_at) - self.reference.states.count("dropped")
        assert alive // self.control.batch_groups <= self.loaded + self.control.eta  # Eq. 3 as the paper has it
        self.etas.append(self.control.eta)
        assert self.control.admit(self.loaded) == len(self.admitted_at)
        self.running.append(len(self.admitted_at))
        self.admitted_at.append(self.loaded)
        self.reference.states.append("untaken")
        return True

    def drop(self, group: int) -> None:
        self.control.drop(group)
        self.reference.states[group] = "dropped"

    def finish(self) -> None:
        # A power of a uniform number prefers young groups, so that old ones straggle.
        group = self.running.pop(int(len(self.running) * self.chance.random() ** 0.3))
        if self.chance.random() < self.drop_rate:
            self.drop(group)
        else:
            self.finished.add(group)

    def collect(self) -> None:
        while len(self.collected) < self.control.batch_groups:
            group = min((g for g in self.finished if self.control.may_take(g)), default=None)
            if group is None:
                return
            self.control.take(group)
            self.reference.states[group] = "taken"
            self.finished.remove(group)
            self.collected.append(group)

    def train(self) -> None:
        skipped = self.chance.random() < self.drop_rate
        if skipped:
            for group in self.collected:
                self.drop(group)
        else:
            self.control.trained(self.collected)
            self.staleness += [self.version - self.admitted_at[group] for group in self.collected]
            for group in self.collected if self.control.window else ():
                passed = math.ceil((self.control.window - 1) / self.control.batch_groups)  # type: ignore[operator]
                assert self.version - self.admitted_at[group] <= self.etas[group] + passed
            for group in self.collected:
                self.reference.states[group] = "trained"
            self.version += 1
        self.collected = []

    def step(self) -> None:
        """Something must always be possible: otherwise the run would hang, and this fails."""
        if self.chance.random() < 0.5:
            self.loaded = self.version
        if self.moves and self.chance.random() < 0.3:
            self.reference.eta = self.chance.randint(0, self.control.max_staleness)
            self.control.adapt(self.reference.eta)
        progressed = False
        for _ in range(self.chance.randrange(1, 2 * self.control.batch_groups + 1)):
            if self.chance.random() < 0.6:
                progressed |= self.admit()
            elif self.running:
                self.finish()
                progressed = True
        num_collected = len(self.collected)
        self.collect()
        progressed |= len(self.collected) > num_collected
        if len(self.collected) == self.control.batch_groups:
            self.train()
            progressed = True
        self.check()
        stuck = not (progressed or self.running or self.control.may_admit(self.version))
        assert not stuck, "everything finished, nothing can be taken and nothing admitted"


def run(control: StalenessControl, seed: int, drop_rate: float, num_steps: int, moves: bool = False) -> Loop:
    loop = Loop(control, random.Random(seed), drop_rate, moves=moves)
    for _ in range(60 * num_steps):
        loop.step()
        if loop.version == num_steps:
            return loop
    raise AssertionError(f"only {loop.version} of {num_steps} versions were trained")


windows = st.sampled_from([lambda b: 1, lambda b: max(1, b // 2), lambda b: b, lambda b: 3 * b, lambda b: 2])


@repeatable
@given(st.integers(1, 7), st.integers(0, 8), windows, st.sampled_from([0.0, 0.05, 0.3]), st.integers(0, 10**6))
def test_eq_3_the_window_the_ledger_and_the_bound_hold_in_any_order_of_events(
    batch_groups: int,
    eta: int,
    window: Callable[[int], int],
    drop_rate: float,
    seed: int,
) -> None:
    control = StalenessControl(batch_groups, eta, window(batch_groups))
    loop = run(control, seed, drop_rate, num_steps=10)
    assert control.worst_staleness == (eta and eta + math.ceil((window(batch_groups) - 1) / batch_groups))
    assert max(loop.staleness) <= control.worst_staleness


@repeatable
@given(st.integers(1, 7), st.integers(1, 8), windows, st.sampled_from([0.0, 0.05, 0.3]), st.integers(0, 10**6))
def test_invariant_1_eq_3_holds_at_each_admission_with_the_eta_then_in_force(
    batch_groups: int, largest: int, window: Callable[[int], int], drop_rate: float, seed: int
) -> None:
    """η may rise and fall at any moment: each group's bound is that of its own η, and nothing waits for ever."""
    control = StalenessControl(batch_groups, largest, window(batch_groups))
    loop = run(control, seed, drop_rate, num_steps=12, moves=True)
    assert control.worst_staleness is not None and max(loop.staleness) <= control.worst_staleness
    for wrong in (-1, largest + 1):
        with pytest.raises(ValueError, match=f"η = {wrong} lies outside 0 to max_staleness = {largest}"):
            control.adapt(wrong)


@repeatable
@given(st.integers(1, 7), st.integers(0, 4), st.integers(0, 10**6))
def test_an_unlimited_window_takes_any_finished_group(batch_groups: int, eta: int, seed: int) -> None:
    control = StalenessControl(batch_groups, eta, None)
    loop = run(control, seed, 0.1, num_steps=8)
    assert control.worst_staleness == (None if eta else 0)
    assert eta or max(loop.staleness) == 0


def _take(control: StalenessControl, group: int) -> int:
    control.take(group)
    return group


@pytest.mark.parametrize(("eta", "window"), [(0, 4), (1, 1), (1, 2), (1, 4), (2, 5), (2, 6), (3, 12)])
def test_the_bound_is_reached_so_it_is_no_larger_than_it_must_be(eta: int, window: int) -> None:
    """The last group that version 0 admits is taken only when nothing else may be."""
    control, version, batch = StalenessControl(4, eta, window), 0, list[int]()
    straggler = 4 * (eta + 1) - 1
    while straggler not in batch:
        batch = []
        while len(batch) < 4:
            while control.may_admit(version):
                control.admit(version)
            others = (g for g in range(control.num_admitted) if g != straggler and control.may_take(g))
            batch.append(_take(control, next(others, straggler)))
        control.trained(batch)
        version += 1
    assert version - 1 == control.worst_staleness == (eta and eta + math.ceil((window - 1) / 4))


def _long_tailed_run(window: int | None) -> int:
    """η = 3, 2% of the groups take 40 training steps to finish; the worst staleness seen in 80 steps."""
    control, chance, admitted_at = StalenessControl(32, 3, window), random.Random(0), []
    done_at: dict[int, float] = {}
    worst, now, version = 0, 0.0, 0
    while version < 80:
        while control.may_admit(version):
            group = control.admit(version)
            admitted_at.append(version)
            done_at[group] = now + (40.0 if chance.random() < 0.02 else chance.random())
        batch: list[int] = []
        while len(batch) < 32:
            ready = [g for g, done in done_at.items() if done <= now and control.may_take(g)]
            if not ready:
                now = min(done for g, done in done_at.items() if control.may_take(g))
                continue
            batch.append(_take(control, min(ready)))
            del done_at[batch[-1]]
        worst = max(worst, max(version - admitted_at[group] for group in batch))
        control.trained(batch)
        version, now = version + 1, now + 1.0
    return worst


def test_it_is_the_window_that_bounds_a_straggler_and_not_the_counter() -> None:
    assert StalenessControl(32, 3, None).worst_staleness is None
    assert _long_tailed_run(None) > 20
    assert _long_tailed_run(32) <= 4
    assert _long_tailed_run(1) <= 3


def test_the_window_stays_anchored_while_newer_groups_are_taken() -> None:
    control = StalenessControl(2, 4, 3)
    for _ in range(6):
        control.admit(0)
    control.take(1)
    control.take(2)
    # Re-counting "the three oldest untaken" would now offer 3 and 4, and so on past group 0 without end.
    assert [group for group in range(6) if control.may_take(group)] == [0]
    with pytest.raises(InvariantBroken, match="group 3 lies outside the window"):
        control.take(3)
    control.trained([1, 2])
    assert not control.may_take(3)
    control.take(0)
    assert [group for group in range(6) if control.may_take(group)] == [3, 4, 5]


def test_a_dropped_group_leaves_its_place_in_the_window_and_in_eq_3() -> None:
    control = StalenessControl(2, 1, 2)
    for _ in range(4):
        control.admit(0)
    assert not control.may_admit(0) and not control.may_take(2)
    control.drop(1)
    assert control.may_take(2) and not control.may_take(3) and control.may_admit(0)
    control.take(2)
    control.drop(2)  # its training step was skipped
    assert control.may_take(3)
    assert control.admit(0) == 4 and control.admit(0) == 5 and not control.may_admit(0)
    control.check_ledger()


def test_eta_zero_admits_one_batch_and_no_more_until_its_version_is_loaded() -> None:
    control = StalenessControl(3, 0, 3)
    assert [control.admit(0) for _ in range(3)] == [0, 1, 2]
    for group in (2, 0, 1):
        assert not control.may_admit(0)
        control.take(group)
    control.trained([0, 1, 2])
    assert not control.may_admit(0) and control.may_admit(1)


def test_a_group_leaves_exactly_once() -> None:
    control = StalenessControl(1, 3, 4)
    for _ in range(4):
        control.admit(0)
    control.take(0)
    control.trained([0])
    control.drop(1)
    for group in (0, 1, 4):
        with pytest.raises(InvariantBroken, match=f"group {group} is dropped, but it is not in flight"):
            control.drop(group)
        with pytest.raises(InvariantBroken, match=f"group {group} is not there to be taken"):
            control.take(group)
        with pytest.raises(InvariantBroken, match="without being taken, or twice"):
            control.trained([group])
    with pytest.raises(InvariantBroken, match="without being taken"):
        control.trained([2])
    control.check_ledger()


def test_a_training_step_trains_exactly_one_batch_of_groups() -> None:
    control = StalenessControl(2, 3, 2)
    control.admit(0)
    control.take(0)
    with pytest.raises(InvariantBroken, match="trains 2 groups, not 1"):
        control.trained([0])
    with pytest.raises(InvariantBroken, match="trains 2 groups, not 1"):
        control.trained([0, 0])


def test_a_ledger_that_does_not_add_up_is_reported() -> None:
    control = StalenessControl(2, 3, 2)
    control.admit(0)
    control.num_trained += 1
    with pytest.raises(InvariantBroken, match=r"1 admitted, but 1 trained \+ 0 dropped \+ 1 in flight"):
        control.check_ledger()


@repeatable
@given(st.integers(1, 5), st.integers(0, 4), windows, st.integers(0, 10**6), st.integers(1, 30))
@example(1, 0, lambda b: b, 0, 1)
def test_a_restored_control_decides_as_the_one_that_was_lost(
    batch_groups: int,
    eta: int,
    window: Callable[[int], int],
    seed: int,
    num_steps: int,
) -> None:
    control = StalenessControl(batch_groups, eta, window(batch_groups))
    loop = Loop(control, random.Random(seed), 0.2)
    for _ in range(num_steps):
        loop.step()
    states = loop.reference.states
    sets = {name: {g for g, state in enumerate(states) if state == name} for name in ("trained", "dropped", "taken")}
    restored = StalenessControl.restore(batch_groups, eta, window(batch_groups), num_admitted=len(states), **sets)
    loop.control = restored
    loop.check()
    for _ in range(20):
        loop.step()
    assert restored.worst_staleness is not None
    assert max(loop.staleness, default=0) <= restored.worst_staleness


def test_a_record_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(InvariantBroken, match="more than one"):
        StalenessControl.restore(2, 1, 2, num_admitted=4, trained={0, 1}, dropped={1})
    with pytest.raises(InvariantBroken, match="not among the 4"):
        StalenessControl.restore(2, 1, 2, num_admitted=4, trained={0, 4}, dropped=set())


def test_the_config_writes_one_batch_as_0_and_no_bound_as_minus_1() -> None:
    assert [resolve_window(window, 32) for window in (0, -1, 1, 96)] == [32, None, 1, 96]
    for wrong in ({"batch_groups": 0}, {"max_staleness": -1}, {"window": 0}):
        with pytest.raises(ValueError, match="window = "):
            StalenessControl(**({"batch_groups": 2, "max_staleness": 1, "window": 2} | wrong))


@pytest.mark.parametrize("window", [20_000, 40_000, None])
def test_a_straggler_before_tens_of_thousands_of_groups_costs_no_search(window: int | None) -> None:
    control, num_groups = StalenessControl(1, 40_000, window), 40_000
    started = time.process_time()
    for _ in range(num_groups):
        control.admit(0)
    for group in range(1, 20_000):
        control.take(group)
        control.trained([group]) if group % 3 else control.drop(group)
    control.take(0)
    assert control.may_take(20_000)
    # Searching the window at every operation would take minutes.
    assert time.process_time() - started < 5
