"""Supervised warm-up: worked examples through the same model, packing and checkpoint code as reinforcement learning.

The model is the one at `model.path`, or, where `model.init.alphabet` is given, a small one built from nothing.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.config import Config
from headway.errors import ConfigError, HeadwayError
from headway.model.device import find_device
from headway.model.loading import build_model, load_model, model_shape
from headway.model.logprobs import Policy
from headway.model.shape import flops
from headway.model.sharding import Masters, shard
from headway.model.tokenizer import build_character_tokenizer, load_tokenizer
from headway.tasks.datasets import load_rows
from headway.tasks.prompts import encode_row
from headway.training import checkpoint
from headway.training.batches import MicroBatch, micro_batches
from headway.training.optimizer import adamw, warmed_up
from headway.types import Sample

Report = Callable[[int, int, float], None]


def sft(config: Config, report: Report) -> tuple[Path, list[float]]:
    """Train on `sft.train` and save a model directory; where it lies, and the loss of each step."""
    section = config.sft
    if not section.train:
        raise ConfigError("sft.train names no rows; set it to a .jsonl file or file.py:function")
    out = Path(section.out or Path(config.run.dir) / "model")
    checkpoint.check_replaceable(out)
    torch.set_num_threads(config.trainer.threads)
    # A CPU gains nothing from a narrower type here, and loses precision.
    name = config.trainer.devices[0]
    # Not fp16, whose range asks for more care than a warm-up is worth; the model is written in the type it has.
    dtype = torch.float32 if name == "cpu" or config.model.dtype == "float32" else torch.bfloat16
    device = find_device("trainer.device", name, dtype)
    model, tokenizer = _start(config)
    samples = _samples(config, tokenizer)
    policy = Policy(model, config.trainer.logprob_chunk).train()
    masters = shard(policy, dtype, device)
    optimizer = adamw(masters.named.values(), config.trainer, section.lr)
    cost = partial(flops, shape=model_shape(model.config))
    order = np.random.Generator(np.random.Philox(config.run.seed))
    losses = []
    for step in range(section.steps):
        chosen = order.choice(len(samples), min(section.batch_size, len(samples)), replace=False)
        packed = micro_batches([samples[int(i)] for i in chosen], config.trainer.token_budget, cost, device)
        for group in optimizer.param_groups:
            group["lr"] = section.lr * warmed_up(step, section.warmup_steps)
        losses.append(_step(policy, masters, optimizer, packed, config.trainer.clip_norm))
        if not math.isfinite(losses[-1]):
            raise HeadwayError(f"the loss of warm-up step {step + 1} is not a finite number; lower sft.lr")
        report(step + 1, section.steps, losses[-1])
    masters.put_back()
    out.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save_model(out, model, tokenizer)
    return out, losses


def _start(config: Config) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    init = config.model.init
    if not init.alphabet:
        return load_model(config.model.path), load_tokenizer(config.model.path)
    tokenizer = build_character_tokenizer(init.alphabet)
    context = config.engine.max_context or 512
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert isinstance(pad, int) and isinstance(eos, int)
    return build_model(init, len(tokenizer), pad, eos, context, config.run.seed), tokenizer


def _samples(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Prompt, completion, end of text; only what follows the prompt is trained."""
    task, section = config.task, config.sft
    samples = []
    for number, row in enumerate(load_rows(section.train, task.fields)):
        for field in (task.prompt_field, section.completion_field):
            if field not in row:
                raise ConfigError(f"{section.train}, row {number} has no field {field!r}; it has {sorted(row)}")
        prompt = encode_row(task, tokenizer, row, f"{section.train}, row {number}")
        completion = tokenizer.encode(str(row[section.completion_field]), add_special_tokens=False)
        tokens = np.concatenate([prompt, completion, [tokenizer.eos_token_id]]).astype(np.int32)
        where = np.arange(max(1, len(prompt)), len(tokens))  # nothing predicts the first token of an empty prompt
        blank = np.zeros(len(where), np.float32)
        samples.append(Sample(tokens, where, blank, np.zeros(len(where), np.int32), blank, 1.0))
    return samples


def _step(
    policy: Policy, masters: Masters, optimizer: torch.optim.Optimizer, packed: list[MicroBatch], clip_norm: float
) -> float:
    """One optimizer step on the mean negative log-likelihood of the trained tokens."""
    num_tokens = sum(len(micro_batch.where_M) for micro_batch in packed)
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for micro_batch in packed:
        logprobs_M, _ = policy(*micro_batch.forward_arguments)
        loss = -logprobs_M.sum() / num_tokens
        loss.backward()
        parts.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(masters.named.values(), clip_norm)
    optimizer.step()
    masters.refresh()
    return float(sum(torch.stack(parts).tolist()))
