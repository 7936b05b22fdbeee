"""How often a worker may be lost, how long it is waited for, and who is believed about it."""

import asyncio
import time

import pytest

from headway.config import SuperviseSection
from headway.control.supervisor import Kept, Restarts, within
from headway.errors import DeadlineExceeded, WorkerDied


def test_each_restart_waits_twice_as_long_as_the_one_before_and_a_minute_at_most() -> None:
    restarts = Restarts(SuperviseSection(backoff_s=2.0, max_failures=20))
    assert [restarts.lost(float(now)) for now in range(8)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_too_many_losses_are_counted_within_the_window_alone() -> None:
    restarts = Restarts(SuperviseSection(backoff_s=1.0, max_failures=2, window_s=100.0))
    assert [restarts.lost(now) for now in (0.0, 50.0)] == [1.0, 2.0]
    assert restarts.lost(101.0) == 2.0, "the first is forgotten"
    assert restarts.lost(102.0) is None
    assert Restarts(SuperviseSection(max_failures=0)).lost(0.0) is None


def test_a_loss_is_heard_once_and_only_of_the_present_life() -> None:
    async def scenario() -> None:
        first, second = object(), object()

        async def start() -> object:
            return second

        kept = Kept("engine", first, start)
        kept.serving.set()
        kept.lose(second, WorkerDied("of a stranger"))
        assert not kept.lost.done() and await kept.get() is first
        kept.lose(first, WorkerDied("the first word"))
        kept.lose(first, WorkerDied("the second"))
        assert str(kept.lost.result()) == "the first word" and not kept.serving.is_set()
        kept.end()
        kept.lose(None, WorkerDied("while it is down"))
        kept.begin(await kept.start())
        kept.lose(first, WorkerDied("late news"))
        assert not kept.lost.done() and kept.life == 1 and kept.worker is second

    asyncio.run(scenario())


def test_what_takes_too_long_is_named() -> None:
    async def scenario() -> None:
        assert await within(5.0, "nothing", asyncio.sleep(0, "done")) == "done"
        with pytest.raises(DeadlineExceeded, match=r"^a look at engine-3 took longer than 0\.01 s$"):
            await within(0.01, "a look at engine-3", asyncio.Event().wait())

    asyncio.run(scenario())


def test_an_answer_that_came_while_this_process_stood_still_is_in_time() -> None:
    async def scenario() -> str:
        async def answer() -> str:
            await asyncio.sleep(0.1)
            return "here"

        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.5)  # a stopped process, to its event loop
        return await within(0.2, "a look", answer())

    assert asyncio.run(scenario()) == "here"


def test_a_call_that_is_given_up_is_cancelled() -> None:
    ended: list[str] = []

    async def scenario() -> None:
        async def never() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        with pytest.raises(DeadlineExceeded, match="a look took longer than"):
            await within(0.05, "a look", never())

    asyncio.run(scenario())
    assert ended == ["cancelled"]
