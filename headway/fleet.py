"""Starts the workers of a run through a runtime, each with what the config gives it: all at once, and all or none."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headway.colocation import side_by_side
from headway.config import Config, WeightsSection
from headway.engine import Engine
from headway.errors import ConfigError
from headway.runtime import InlineRuntime, LocalRuntime, Runtime, together, with_deadline
from headway.weight_stream import is_loopback

if TYPE_CHECKING:
    from headway.controller import Workers
    from headway.ranks import RankedTrainer
    from headway.rollout import RolloutWorker
    from headway.trainer import Trainer

_KV_SHARE, _SHARED_KV_SHARE = 0.8, 0.3
"""The part of a GPU's free memory that keys and values take when not told: without the trainer there, and with it."""


@asynccontextmanager
async def open_runtime(config: Config, directory: Path) -> AsyncIterator[Runtime]:
    """The configured runtime; every worker is ended when it is left, however it is left."""
    runtime: Runtime
    if config.run.runtime == "inline":
        import torch

        torch.set_num_threads(max(config.engine.threads, config.trainer.threads))
        runtime = InlineRuntime()
    else:
        runtime = LocalRuntime(directory / "logs", config.run.deadline_s)
    with side_by_side(config):
        try:
            yield runtime
        finally:
            await runtime.close()


async def start_generation(runtime: Runtime, config: Config) -> "tuple[dict[str, Engine], list[RolloutWorker]]":
    """The engines by name, all started at the same time, and the rollout workers that ask them."""
    placement = config.engine.placement
    started = await together(*(_start_engine(runtime, config, *placed) for placed in placement.items()))
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

    def is_here(other: str) -> bool:
        return {"cuda": "cuda:0"}.get(other, other) == {"cuda": "cuda:0"}.get(device, device)

    share = _SHARED_KV_SHARE if any(map(is_here, config.trainer.devices)) else _KV_SHARE
    return share / sum(map(is_here, config.engine.placement.values()))


async def start_trainer(runtime: Runtime, config: Config, worst_staleness: int | None) -> "Trainer | RankedTrainer":
    """One rank, or several that look like one."""
    from headway.ranks import RankedTrainer
    from headway.trainer import Trainer

    weights = how_weights_travel(config, runtime.num_machines)
    sections = config.model, config.trainer, config.algorithm, worst_staleness, weights
    if config.trainer.ranks == 1:
        return await runtime.start("trainer", Trainer, *sections, threads=config.trainer.threads)
    trainer = RankedTrainer(runtime, *sections, Path(config.run.dir) / "checkpoint", config.run.deadline_s)
    await trainer.start()
    return trainer


def how_weights_travel(config: Config, num_machines: int) -> WeightsSection:
    """The config's section with nothing left open: by the shortest way that reaches every engine, unless it says."""
    section = config.weights
    gpus_only = "cpu" not in (*config.trainer.devices, *config.engine.placement.values())
    if section.transport != "auto":
        transport = section.transport
    elif num_machines > 1:
        transport = "shared_memory,stream"
    else:
        transport = "cuda" if gpus_only and config.engine.kind == "embedded" else "shared_memory"
    directory = section.dir or str(Path(config.run.dir).absolute() / "weights")
    resolved = section.model_copy(update={"transport": transport, "dir": directory})
    if num_machines > 1 and not {"stream", "disk"} & {*resolved.transports}:
        raise ConfigError(
            f"weights.transport = {transport} reaches engines of the trainer's machine only, and there are "
            f"{num_machines} machines; set auto, stream or disk"
        )
    if num_machines > 1 and "disk" not in resolved.transports and is_loopback(section.address):
        raise ConfigError(
            f"weights.address = {section.address} cannot be reached from the other {num_machines - 1} machines; set "
            "0.0.0.0, or an address of the trainer's machine"
        )
    return resolved


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
    return [with_deadline(worker, 2 * config.run.deadline_s) for worker in await together(*started)]


async def start_all(runtime: Runtime, config: Config, worst_staleness: int | None) -> "Workers":
    from headway.controller import Workers

    generation, training = start_generation(runtime, config), start_trainer(runtime, config, worst_staleness)
    (engines, rollout), trainer = await together(generation, training)
    return Workers(engines, trainer, rollout, runtime.failure)
