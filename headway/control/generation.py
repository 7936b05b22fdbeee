"""The generating half alone, supervised like that of a run: engines serve the model as it is on disk."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from headway.config import Config
from headway.control.engine_pool import EnginePool, Published
from headway.control.rollout_pool import RolloutPool
from headway.control.supervisor import Supervisor
from headway.control.workers import Fleet, open_runtime
from headway.record.events import Event
from headway.record.phases import phase
from headway.runtime.gather import first_cause, together
from headway.types import Scores


@asynccontextmanager
async def open_generation(config: Config, emit: Callable[[Event], object]) -> AsyncIterator[RolloutPool]:
    """A rollout pool with engines that serve; nothing is recorded, `emit` gets the events."""
    try:
        async with _generation(config, emit) as rollout:
            yield rollout
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from errors


@asynccontextmanager
async def _generation(config: Config, emit: Callable[[Event], object]) -> AsyncIterator[RolloutPool]:
    async with open_runtime(config, Path(config.run.dir)) as runtime, asyncio.TaskGroup() as tasks:
        fleet = Fleet(runtime, config)
        supervisor = Supervisor(fleet, config.supervise, emit)
        rollout = RolloutPool(config, fleet, supervisor, emit)
        engines = EnginePool(config, fleet, supervisor, rollout, emit, ())
        with phase(emit, "starting workers"):
            await together(rollout.start(), engines.start())
        background = [tasks.create_task(supervisor.watch()), *rollout.supervise(tasks), *engines.supervise(tasks)]
        engines.publish(Published(None, Scores(0, ())))
        await engines.current()
        yield rollout
        engines.stop()
        for task in background:
            task.cancel()
