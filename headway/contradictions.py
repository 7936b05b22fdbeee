"""Combinations of values that cannot work, each a sentence: what, where, what to do.

`config` is a `headway.config.Config`, whose validator calls these.
"""

import re
from collections.abc import Iterator
from typing import Any

from headway.types import truncates

TRANSPORTS = ("shared_memory", "stream", "disk")
"""What weights.transport may name besides auto; headway/weights/publish.py offers them."""


def of_sizes(config: Any) -> Iterator[str]:
    """A sentence for each combination of values that cannot work."""
    batch, rollout, trainer, engine = config.trainer.batch_groups, config.rollout, config.trainer, config.engine
    longest = engine.max_context
    if 0 < rollout.max_groups < batch:
        yield (
            f"rollout.max_groups = {rollout.max_groups} can never fill a batch of trainer.batch_groups = {batch}; "
            "raise max_groups or lower batch_groups"
        )
    if longest and trainer.token_budget < longest:
        yield (
            f"trainer.token_budget = {trainer.token_budget} is smaller than one sequence of engine.max_context = "
            f"{longest} tokens; raise the budget or lower the context"
        )
    if trainer.minibatches > batch:
        yield (
            f"trainer.minibatches = {trainer.minibatches} is more than trainer.batch_groups = {batch}; lower "
            "minibatches"
        )
    if longest and 0 < engine.kv_tokens < 2 * longest:
        yield (
            f"engine.kv_tokens = {engine.kv_tokens} cannot hold two sequences of engine.max_context = {longest}; "
            "raise kv_tokens or lower max_context"
        )
    if longest and config.sampling.max_tokens >= longest:
        yield (
            f"sampling.max_tokens = {config.sampling.max_tokens} leaves no room for a prompt in engine.max_context = "
            f"{longest}; lower max_tokens"
        )
    if config.staleness.lowest > config.staleness.max_staleness:
        yield (
            f"staleness.min_staleness = {config.staleness.lowest} is above staleness.max_staleness = "
            f"{config.staleness.max_staleness}; lower one or raise the other"
        )
    if len(engine.devices) > engine.count:
        yield (
            f"engine.device = {engine.device} names more devices than engine.count = {engine.count}; raise count or "
            "name fewer"
        )
    named = config.weights.transports
    if named != ("auto",) and ({*named} - {*TRANSPORTS} or len({*named}) < len(named)):
        yield (
            f"weights.transport = {config.weights.transport} is neither auto nor some of "
            f"{', '.join(TRANSPORTS[:-1])} and {TRANSPORTS[-1]}, each once; set one of them"
        )


def of_vllm(config: Any) -> Iterator[str]:
    engine, sampling = config.engine, config.sampling
    is_vllm, num_urls = engine.kind == "vllm", len(engine.servers)
    own = [name for name in ("vllm_python", "vllm_args", "urls", "weights_dir") if getattr(engine, name)]
    if own and not is_vllm:
        yield (
            f"engine.{own[0]} is for vLLM servers, and engine.kind = {engine.kind}; set engine.kind = vllm or leave "
            "it out"
        )
    if is_vllm and not engine.vllm_python and not num_urls:
        yield (
            "engine.kind = vllm needs servers: name an interpreter that has vLLM in engine.vllm_python, or servers "
            "that run already in engine.urls"
        )
    if engine.vllm_python and num_urls:
        yield "engine.urls names servers that run already, and engine.vllm_python says to start them; leave one out"
    if engine.vllm_args and num_urls:
        yield (
            "engine.vllm_args is for servers that are started here, and engine.urls names some that run already; "
            "give it to those who start them"
        )
    if num_urls and num_urls != engine.count:
        yield f"engine.urls names {num_urls} servers, and engine.count = {engine.count}; set engine.count = {num_urls}"
    for url in engine.servers:
        if not re.fullmatch(r"https?://[^/?#@\s]+", url):
            yield f"engine.urls names {url}, which is no server's address; write it like http://host:8000"
    if is_vllm and config.run.deterministic:
        yield "run.deterministic is the embedded engine's, and engine.kind = vllm; turn it off"
    if is_vllm and truncates(sampling) and (sampling.temperature != 1 or config.evaluate.temperature not in (0, 1)):
        yield (
            "with top-k or top-p, vLLM gives log-probs of the full distribution at temperature 1 only; set "
            "sampling.temperature = 1 and evaluate.temperature to 0 or 1, or sampling.top_k = 0 and sampling.top_p = 1"
        )


def of_lora(config: Any) -> Iterator[str]:
    lora = config.model.lora
    if lora.adapter and not lora.rank:
        yield f"model.lora.adapter = {lora.adapter} needs model.lora.rank, the adapter's own; set it"
    if lora.rank and config.trainer.ranks > 1:
        yield f"model.lora.rank = {lora.rank} is for one trainer rank; set trainer.ranks = 1 or model.lora.rank = 0"
    if lora.rank and config.engine.kind == "vllm" and config.engine.kv_on_swap == "keep":
        yield (
            f"model.lora.rank = {lora.rank} gives vLLM another adapter at each swap, which computes keys and values "
            "anew, and engine.kv_on_swap = keep; set recompute or drain"
        )
    if lora.rank > 512 and config.engine.kind == "vllm":
        yield f"model.lora.rank = {lora.rank} is more than vLLM's adapters have, which is 512; lower it"


def of_places(config: Any) -> Iterator[str]:
    """Devices, nodes and ranks."""
    trainer, on_ray = config.trainer, config.run.runtime == "ray"
    places = [("engine.device", device) for device in config.engine.devices]
    for knob, device in [*places, *(("trainer.device", device) for device in trainer.devices)]:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            yield f"{knob} = {device} is neither cpu nor cuda nor a GPU by number, such as cuda:1; set one of them"
        if on_ray and ":" in device:
            yield f"{knob} = {device}: with run.runtime = ray a worker sees only the GPUs it reserves; set cuda"
    for kind, needs in config.ray.model_dump(exclude={"address"}).items():
        for name, amount in needs.items():
            if amount > 1 and amount != int(amount):
                yield f"ray.{kind}: {amount:g} {name} is neither a part of one nor a whole number; round it"
    if "://" in config.ray.address:
        yield (
            f"ray.address = {config.ray.address} is Ray's client protocol; run on a node of the cluster and give "
            "HOST:PORT"
        )
    gpus = {{"cuda": "cuda:0"}.get(device, device) for device in trainer.devices} - {"cpu"}
    if len(trainer.devices) > trainer.ranks:
        yield (
            f"trainer.device = {trainer.device} names more devices than trainer.ranks = {trainer.ranks}; raise ranks "
            "or name fewer"
        )
    if gpus and "cpu" in trainer.devices:
        yield (
            f"trainer.device = {trainer.device} mixes cpu and GPUs, and ranks of one kind cannot talk to the other; "
            "name one kind"
        )
    if 0 < len(gpus) < trainer.ranks and not on_ray:
        yield (
            f"trainer.ranks = {trainer.ranks} need a GPU each, and trainer.device = {trainer.device} names "
            f"{len(gpus)}; name more or lower ranks"
        )
    if trainer.ranks > 1 and config.run.runtime == "inline":
        yield (
            f"trainer.ranks = {trainer.ranks} are processes, and run.runtime = inline has one; set run.runtime = local "
            "or ranks = 1"
        )
