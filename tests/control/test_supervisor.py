"""How often a worker may be lost, how long it is waited for, and who is believed about it."""

import asyncio
import time

import pytest

from headway.config import SuperviseSection
from headway.control.supervisor import Restarts, Supervised, within
from headway.errors import DeadlineExceeded, WorkerDied


def test_each_restart_waits_twice_as_long_as_the_one_before_and_a_minute_at_most() -> None:
    restarts = Restarts(SuperviseSection(backoff_s=2.0, max_failures=20))
    assert [restarts.failed(float(now)) for now in range(8)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_too_many_losses_are_counted_within_the_window_alone() -> None:
    restarts = Restarts(SuperviseSection(backoff_s=1.0, max_failures=2, window_s=100.0))
    assert [restarts.failed(now) for now in (0.0, 50.0)] == [1.0, 2.0]
    assert restarts.failed(101.0) == 2.0, "the first is forgotten"
    assert restarts.failed(102.0) is None
    assert Restarts(SuperviseSection(max_failures=0)).failed(0.0) is None


def test_a_failure_is_reported_once_and_only_for_the_present_incarnation() -> None:
    async def scenario() -> None:
        first, second = object(), object()

        async def start() -> object:
            return second

        supervised: Supervised[object] = Supervised("engine", start)
        supervised.started(first)
        supervised.serving.set()
        supervised.fail(second, WorkerDied("of another worker"))
        assert not supervised.failure.done() and await supervised.get() is first
        supervised.fail(first, WorkerDied("the first report"))
        supervised.fail(first, WorkerDied("the second"))
        assert str(supervised.failure.result()) == "the first report" and not supervised.serving.is_set()
        supervised.stopped()
        supervised.fail(None, WorkerDied("while it is down"))
        supervised.started(await supervised.start())
        supervised.fail(first, WorkerDied("late news"))
        assert not supervised.failure.done() and supervised.incarnation == 1 and supervised.worker is second

    asyncio.run(scenario())


def test_what_takes_too_long_is_named() -> None:
    async def scenario() -> None:
        assert await within(5.0, "nothing", asyncio.sleep(0, "done")) == "done"
        with pytest.raises(DeadlineExceeded, match=r"^a health check of engine-3 took longer than 0\.01 s$"):
            await within(0.01, "a health check of engine-3", asyncio.Event().wait())

    asyncio.run(scenario())


def test_an_answer_that_came_while_this_process_stood_still_is_in_time() -> None:
    async def scenario() -> str:
        async def answer() -> str:
            await asyncio.sleep(0.1)
            return "here"

        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.5)  # a stopped process, to its event loop
        return await within(0.2, "a health check", answer())

    assert asyncio.run(scenario()) == "here"


def test_a_call_that_is_given_up_is_cancelled() -> None:
    ended: list[str] = []

    async def scenario() -> None:
        async def never() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        with pytest.raises(DeadlineExceeded, match="a health check took longer than"):
            await within(0.05, "a health check", never())

    asyncio.run(scenario())
    assert ended == ["cancelled"]
