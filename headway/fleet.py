"""Starts the workers of a run through a runtime, each with what the config gives it: all at once, and all or none."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import Config
from headway.engine import Engine
from headway.errors import ConfigError
from headway.runtime import InlineRuntime, LocalRuntime, RayRuntime, Runtime, with_deadline

if TYPE_CHECKING:
    from headway.controller import Workers
    from headway.rollout import RolloutWorker
    from headway.trainer import Trainer

_KV_SHARE, _SHARED_KV_SHARE = 0.8, 0.3
"""The part of a GPU's free memory that keys and values take when not told: without the trainer there, and with it."""


def make_private(directory: Path) -> None:
    """What is not there yet of a run is made for its owner alone: prompts, completions and weights will lie in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {directory}: {error.strerror}; check run.dir") from error


@asynccontextmanager
async def open_runtime(config: Config, directory: Path) -> AsyncIterator[Runtime]:
    """The configured runtime; every worker is ended when it is left, however it is left."""
    runtime: Runtime
    if config.run.runtime != "inline":
        make_private(directory)
    if config.run.runtime == "inline":
        import torch

        torch.set_num_threads(max(config.engine.threads, config.trainer.threads))
        runtime = InlineRuntime()
    elif config.run.runtime == "ray":
        runtime = RayRuntime(directory / "logs", config.run.deadline_s, config.ray.address, reservations(config))
    else:
        runtime = LocalRuntime(directory / "logs", config.run.deadline_s)
    try:
        if isinstance(runtime, RayRuntime):
            await runtime.open()
        yield runtime
    finally:
        await runtime.close()


def reservations(config: Config) -> dict[str, dict[str, float]]:
    """What each kind of worker reserves at its Ray node: what is told, and a GPU where it computes on one."""
    told: dict[str, dict[str, float]] = config.ray.model_dump(exclude={"address"})
    for kind, devices in (("engine", config.engine.devices), ("trainer", [config.trainer.device])):
        if set(devices) != {"cpu"}:
            told[kind].setdefault("GPU", 1.0)
    return told


async def start_generation(runtime: Runtime, config: Config) -> "tuple[dict[str, Engine], list[RolloutWorker]]":
    """The engines by name, all started at the same time, and the rollout workers that ask them."""
    placement = config.engine.placement
    started = await _together(*(_start_engine(runtime, config, *placed) for placed in placement.items()))
    engines: dict[str, Engine] = dict(zip(placement, started, strict=True))
    return engines, await _start_rollout(runtime, config, engines)


async def _start_engine(runtime: Runtime, config: Config, name: str, device: str) -> Engine:
    from headway.engine.embedded import EmbeddedEngine
    from headway.engine.fake import FakeEngine

    if config.engine.kind == "fake":
        return await runtime.start(name, FakeEngine)
    return await runtime.start(
        name,
        EmbeddedEngine,
        config.model.path,
        config.model.dtype,
        config.engine.model_copy(update={"device": device, "count": 1}),
        config.run.deterministic,
        _kv_share(config, device),
        threads=config.engine.threads,
    )


def _kv_share(config: Config, device: str) -> float:
    """The engines of one GPU divide among them what one alone would take there."""
    if config.run.runtime == "ray":
        return _KV_SHARE * min(1.0, reservations(config)["engine"].get("GPU", 1.0))

    def is_here(other: str) -> bool:
        return {"cuda": "cuda:0"}.get(other, other) == {"cuda": "cuda:0"}.get(device, device)

    share = _SHARED_KV_SHARE if is_here(config.trainer.device) else _KV_SHARE
    return share / sum(map(is_here, config.engine.placement.values()))


async def start_trainer(runtime: Runtime, config: Config, worst_staleness: int | None) -> "Trainer":
    from headway.trainer import Trainer

    # Under Ray, a worker does not see the GPU another has reserved.
    gpus_only = "cpu" not in (config.trainer.device, *config.engine.placement.values()) and config.run.runtime != "ray"
    return await runtime.start(
        "trainer",
        Trainer,
        config.model,
        config.trainer,
        config.algorithm,
        worst_staleness,
        gpus_only and config.engine.kind == "embedded",
        threads=config.trainer.threads,
    )


async def _start_rollout(runtime: Runtime, config: Config, engines: dict[str, Engine]) -> "list[RolloutWorker]":
    from headway.reward import RewardPool
    from headway.rollout import RolloutWorker

    pool: RewardPool = await runtime.start("reward", RewardPool, config.task.verifier, config.reward)
    started = (
        runtime.start(
            f"rollout-{number}",
            RolloutWorker,
            engines,
            pool,
            config.model.path,
            config.rollout.workflow,
            config.run.seed,
        )
        for number in range(config.rollout.workers)
    )
    # Its own calls, to the engines and the reward pool, must expire first, so that whoever is silent is named.
    return [with_deadline(worker, 2 * config.run.deadline_s) for worker in await _together(*started)]


async def start_all(runtime: Runtime, config: Config, worst_staleness: int | None) -> "Workers":
    from headway.controller import Workers

    generation, training = start_generation(runtime, config), start_trainer(runtime, config, worst_staleness)
    (engines, rollout), trainer = await _together(generation, training)
    return Workers(engines, trainer, rollout, runtime.failure)


async def _together(*starts: Awaitable[Any]) -> list[Any]:
    """All results; when one fails, the others are ended first, so that no worker starts after the end of the run."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
