"""The buffer hands out finished groups in the order staleness allows; invariant 2: conservation."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.buffer import Buffer
from headway.control.staleness import StalenessControl
from headway.errors import InvariantBroken
from headway.types import Failure, Group

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=100)


def group(group_id: int) -> Group:
    return Group(id=group_id, prompt_index=0, eta=0, size=1, trajectories=(), failures=(Failure(0, "test", 0),))


def buffer_of(batch_groups: int, window: int | None, num_admitted: int, max_staleness: int = 50) -> Buffer:
    staleness = StalenessControl(batch_groups, max_staleness, window)
    for _ in range(num_admitted):
        staleness.admit(0)
    return Buffer(staleness)


def ids(groups: tuple[Group, ...]) -> list[int]:
    return [group.id for group in groups]


class Watched(StalenessControl):
    """Fails when a group is taken before an older finished one or outside the window, and counts the looks at it."""

    def __init__(self, batch_groups: int, max_staleness: int, window: int | None) -> None:
        super().__init__(batch_groups, max_staleness, window)
        self.finished: set[int] = set()
        self.num_looks = 0

    def may_take(self, group: int) -> bool:
        self.num_looks += 1
        return super().may_take(group)

    def take(self, group: int) -> None:
        assert group == min(self.finished)
        self.finished.remove(group)
        super().take(group)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test to its end; a take that is never woken fails with a timeout instead of hanging."""

    def wrapper() -> None:
        async def with_deadline() -> None:
            async with asyncio.timeout(10):
                await test()

        asyncio.run(with_deadline())

    wrapper.__name__ = test.__name__
    return wrapper


@in_loop
async def test_finished_groups_are_handed_out_oldest_first_whatever_order_they_came_in() -> None:
    buffer = buffer_of(batch_groups=2, window=None, num_admitted=6)
    for group_id in (5, 3, 0, 4):
        buffer.put(group(group_id))
    assert buffer.num_ready == 4
    assert ids(await buffer.take_batch()) == [0, 3]
    assert ids(await buffer.take_batch()) == [4, 5]
    assert buffer.num_ready == 0


@in_loop
async def test_a_batch_is_in_id_order_though_its_groups_were_taken_in_another() -> None:
    buffer = buffer_of(batch_groups=3, window=3, num_admitted=3)
    taker = asyncio.create_task(buffer.take_batch())
    for group_id in (2, 0, 1):
        buffer.put(group(group_id))
        await settle()
    assert ids(await taker) == [0, 1, 2]


@in_loop
async def test_groups_outside_the_window_wait_for_the_straggler() -> None:
    buffer = buffer_of(batch_groups=2, window=2, num_admitted=6)
    taker = asyncio.create_task(buffer.take_batch())
    for group_id in (5, 4, 3, 2, 1):
        buffer.put(group(group_id))
        await settle()
    assert not taker.done() and buffer.num_ready == 5 and buffer.staleness.num_taken == 1
    buffer.put(group(0))
    assert ids(await taker) == [0, 1]
    assert ids(await buffer.take_batch()) == [2, 3]


@in_loop
async def test_dropping_the_straggler_wakes_the_taker() -> None:
    buffer = buffer_of(batch_groups=2, window=1, num_admitted=3)
    taker = asyncio.create_task(buffer.take_batch())
    buffer.put(group(1))
    buffer.put(group(2))
    await settle()
    assert not taker.done()
    assert buffer.drop(0) is None
    assert ids(await taker) == [1, 2]


@in_loop
async def test_a_dropped_group_is_never_handed_out_whether_waiting_or_already_collected() -> None:
    buffer = buffer_of(batch_groups=2, window=None, num_admitted=6)
    taker = asyncio.create_task(buffer.take_batch())
    buffer.put(group(0))
    await settle()
    collected = buffer.drop(0)
    assert collected is not None and collected.id == 0
    buffer.put(group(2))
    waiting = buffer.drop(2)
    assert waiting is not None and waiting.id == 2
    buffer.put(group(1))
    await settle()
    assert not taker.done() and buffer.num_ready == 1
    buffer.put(group(3))
    assert ids(await taker) == [1, 3]
    buffer.staleness.check_ledger()


@in_loop
async def test_a_cancelled_taker_leaves_its_partial_batch_to_the_next() -> None:
    buffer = buffer_of(batch_groups=3, window=3, num_admitted=4)
    taker = asyncio.create_task(buffer.take_batch())
    buffer.put(group(1))
    await settle()
    assert buffer.staleness.num_taken == 1
    taker.cancel()
    await asyncio.wait([taker])
    assert taker.cancelled() and buffer.num_ready == 1
    buffer.put(group(2))
    buffer.put(group(0))
    assert ids(await buffer.take_batch()) == [0, 1, 2]


