"""Starts the workers of a run through a runtime, each under its name with what the config gives it.

Which transport brings weights to the engines is decided here; a new one is implemented in `weights/`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config import Config, WeightsSection
from headway.control.mps import side_by_side
from headway.engine.protocol import Engine
from headway.errors import CAUSE, ConfigError, WorkerDied, translated
from headway.record.log import EVENTS_NAME
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

_KV_SHARE, _SHARED_KV_SHARE = 0.8, 0.3
"""The part of a GPU's free memory that keys and values take by default: without the trainer there, and with it."""


def make_private(directory: Path) -> None:
    """The run directory is its owner's alone: it will hold prompts, completions and weights. One that was there is made
    so if it holds nothing but a run."""
    with translated(OSError, ConfigError, f"cannot make the run directory {directory}: {CAUSE}; check run.dir"):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_own = not any(directory.iterdir()) or (directory / EVENTS_NAME).exists()
        if is_own and directory.stat().st_mode & 0o077:
            directory.chmod(0o700)


@asynccontextmanager
async def open_runtime(config: Config, directory: Path) -> AsyncIterator[Runtime]:
    """The configured runtime; every worker is ended when it is left, however it is left."""
    runtime: Runtime
    logs, deadline_s, health_s = directory / "logs", config.run.deadline_s, config.supervise.health_s
    if config.run.runtime != "inline":
        make_private(directory)
    if config.run.runtime == "inline":
        import torch

        torch.set_num_threads(max(config.engine.threads, config.trainer.threads))
        runtime = InlineRuntime()
    elif config.run.runtime == "ray":
        runtime = RayRuntime(logs, deadline_s, config.ray.address, reservations(config), health_s)
    else:
        runtime = LocalRuntime(logs, deadline_s, health_s)
    with side_by_side(config):
        try:
            yield runtime
        finally:
            await runtime.close()


def reservations(config: Config) -> dict[str, dict[str, float]]:
    """What each kind of worker reserves at its Ray node: what the config says, and a GPU where it computes on one."""
    needs: dict[str, dict[str, float]] = config.ray.model_dump(exclude={"address"})
    for kind, devices in (("engine", config.engine.devices), ("trainer", config.trainer.devices)):
        if set(devices) != {"cpu"}:
            needs[kind].setdefault("GPU", 1.0)
    return needs


class Fleet:
    """Starts and ends the workers of one run, each under its name."""

    def __init__(self, runtime: Runtime, config: Config, worst_staleness: int | None = None) -> None:
        self._runtime, self._config, self._worst_staleness = runtime, config, worst_staleness
        self._trainer: RankedTrainer | None = None

    async def start_engine(self, name: str) -> Engine:
        """An engine of the config, or an additional one, on the devices in turn."""
        devices = self._config.engine.devices
        number = int(name.removeprefix("engine").removeprefix("-") or 0)
        return await _start_engine(self._runtime, self._config, name, devices[number % len(devices)])

    async def start_rollout(self, name: str) -> "RolloutWorker":
        from headway.model.loading import load_config
        from headway.rollout.worker import RolloutWorker

        config, deadline_s = self._config, self._config.run.deadline_s
        model = load_config(config.model.path)
        context = config.engine.max_context or model.max_position_embeddings
        sizes = model.vocab_size, context, config.trainer.token_budget
        arguments = (config.model.path, config.rollout, config.run.seed, *sizes, deadline_s)
        worker = await self._runtime.start(name, RolloutWorker, *arguments)
        # Its own calls, to the engines and the reward pool, must expire first, so that the error names who is silent.
        return with_deadline(worker, 2 * deadline_s)

    async def start_rewards(self) -> "RewardPool":
        from headway.rollout.reward_pool import RewardPool
        from headway.tasks.scoring import specification

        verifiers = specification(self._config.named_tasks)
        section, health_s = self._config.reward, self._config.supervise.health_s
        return await self._runtime.start("reward", RewardPool, verifiers, section, health_s)

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
        config.run.deterministic and device == "cpu",  # on a GPU its numbers depend on who shares the batch
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
        logprobs_mode(config.sampling),
        config.run.deadline_s,
        _kv_share(config, device),
        config.model.lora.rank,
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

    weights = resolve_transport(config, await runtime.num_machines())
    sections = config.model, config.trainer, config.algorithm, worst_staleness, weights
    directory, deterministic = Path(config.run.dir) / "checkpoint", config.run.deterministic
    trainer = RankedTrainer(runtime, *sections, directory, config.run.deadline_s, deterministic)
    await trainer.start()
    return trainer


def resolve_transport(config: Config, num_machines: int) -> WeightsSection:
    """The config's section with nothing left open: the fastest transport that reaches every engine, unless it says."""
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
