"""The folds: what a resume starts from is what happened, and every generated token has exactly one fate."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import blank

from headway.errors import InvariantBroken
from headway.record.events import Evaluated, Event, FailedTrajectory, TokenCounts
from headway.record.run import Run, fold


class Log:
    """Events without a file; fields a test does not care about are empty."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def append(self, kind: str, **fields: Any) -> None:
        self.events.append(blank(kind, seq=len(self.events), **fields))

    def start(self) -> None:
        self.append("run_started", config={"run": {"seed": 1}}, config_hash="abc", num_prompts=10)

    def admit(self, *groups: int, version: int = 0) -> None:
        for group in groups:
            self.append("admitted", group=group, prompt=group % 10, eta=2, version=version)

    def finish(self, *groups: int, tokens: int = 10, failures: tuple[Any, ...] = ()) -> None:
        for group in groups:
            place = {"shard": "groups-00000.bin", "offset": 100 * group, "num_bytes": 92, "checksum": f"{group:016x}"}
            self.append("finished", group=group, lengths=(tokens,), failures=failures, **place)

    def take(self, version: int, *groups: int) -> None:
        self.append("taken", version=version, groups=groups)

    def train(self, version: int, *groups: int, tokens: int) -> None:
        self.append("trained", version=version, groups=groups, tokens=tokens, digest=f"digest {version}")

    def look(self, generated: int, recomputed: int = 0, engine: str = "engine-0") -> None:
        """What an engine generated since the last time."""
        self.append("stats", engine=engine, generated=generated, recomputed=recomputed)

    def resume(self, version: int, lost_tokens: int = 0) -> None:
        self.append("resumed", version=version, checkpoint_version=0, num_regenerated=0, lost_tokens=lost_tokens)

    def end(self, status: str = "finished") -> None:
        self.append("ended", status=status, cause="")


def two_steps() -> Log:
    """Two batches of two; the second was taken when the process was killed."""
    log = Log()
    log.start()
    log.admit(0, 1, 2, 3, 4, 5)
    log.finish(1, 0)
    log.take(0, 0, 1)
    log.train(1, 0, 1, tokens=20)
    log.append("checkpointed", version=1, slot="a", seconds=0.1)
    log.append("evaluated", label="step", version=1, accuracy=0.5)
    log.finish(4, 3, 2)
    log.take(1, 2, 3)
    return log


def test_the_state_holds_what_a_resume_needs() -> None:
    state = fold(two_steps().events)
    assert (state.config, state.config_hash, state.num_prompts) == ({"run": {"seed": 1}}, "abc", 10)
    assert [(group.prompt, group.eta, group.version) for group in state.groups] == [(n, 2, 0) for n in range(6)]
    ref = state.ref(3)
    assert (ref.shard, ref.offset, ref.num_bytes, ref.checksum) == ("groups-00000.bin", 300, 92, f"{3:016x}")
    assert state.batches == [(0, (0, 1)), (1, (2, 3))]
    assert (state.num_trained, state.digests, state.untrained_batch) == (1, {1: "digest 1"}, (2, 3))
    assert (state.unfinished, state.waiting, state.dropped) == ([5], [4], {})
    assert state.checkpoints == [(1, "a")]
    assert [event.accuracy for event in state.all(Evaluated)] == [0.5]
    assert state.status == ""


def test_a_resumed_run_goes_on_where_its_log_stopped() -> None:
    log = two_steps()
    log.resume(version=1)
    log.train(2, 2, 3, tokens=20)
    log.append("checkpointed", version=2, slot="b", seconds=0.1)
    log.admit(6, version=2)
    log.finish(5)
    log.take(2, 4, 5)
    log.train(3, 4, 5, tokens=20)
    log.append("checkpointed", version=3, slot="a", seconds=0.1)
    log.end()
    state = fold(log.events)
    assert state.batches == [(0, (0, 1)), (1, (2, 3)), (2, (4, 5))]
    assert (state.num_trained, state.untrained_batch, state.unfinished, state.waiting) == (3, None, [6], [])
    assert state.checkpoints == [(3, "a"), (2, "b")]  # version 1 was written over
    assert state.status == "finished"
    log.resume(version=3)
    assert fold(log.events).status == ""


