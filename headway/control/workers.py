"""Starts the workers of a run through a runtime, each with what the config gives it: all at once, and all or none.

Afterwards any of them can be ended and started again under its name, and engines can be added.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headway.config import Config, WeightsSection
from headway.control.mps import side_by_side
from headway.engine.protocol import Engine
from headway.errors import ConfigError, WorkerDied
from headway.runtime.gather import together
from headway.runtime.handle import with_deadline
from headway.runtime.inline import InlineRuntime
from headway.runtime.local import LocalRuntime
from headway.runtime.protocol import Runtime
from headway.runtime.ray import RayRuntime
from headway.weights.stream import LOOPBACK, OWN, is_loopback

if TYPE_CHECKING:
    from headway.rollout.reward_pool import RewardPool
    from headway.rollout.worker import RolloutWorker
    from headway.training.ranks import RankedTrainer

T = TypeVar("T")

_LOOK_S = 1.0
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
    with side_by_side(config):
        try:
            yield runtime
        finally:
            await runtime.close()


def reservations(config: Config) -> dict[str, dict[str, float]]:
    """What each kind of worker reserves at its Ray node: what is told, and a GPU where it computes on one."""
    told: dict[str, dict[str, float]] = config.ray.model_dump(exclude={"address"})
    for kind, devices in (("engine", config.engine.devices), ("trainer", config.trainer.devices)):
        if set(devices) != {"cpu"}:
            told[kind].setdefault("GPU", 1.0)
    return told


@dataclass
class Generation:
    """Handles to the workers that generate and reward, as they were first started; engines and workers by name."""

    engines: dict[str, Engine]
    rollout: "dict[str, RolloutWorker]"
    rewards: "RewardPool"


@dataclass
class Workers:
    """Handles to everything the controller moves groups between."""

    generation: Generation
    trainer: "RankedTrainer"


class Fleet:
    """Starts and ends the workers of one run, each under its name."""

    def __init__(self, runtime: Runtime, config: Config, worst_staleness: int | None) -> None:
        self._runtime, self._config, self._worst_staleness = runtime, config, worst_staleness
        self._trainer: RankedTrainer | None = None

    async def start_all(self) -> Workers:
        generation, trainer = await together(start_generation(self._runtime, self._config), self.start_trainer())
        return Workers(generation, trainer)

    async def start_engine(self, name: str) -> Engine:
        """An engine of the config, or one more than it has, which takes its turn among the devices."""
        devices = self._config.engine.devices
        number = int(name.removeprefix("engine").removeprefix("-") or 0)
        return await _start_engine(self._runtime, self._config, name, devices[number % len(devices)])

    async def start_rollout(self, name: str) -> "RolloutWorker":
        return await _start_rollout(self._runtime, self._config, name)

    async def start_rewards(self) -> "RewardPool":
        return await _start_rewards(self._runtime, self._config)

    async def start_trainer(self) -> "RankedTrainer":
        self._trainer = await start_trainer(self._runtime, self._config, self._worst_staleness)
        return self._trainer

    async def stop(self, name: str) -> None:
        if name == "trainer" and self._trainer is not None:
            await self._trainer.end()
        else:
            await self._runtime.stop(name)

    async def failure(self) -> WorkerDied:
        """The next death; that of a rank is the trainer's."""
        death = await self._runtime.failure()
        return WorkerDied(str(death), "trainer") if death.worker in self._config.trainer.placement else death


async def start_generation(runtime: Runtime, config: Config) -> Generation:
    """Engines, rollout workers and reward pool, all started at the same time and then connected."""
    placement = config.engine.placement
    names = [f"rollout-{number}" for number in range(config.rollout.workers)]
    rewards, *started = await together(
        _start_rewards(runtime, config),
        *(_start_engine(runtime, config, *placed) for placed in placement.items()),
        *(_start_rollout(runtime, config, name) for name in names),
    )
    engines: dict[str, Engine] = dict(zip(placement, started, strict=False))
    rollout: dict[str, RolloutWorker] = dict(zip(names, started[len(engines) :], strict=True))
    lives = dict.fromkeys([*engines, "reward"], 0)
    await together(*(worker.connect(engines, lives, (), rewards) for worker in rollout.values()))
    return Generation(engines, rollout, rewards)


