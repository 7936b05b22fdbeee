"""Several awaitables concurrently: all results, or one failure and nothing left running."""

import asyncio
from collections.abc import Awaitable
from typing import Any


async def together(*starts: Awaitable[Any]) -> list[Any]:
    """All results; when one fails, the others are cancelled first, so that no worker starts after the run has ended."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a task group, which wraps it, sometimes more than once."""
    first = errors.exceptions[0]
    return first_cause(first) if isinstance(first, BaseExceptionGroup) else first