@pytest.mark.parametrize("crashed_between", [False, True])
def test_a_skipped_batch_leaves_as_dropped_even_if_the_crash_came_before_its_dropped_event(
    crashed_between: bool,
) -> None:
    log = two_steps()
    log.append("skipped", version=1, groups=(2, 3), reason="the loss is not finite")
    if not crashed_between:
        log.append("dropped", groups=(2, 3), reason="skipped", tokens=20)
    state = fold(log.events)
    assert state.dropped == {2: "skipped", 3: "skipped"}
    assert (state.batches, state.num_trained, state.untrained_batch) == ([(0, (0, 1))], 1, None)
    assert state.waiting == [4]
    made = fold(log.events)
    made.check_tokens()
    assert (made.tokens.dropped, made.tokens.waiting) == ({"skipped": 20}, 10)
    log.finish(5)
    log.take(1, 4, 5)
    assert fold(log.events).batches == [(0, (0, 1)), (1, (4, 5))]


def test_invariant_2_a_group_leaves_exactly_once() -> None:
    log = two_steps()
    log.append("dropped", groups=(4,), reason="failed", tokens=10)
    log.append("dropped", groups=(5,), reason="failed", tokens=3)
    state = fold(log.events)
    trained = [group for _, groups in state.batches for group in groups]
    assert sorted([*trained, *state.dropped, *state.waiting, *state.unfinished]) == list(range(len(state.groups)))


def broken(log: Log, kind: str, **fields: Any) -> str:
    log.append(kind, **fields)
    with pytest.raises(InvariantBroken) as caught:
        fold(log.events)
    sentence = str(caught.value)
    assert sentence.startswith(f"the event log contradicts itself at line {len(log.events)}: ")
    return sentence.partition(": ")[2]


def test_invariant_14_a_log_in_which_a_group_is_trained_twice_is_refused() -> None:
    log = two_steps()
    log.train(2, 2, 3, tokens=20)
    assert broken(log, "taken", version=2, groups=(2, 4)) == "group 2 is taken after it was taken for version 1"
    assert "trained twice" in broken(two_steps(), "trained", version=1, groups=(2, 3))
    assert "group 3 is taken after" in broken(two_steps_trained(), "taken", version=2, groups=(3,))
    assert "group 4 is taken after" in broken(two_steps_trained(), "taken", version=2, groups=(4, 4))


def two_steps_trained() -> Log:
    log = two_steps()
    log.train(2, 2, 3, tokens=20)
    return log


def test_invariant_2_a_log_in_which_a_group_is_both_dropped_and_trained_is_refused() -> None:
    log = two_steps_trained()
    log.append("dropped", groups=(4,), reason="failed", tokens=10)
    assert broken(log, "taken", version=2, groups=(4,)) == "group 4 is taken after it was dropped as failed"
    sentence = broken(two_steps_trained(), "dropped", groups=(0,), reason="failed", tokens=10)
    assert sentence == "group 0 is dropped after it was taken for version 0"


@pytest.mark.parametrize(
    ("sentence", "kind", "fields"),
    [
        ("group 3 is admitted twice", "admitted", {"group": 3}),
        ("group 7 is admitted before group 6, whose prompt is skipped", "admitted", {"group": 7}),
        ("group 9 is finished but was never admitted", "finished", {"group": 9}),
        ("group 4 is finished twice", "finished", {"group": 4}),
        ("group 1 is finished after it was taken for version 0", "finished", {"group": 1}),
        ("group 9 is dropped but was never admitted", "dropped", {"groups": (9,)}),
        ("group 4 is requeued but was not dropped", "requeued", {"groups": (4,), "reason": "verifier: away"}),
        ("group 6 repeats group 4, which is not requeued", "admitted", {"group": 6, "repeats": 4}),
        ("a second batch is taken for version 1", "taken", {"version": 1, "groups": (4,)}),
        ("a batch is taken for version 2 while the weights are at 1", "taken", {"version": 2, "groups": (4,)}),
        ("groups [2, 4] were not the batch taken for version 1", "trained", {"version": 2, "groups": (2, 4)}),
        ("groups [2, 3] were not the batch taken for version 2", "trained", {"version": 3, "groups": (2, 3)}),
        ("groups [2] were not the batch taken for version 1", "skipped", {"version": 1, "groups": (2,)}),
        ("the run resumes at version 0 after version 1", "resumed", {"version": 0}),
        ("a second run starts in the same log", "run_started", {"config_hash": "other"}),
    ],
)
def test_a_log_that_contradicts_itself_is_refused(sentence: str, kind: str, fields: dict[str, Any]) -> None:
    assert broken(two_steps(), kind, **fields) == sentence