async def until_failure(runtime: Runtime, generation: Generation, work: Awaitable[T]) -> T:
    """The result of work in which no worker is replaced: the first that dies or breaks ends it."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work), asyncio.ensure_future(runtime.failure())]
    tasks.append(asyncio.ensure_future(_first_shunned(generation)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        working, *failing = tasks
        for task in failing:
            if task.done() and not working.done():
                raise task.result()
        result: T = working.result()
        return result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_shunned(generation: Generation) -> WorkerDied:
    """Of an engine that rollout workers ask no more, why."""
    while True:
        await asyncio.sleep(_LOOK_S)
        for worker in generation.rollout.values():
            for shunned in (await worker.stats()).shunned:
                return WorkerDied(shunned.reason, shunned.engine)


async def _start_engine(runtime: Runtime, config: Config, name: str, device: str) -> Engine:
    from headway.engine.embedded.service import EmbeddedEngine
    from headway.engine.fake import FakeEngine

    if config.engine.kind == "fake":
        return await runtime.start(name, FakeEngine)
    if config.engine.kind == "vllm":
        return await _start_vllm(runtime, config, name, device)
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


async def _start_vllm(runtime: Runtime, config: Config, name: str, device: str) -> Engine:
    from headway.engine.vllm.engine import VllmEngine
    from headway.engine.vllm.messages import logprobs_mode

    urls = dict(zip(config.engine.placement, config.engine.servers, strict=False))
    return await runtime.start(
        name,
        VllmEngine,
        config.model.path,
        config.model.dtype,
        config.engine.model_copy(update={"device": device, "count": 1}),
        urls.get(name, ""),
        logprobs_mode(config.sampling.top_k, config.sampling.top_p),
        config.run.deadline_s,
        _kv_share(config, device),
        threads=config.engine.threads,
    )


def _kv_share(config: Config, device: str) -> float:
    """The engines of one GPU divide among them what one alone would take there."""
    if config.run.runtime == "ray":
        return _KV_SHARE * min(1.0, reservations(config)["engine"].get("GPU", 1.0))

    def is_here(other: str) -> bool:
        return {"cuda": "cuda:0"}.get(other, other) == {"cuda": "cuda:0"}.get(device, device)

    share = _SHARED_KV_SHARE if any(map(is_here, config.trainer.devices)) else _KV_SHARE
    return share / sum(map(is_here, config.engine.placement.values()))


async def start_trainer(runtime: Runtime, config: Config, worst_staleness: int | None) -> "RankedTrainer":
    from headway.training.ranks import RankedTrainer

    weights = how_weights_travel(config, await runtime.num_machines())
    sections = config.model, config.trainer, config.algorithm, worst_staleness, weights
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
        # Under Ray, a worker does not see the GPU another has reserved.
        by_gpu = gpus_only and config.engine.kind == "embedded" and config.run.runtime != "ray"
        transport = "cuda" if by_gpu else "shared_memory"
    directory = section.dir or str(Path(config.run.dir).absolute() / "weights")
    address = section.address or (OWN if num_machines > 1 else LOOPBACK)
    resolved = section.model_copy(update={"transport": transport, "dir": directory, "address": address})
    if num_machines > 1 and not {"stream", "disk"} & {*resolved.transports}:
        raise ConfigError(
            f"weights.transport = {transport} reaches engines of the trainer's machine only, and there are "
            f"{num_machines} machines; set auto, stream or disk"
        )
    if num_machines > 1 and "disk" not in resolved.transports and is_loopback(address):
        raise ConfigError(
            f"weights.address = {address} cannot be reached from the other {num_machines - 1} machines; leave it out, "
            "or name an address of the trainer's machine"
        )
    return resolved


async def _start_rewards(runtime: Runtime, config: Config) -> "RewardPool":
    from headway.rollout.reward_pool import RewardPool
    from headway.tasks.scoring import specification

    return await runtime.start("reward", RewardPool, specification(config.named_tasks), config.reward)


async def _start_rollout(runtime: Runtime, config: Config, name: str) -> "RolloutWorker":
    from headway.model.loading import load_config
    from headway.rollout.worker import RolloutWorker

    deadline_s, model = config.run.deadline_s, load_config(config.model.path)
    context = config.engine.max_context or model.max_position_embeddings
    sizes = model.vocab_size, context, config.trainer.token_budget
    arguments = (config.model.path, config.rollout, config.run.seed, *sizes, deadline_s)
    worker = await runtime.start(name, RolloutWorker, *arguments)
    # Its own calls, to the engines and the reward pool, must expire first, so that whoever is silent is named.
    return with_deadline(worker, 2 * deadline_s)
