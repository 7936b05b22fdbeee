"""What a config would do, before anything is started: processes, memory, batches, the worst staleness possible."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from headway.config import Config
from headway.control.run_directory import check
from headway.control.workers import reservations
from headway.launch import Prepared, prepare
from headway.model.memory import (
    count_parameters,
    engine_weight_bytes,
    gigabytes,
    kv_bytes,
    num_weight_sets,
    rank_bytes,
)
from headway.model.shape import ModelShape


@dataclass(frozen=True)
class Plan:
    rows: list[tuple[str, str]]
    warnings: list[str]


def describe(config: Config, resume: bool = False, overwrite: bool = False) -> Plan:
    """Check the whole config and work out the plan; raises the sentence that `train` would raise."""
    check(Path(config.run.dir), config, resume, overwrite)
    prepared = prepare(config)
    from headway.model.loading import model_shape  # after the checks, of which a wrong path needs no torch

    shape = model_shape(prepared.model_config)
    num_parameters = count_parameters(shape, bool(prepared.model_config.tie_word_embeddings))
    worst = prepared.staleness().worst_staleness
    rows = [
        ("model", f"{config.model.path}: {prepared.model_config.model_type}, {num_parameters / 1e6:.1f}M parameters"),
        ("prompts", f"{len(prepared.prompts):,} to train on, {len(prepared.held_out):,} held out"),
        ("processes", _processes(config)),
        *_ray(config),
        ("devices", _devices(config)),
        ("engine memory", _engine_memory(config, shape, num_parameters)),
        ("trainer memory", _trainer_memory(config, num_parameters)),
        ("training step", _step(prepared)),
        ("run", f"{config.run.steps} steps = {config.run.steps * config.trainer.batch_groups:,} groups"),
        ("staleness bound η", _eta(config)),
        ("worst staleness", "no bound: the window is unlimited" if worst is None else f"{worst} versions"),
        ("run directory", config.run.dir),
    ]
    return Plan(rows, _warnings(prepared))


def _processes(config: Config) -> str:
    if config.run.runtime == "inline":
        return "1 (everything inline)"
    engines = "engine" if config.engine.count == 1 else f"{config.engine.count} engines"
    trainer = "trainer" if config.trainer.ranks == 1 else f"{config.trainer.ranks} trainer ranks"
    parts = ["controller", engines, trainer, "reward pool"]
    parts.append(f"{config.reward.workers} verifier{'s' * (config.reward.workers > 1)}")
    parts.append(f"{config.rollout.workers} rollout worker{'s' * (config.rollout.workers > 1)}")
    return ", ".join(parts)


def _ray(config: Config) -> list[tuple[str, str]]:
    if config.run.runtime != "ray":
        return []
    named = {
        kind: " ".join(f"{amount:g} {name}" for name, amount in needs.items())
        for kind, needs in reservations(config).items()
    }
    reserved = ", ".join(f"{kind} {needs}" for kind, needs in named.items() if needs)
    return [("Ray", f"{config.ray.address or 'a cluster of this machine alone'}; reserved: {reserved or 'nothing'}")]


def _devices(config: Config) -> str:
    places = config.engine.servers or config.engine.placement.values()
    placed = {**dict(zip(config.engine.placement, places, strict=True)), **config.trainer.placement}
    return ", ".join(f"{name} on {place}" for name, place in placed.items())


def _engine_memory(config: Config, shape: ModelShape, num_parameters: int) -> str:
    if config.engine.servers:
        return "that of the servers"
    kv = kv_bytes(config, shape, config.engine.devices[0])
    rest = f"{gigabytes(kv)} for keys and values" if kv else "most of the rest for keys and values"
    each = "for each engine " if config.engine.count > 1 else ""
    sets = ("one set", "two sets", "three sets")[num_weight_sets(config) - 1]
    return f"{each}{gigabytes(engine_weight_bytes(config, num_parameters))} for {sets} of weights, {rest}"


def _trainer_memory(config: Config, num_parameters: int) -> str:
    each = "for each rank " if config.trainer.ranks > 1 else ""
    return f"{each}{gigabytes(rank_bytes(config, num_parameters))} plus activations"


def _step(prepared: Prepared) -> str:
    section, size = prepared.config.trainer, prepared.config.rollout.group_size
    return (
        f"{section.batch_groups} groups × {size} = {section.batch_groups * size} trajectories of up to "
        f"{prepared.longest} tokens, {section.minibatches} minibatch{'es' * (section.minibatches > 1)}, "
        f"micro-batches of {section.token_budget} tokens"
    )


def _eta(config: Config) -> str:
    section = config.staleness
    if section.lowest == section.max_staleness:
        return str(section.max_staleness)
    return (
        f"from {section.lowest} to {section.max_staleness}: falls at an effective sample size below "
        f"{section.min_ess:g} or a mismatch KL above {section.max_kl:g}"
    )


def _warnings(prepared: Prepared) -> list[str]:
    from headway.engine.embedded import native

    config = prepared.config
    found = [*prepared.notes]
    if config.engine.kind == "embedded" and "cpu" in config.engine.devices and native.compiler() is None:
        found.append(
            "no C++ compiler (c++, g++ or clang++) was found; the engine runs at about two thirds of its speed"
        )
    if len(prepared.prompts) < config.trainer.batch_groups:
        found.append(f"{len(prepared.prompts)} prompts are fewer than a batch; each step repeats some")
    if config.staleness.window < 0:
        found.append("without a window, a slow group can be trained at any age")
    return found


def table(plan: Plan) -> Table:
    listing = Table(title="plan", show_header=False, title_justify="left")
    for name, value in plan.rows:
        listing.add_row(name, value)
    for warning in plan.warnings:
        listing.add_row("warning", warning)
    return listing