@in_loop
async def test_a_taker_cancelled_in_the_moment_its_batch_is_complete_loses_nothing() -> None:
    buffer = buffer_of(batch_groups=2, window=2, num_admitted=2)
    taker = asyncio.create_task(buffer.take_batch())
    await settle()
    buffer.put(group(0))
    buffer.put(group(1))
    taker.cancel()
    await asyncio.wait([taker])
    assert taker.cancelled() and buffer.num_ready == 2
    assert ids(await buffer.take_batch()) == [0, 1]


@in_loop
async def test_two_takers_get_different_groups() -> None:
    buffer = buffer_of(batch_groups=2, window=4, num_admitted=4)
    takers = [asyncio.create_task(buffer.take_batch()) for _ in range(2)]
    await settle()
    for group_id in (3, 1, 0, 2):
        buffer.put(group(group_id))
        await settle()
    batches = [ids(await taker) for taker in takers]
    assert sorted(batches[0] + batches[1]) == [0, 1, 2, 3]


@in_loop
async def test_a_waiting_taker_sleeps_until_something_changes_and_then_wakes_at_once() -> None:
    watched = Watched(batch_groups=1, max_staleness=2, window=1)
    buffer = Buffer(watched)
    watched.finished = {watched.admit(0), watched.admit(0)}
    buffer.put(group(1))
    taker = asyncio.create_task(buffer.take_batch())
    await settle()
    num_looks = watched.num_looks
    await settle()
    assert watched.num_looks == num_looks > 0
    buffer.put(group(0))
    await settle()
    assert taker.done() and ids(await taker) == [0]


def test_a_group_is_put_once_and_only_while_it_is_in_flight() -> None:
    buffer = buffer_of(batch_groups=1, window=4, num_admitted=3)
    buffer.put(group(0))
    with pytest.raises(InvariantBroken, match="group 0 finished twice"):
        buffer.put(group(0))
    assert ids(asyncio.run(buffer.take_batch())) == [0]
    buffer.drop(1)
    for gone in (0, 1, 3):
        with pytest.raises(InvariantBroken, match=f"group {gone} finished twice, or after it left"):
            buffer.put(group(gone))
    with pytest.raises(InvariantBroken, match="not in flight"):
        buffer.drop(1)


def test_the_buffer_of_a_resumed_run_hands_out_what_the_lost_one_would_have() -> None:
    buffer = Buffer(StalenessControl.restore(2, 3, 2, num_admitted=7, trained={0, 1}, dropped={3}))
    for group_id in (5, 2, 4):
        buffer.put(group(group_id))
    assert ids(asyncio.run(buffer.take_batch())) == [2, 4]
    buffer.staleness.trained([2, 4])
    buffer.put(group(6))
    assert ids(asyncio.run(buffer.take_batch())) == [5, 6]


async def run_at_random(batch_groups: int, window: int | None, chance: random.Random) -> None:
    """Groups finish, are dropped and are taken by takers that are often cancelled, also in the moment of waking."""
    watched = Watched(batch_groups, 6, window)
    buffer = Buffer(watched)
    running = [watched.admit(0) for _ in range(7 * batch_groups)]
    taker = asyncio.create_task(buffer.take_batch())
    while running:
        for group_id in chance.sample(running, chance.randint(1, min(3, len(running)))):
            running.remove(group_id)
            if chance.random() < 0.15:
                buffer.drop(group_id)
            else:
                watched.finished.add(group_id)
                buffer.put(group(group_id))
        if chance.random() < 0.3:
            taker.cancel()
        await settle()
        while taker.done():
            if not taker.cancelled():
                watched.trained(ids(taker.result()))
            taker = asyncio.create_task(buffer.take_batch())
            await settle()
        watched.check_ledger()
        assert buffer.num_ready + len(running) == watched.num_untaken + watched.num_taken
    assert buffer.num_ready < batch_groups, "all groups finished, but a full batch was held back"
    taker.cancel()


@repeatable
@given(st.integers(1, 5), st.sampled_from([1, 2, 3, 8, None]), st.integers(0, 10**6))
def test_every_group_is_handed_out_once_or_dropped_once_oldest_first_inside_the_window(
    batch_groups: int, window: int | None, seed: int
) -> None:
    asyncio.run(run_at_random(batch_groups, window, random.Random(seed)))