def test_a_group_taken_before_it_is_finished_is_refused() -> None:
    assert broken(two_steps_trained(), "taken", version=2, groups=(5,)) == "group 5 is taken before it is finished"


def test_the_ledger_tells_the_fate_of_every_token() -> None:
    log = two_steps()  # 20 trained; 30 waiting, 20 of them in the batch being trained
    log.look(62, recomputed=7)
    log.look(5, engine="engine-1")
    log.append("dropped", groups=(5,), reason="failed", tokens=4)
    log.admit(6, 7)
    log.finish(
        6,
        tokens=2,
        failures=(
            FailedTrajectory(1, "verifier: ValueError('x')", 3),
            FailedTrajectory(2, "verifier: KeyError('y')", 1),
        ),
    )
    made = fold(log.events)
    made.check_tokens()
    dropped = {"failed": 4, "trajectory: verifier": 4}
    expected = TokenCounts(generated=67, trained=20, waiting=32, in_flight=7, dropped=dropped, lost=0, recomputed=7)
    assert made.tokens.counts() == expected


def test_tokens_in_flight_at_the_end_stay_unfinished_and_are_lost_when_the_run_resumes() -> None:
    log = two_steps()
    log.look(60, recomputed=9)
    log.end("stopped")
    made = fold(log.events)
    assert made.tokens.in_flight == 10
    log.resume(version=1, lost_tokens=10)
    log.look(4, recomputed=1)
    made = fold(log.events)
    made.check_tokens()
    made = made.tokens
    assert (made.generated, made.lost, made.in_flight, made.recomputed) == (64, 10, 4, 10)


def test_a_crash_loses_what_the_engines_had_counted_or_the_resume_found_whichever_is_more() -> None:
    for counted, found, lost in ((57, 0, 7), (57, 30, 30), (20, 0, 0)):
        log = two_steps()
        log.look(counted)
        log.resume(version=1, lost_tokens=found)
        made = fold(log.events)
        made.check_tokens()
        assert (made.tokens.lost, made.tokens.generated) == (lost, 50 + lost)


def test_what_engines_generated_adds_up() -> None:
    log = two_steps()
    for count in (40, 5, 3, 6):
        log.look(count)
    assert fold(log.events).tokens.generated == 54


def test_tokens_lost_with_a_worker_are_in_flight_until_the_run_has_finished() -> None:
    log = two_steps_trained()
    log.look(55)
    log.append("worker_lost", worker="rollout-0", cause="killed", groups=())
    made = fold(log.events)
    assert (made.tokens.in_flight, made.tokens.lost) == (5, 0)
    log.end()
    made = fold(log.events)
    made.check_tokens()
    assert (made.tokens.generated, made.tokens.in_flight, made.tokens.lost) == (55, 0, 5)


def test_an_engine_that_was_lost_may_have_sampled_more_than_it_told() -> None:
    """What came home is counted all the same, and a count that passes the old one before a look is not mistaken."""
    log = two_steps_trained()
    log.look(30)
    log.append("worker_lost", worker="engine-0", cause="killed", groups=())
    log.end()
    made = fold(log.events)
    made.check_tokens()
    assert (made.tokens.generated, made.tokens.in_flight, made.tokens.lost) == (50, 0, 0)
    log = two_steps_trained()
    log.look(30)
    log.append("worker_lost", worker="engine-0", cause="killed", groups=())
    log.look(40)
    assert fold(log.events).tokens.generated == 70


def test_groups_from_a_file_need_no_engine_to_add_up() -> None:
    log = two_steps_trained()
    log.end()
    made = fold(log.events)
    made.check_tokens()
    assert (made.tokens.generated, made.tokens.trained, made.tokens.waiting, made.tokens.in_flight) == (50, 40, 10, 0)


