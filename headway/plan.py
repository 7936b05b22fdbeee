"""What a config would do, before anything is started: processes, memory, batches, the worst staleness possible."""

from dataclasses import dataclass

from rich.table import Table

from headway.config import DEFAULT_KV_TOKENS, Config
from headway.fleet import reservations
from headway.launch import Prepared, prepare
from headway.packing import ModelShape

_BYTES = {"float32": 4, "bfloat16": 2}
_MASTER_BYTES = 16  # fp32 weights, gradients and the two AdamW moments


@dataclass(frozen=True)
class Plan:
    rows: list[tuple[str, str]]
    warnings: list[str]


def describe(config: Config) -> Plan:
    """Check the whole config and work out the plan; raises the sentence that `train` would raise."""
    from headway.models import model_shape

    prepared = prepare(config)
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
        ("staleness bound η", str(config.staleness.max_staleness)),
        ("worst staleness", "no bound: the window is unlimited" if worst is None else f"{worst} versions"),
        ("run directory", config.run.dir),
    ]
    return Plan(rows, _warnings(prepared))


def count_parameters(shape: ModelShape, tied: bool) -> int:
    """Matrix weights and norms of a decoder with gated feed-forward layers; biases left out."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query + 2 * key)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    embeddings = shape.vocab_size * shape.hidden_size * (1 if tied else 2)
    return shape.num_layers * layer + embeddings + shape.hidden_size


def _processes(config: Config) -> str:
    if config.run.runtime == "inline":
        return "1 (everything inline)"
    engines = "engine" if config.engine.count == 1 else f"{config.engine.count} engines"
    trainer = "trainer" if config.trainer.ranks == 1 else f"{config.trainer.ranks} trainer ranks"
    parts = ["controller", engines, trainer, "reward pool", f"{config.reward.workers} verifiers"]
    parts.append(f"{config.rollout.workers} rollout worker{'s' * (config.rollout.workers > 1)}")
    return ", ".join(parts)


def _ray(config: Config) -> list[tuple[str, str]]:
    if config.run.runtime != "ray":
        return []
    told = {
        kind: " ".join(f"{amount:g} {name}" for name, amount in needs.items())
        for kind, needs in reservations(config).items()
    }
    reserved = ", ".join(f"{kind} {needs}" for kind, needs in told.items() if needs)
    return [("Ray", f"{config.ray.address or 'a cluster of this machine alone'}; reserved: {reserved or 'nothing'}")]


def _devices(config: Config) -> str:
    places = config.engine.servers or config.engine.placement.values()
    placed = {**dict(zip(config.engine.placement, places, strict=True)), **config.trainer.placement}
    return ", ".join(f"{name} on {place}" for name, place in placed.items())


def _engine_memory(config: Config, shape: ModelShape, num_parameters: int) -> str:
    if config.engine.servers:
        return "that of the servers"
    width, num_sets = _BYTES[config.model.dtype], 1 if config.engine.kind == "vllm" else 2
    weights = num_sets * width * num_parameters
    on_cpu = set(config.engine.devices) == {"cpu"}
    kv_tokens = config.engine.kv_tokens or (DEFAULT_KV_TOKENS if on_cpu else 0)
    kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width * kv_tokens
    rest = f"{_gigabytes(kv)} for keys and values" if kv else "most of the rest for keys and values"
    each = "for each engine " if config.engine.count > 1 else ""
    sets = "one set" if num_sets == 1 else "two sets"
    return f"{each}{_gigabytes(weights)} for {sets} of weights, {rest}"


def _trainer_memory(config: Config, num_parameters: int) -> str:
    num_ranks = config.trainer.ranks
    each = "for each rank " if num_ranks > 1 else ""
    return f"{each}{_gigabytes(_MASTER_BYTES * num_parameters / num_ranks)} beside activations"


def _step(prepared: Prepared) -> str:
    section, size = prepared.config.trainer, prepared.config.rollout.group_size
    return (
        f"{section.batch_groups} groups × {size} = {section.batch_groups * size} trajectories of up to "
        f"{prepared.longest} tokens, {section.minibatches} minibatch{'es' * (section.minibatches > 1)}, "
        f"micro-batches of {section.token_budget} tokens"
    )


def _warnings(prepared: Prepared) -> list[str]:
    from headway.engine.embedded import native

    config = prepared.config
    found = []
    if config.engine.kind == "embedded" and "cpu" in config.engine.devices and native.compiler() is None:
        found.append(
            "no C++ compiler (c++, g++ or clang++) was found; the engine runs at about two thirds of its speed"
        )
    if config.sampling.top_k or config.sampling.top_p < 1:
        found.append("top-k or top-p truncates sampling, while log-probs are of the full distribution")
    if len(prepared.prompts) < config.trainer.batch_groups:
        found.append(f"{len(prepared.prompts)} prompts are fewer than a batch; each step repeats some")
    if config.staleness.window < 0:
        found.append("without a window, a slow group can be trained at any age")
    return found


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def table(plan: Plan) -> Table:
    listing = Table(title="plan", show_header=False, title_justify="left")
    for name, value in plan.rows:
        listing.add_row(name, value)
    for warning in plan.warnings:
        listing.add_row("warning", warning)
    return listing
