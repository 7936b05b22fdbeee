"""The priority semaphore: order, limits that change, and places that are given up."""

import asyncio

from headway.runtime.semaphore import PrioritySemaphore


async def _turns(num: int = 20) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def test_a_semaphore_admits_urgent_requests_first_and_the_others_in_order() -> None:
    async def scenario() -> None:
        semaphore, inside, leave = PrioritySemaphore(), list[int](), asyncio.Event()

        async def visit(number: int, urgent: bool = False) -> None:
            async with semaphore.slot(urgent):
                inside.append(number)
                await leave.wait()

        semaphore.set_limit(2)
        visits = [asyncio.create_task(visit(number)) for number in range(5)]
        await _turns()
        assert inside == [0, 1]
        visits.append(asyncio.create_task(visit(9, urgent=True)))
        await _turns()
        assert semaphore.num_waiting == 4
        visits[2].cancel()
        await _turns()
        semaphore.set_limit(4)
        await _turns()
        assert inside == [0, 1, 9, 3], "a cancelled waiter is skipped"
        semaphore.set_limit(None)
        await _turns()
        assert inside == [0, 1, 9, 3, 4]
        leave.set()
        await asyncio.gather(*visits, return_exceptions=True)
        semaphore.set_limit(1)
        async with semaphore.slot():
            pass

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_place_given_up_in_the_moment_it_is_got_goes_to_the_next() -> None:
    async def scenario() -> None:
        semaphore = PrioritySemaphore(1)
        await semaphore.acquire()
        leaving, staying = (asyncio.create_task(semaphore.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        semaphore.release()  # goes to the first, which is cancelled before it runs
        leaving.cancel()
        await staying
        assert leaving.cancelled() and semaphore.num_waiting == 0

    asyncio.run(asyncio.wait_for(scenario(), 20))
