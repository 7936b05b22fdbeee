"""Estimates from sizes whether a run fits into its GPUs' memory, before anything is loaded.

It is a lower bound: weights, their shadow, gradients, the optimizer's state and the KV cache of two sequences. A run
that fits may still need smaller micro-batches; one that does not fit is refused.
"""

from collections import defaultdict

from headway.config import DEFAULT_KV_TOKENS, Config
from headway.errors import ConfigError
from headway.model.shape import ModelShape

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MASTER_BYTES = 16  # fp32 weights, gradients and the two AdamW moments


def count_parameters(shape: ModelShape, tied: bool) -> int:
    """Matrix weights and norms of a decoder with gated feed-forward layers; biases left out."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query + 2 * key)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    embeddings = shape.vocab_size * shape.hidden_size * (1 if tied else 2)
    return shape.num_layers * layer + embeddings + shape.hidden_size


def num_weight_sets(config: Config) -> int:
    """Copies of the weights in an engine: the embedded one has live weights, a shadow for the next version, and with
    adapters the base that they are merged into."""
    return 1 if config.engine.kind == "vllm" else 3 if config.model.lora.rank else 2


def engine_weight_bytes(config: Config, num_parameters: int) -> int:
    return num_weight_sets(config) * _BYTES[config.model.dtype] * num_parameters


def kv_bytes(config: Config, shape: ModelShape, device: str) -> int:
    """Bytes of KV cache that the config asks for; 0 where an engine takes the free memory."""
    num_tokens = config.engine.kv_tokens or (DEFAULT_KV_TOKENS if device == "cpu" else 0)
    return token_bytes(config, shape) * num_tokens


def token_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of one token's keys and values."""
    return shape.kv_elements * _BYTES[config.model.dtype]


def rank_bytes(config: Config, num_parameters: int) -> int:
    """Memory of one trainer rank without activations."""
    if config.model.lora.rank:  # the base, and the same with its adapter merged in; adapters themselves are small
        return 2 * _BYTES[config.model.dtype] * num_parameters
    cast = 0 if config.model.dtype == "float32" else _BYTES[config.model.dtype]
    return (_MASTER_BYTES + cast) * num_parameters // config.trainer.ranks


def needed(config: Config, shape: ModelShape, tied: bool, context: int) -> dict[str, dict[str, int]]:
    """The least bytes that each worker needs, by device and worker."""
    num_parameters = count_parameters(shape, tied)
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, device in config.engine.placement.items() if not config.engine.servers else ():
        kv = kv_bytes(config, shape, device) or 2 * context * token_bytes(config, shape)
        found[device][name] = engine_weight_bytes(config, num_parameters) + kv
    for name, device in config.trainer.placement.items():
        found[device][name] = rank_bytes(config, num_parameters)
    return dict(found)


def check_fit(config: Config, shape: ModelShape, tied: bool, context: int) -> None:
    """Refuse a model that cannot fit on its GPUs; those of other nodes are unknown here."""
    for device, workers in needed(config, shape, tied, context).items():
        if device == "cpu" or config.run.runtime == "ray":
            continue
        wanted, there = sum(workers.values()), capacity(device)
        if wanted > there:
            listed = ", ".join(f"{name} {gigabytes(num_bytes)}" for name, num_bytes in workers.items())
            raise ConfigError(
                f"{config.model.path} needs at least {gigabytes(wanted)} on {device} ({listed}), which has "
                f"{gigabytes(there)}; put engine and trainer on GPUs of their own, raise trainer.ranks, lower "
                "engine.kv_tokens, or use a smaller model"
            )


def capacity(device: str) -> int:
    """Total memory of a GPU in bytes."""
    import torch

    total: int = torch.cuda.get_device_properties(device).total_memory
    return total


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