def test_a_ledger_that_does_not_add_up_says_so() -> None:
    log = two_steps()
    log.train(2, 2, 3, tokens=19)
    with pytest.raises(InvariantBroken, match="50 tokens finished, but 39 trained, 10 waiting, 0 dropped"):
        fold(log.events).check_tokens()
    log = two_steps()
    log.look(49)
    log.end()
    with pytest.raises(InvariantBroken, match="groups hold 1 tokens that no engine generated"):
        fold(log.events).check_tokens()


class Simulation:
    """A run that really counts its tokens, with failures, drops, skipped steps, kills and resumes, all by chance."""

    def __init__(self, seed: int, batch: int) -> None:
        self.random, self.batch = random.Random(seed), batch
        self.log = Log()
        self.log.start()
        self.in_flight: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.taken: list[int] = []
        self.num_admitted = self.version = 0
        self.trained = self.dropped = self.lost = 0
        self.counter = 0  # the engine's, since its process started

    def step(self) -> None:
        """One thing that can happen now."""
        self.random.choice(
            [self.admit, self.generate, self.generate, self.finish, self.finish, self.train, self.kill]
        )()

    def admit(self) -> None:
        self.log.admit(self.num_admitted, version=self.version)
        self.in_flight[self.num_admitted] = 0
        self.num_admitted += 1

    def generate(self) -> None:
        for group in self.in_flight:
            tokens = self.random.randrange(5)
            self.in_flight[group] += tokens
            self.counter += tokens

    def finish(self) -> None:
        if not self.in_flight:
            return
        group = self.random.choice(list(self.in_flight))
        tokens = self.in_flight.pop(group)
        failed = self.random.randrange(tokens + 1) if self.random.random() < 0.3 else 0
        self.dropped += failed
        if self.random.random() < 0.1:
            self.log.append("dropped", groups=(group,), reason="failed", tokens=tokens)
            self.dropped += tokens - failed
        else:
            self.log.finish(group, tokens=tokens - failed, failures=(FailedTrajectory(0, "workflow: broke", failed),))
            self.ready[group] = tokens - failed

    def train(self) -> None:
        if not self.taken:
            if len(self.ready) >= self.batch:
                self.taken = sorted(self.ready)[: self.batch]
                self.log.take(self.version, *self.taken)
            return
        groups, self.taken = self.taken, []
        tokens = sum(self.ready.pop(group) for group in groups)
        if self.random.random() < 0.2:
            self.log.append("skipped", version=self.version, groups=tuple(groups), reason="not finite")
            self.dropped += tokens
            if self.random.random() < 0.5:
                self.kill()
            else:
                self.log.append("dropped", groups=tuple(groups), reason="skipped", tokens=tokens)
            return
        self.version += 1
        self.trained += tokens
        self.log.train(self.version, *groups, tokens=tokens)

    def kill(self) -> None:
        self.log.look(self.counter)
        lost, self.counter = sum(self.in_flight.values()), 0
        self.lost += lost
        self.in_flight = dict.fromkeys(self.in_flight, 0)
        self.log.resume(self.version, lost_tokens=fold(self.log.events).tokens.in_flight)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4), num_steps=st.integers(1, 120))
def test_invariants_2_and_14_the_folds_agree_with_a_run_that_counts_for_itself(
    seed: int, batch: int, num_steps: int
) -> None:
    run, state = Simulation(seed, batch), Run()
    num_seen = 0
    for _ in range(num_steps):
        run.step()
        for event in run.log.events[num_seen:]:
            state.on_event(event)
            state.check_tokens()
            made = state.tokens
            assert made.generated == made.trained + made.waiting + made.in_flight + made.dropped.total() + made.lost
        num_seen = len(run.log.events)
        assert state.unfinished == list(run.in_flight)
        assert state.waiting == sorted(run.ready.keys() - set(run.taken))
        assert (state.untrained_batch or ()) == tuple(run.taken)
        assert (state.num_trained, len(state.groups)) == (run.version, run.num_admitted)
    run.log.look(run.counter)
    run.log.end("stopped")
    made = fold(run.log.events)
    made.check_tokens()
    assert (made.tokens.trained, made.tokens.dropped.total(), made.tokens.lost) == (run.trained, run.dropped, run.lost)
    assert (made.tokens.waiting, made.tokens.in_flight) == (sum(run.ready.values()), sum(run.in_flight.values()))
