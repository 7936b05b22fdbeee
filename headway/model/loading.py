"""Supported transformers causal LMs: reading, building, naming and refusing them."""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from headway.config import InitSection
from headway.errors import ConfigError
from headway.model.attention import attention_softcap
from headway.model.shape import ModelShape

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")


disable_progress_bar()  # loading is shown by whoever asked for it, not by bars of each process


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile the decoder's blocks in place: one piece of code for all layers of a kind and any number of tokens."""
    # Capped attention is a loop over sequences, which would be compiled anew for every micro-batch.
    capped = attention_softcap(model.config) > 0
    for layer in cast(nn.ModuleList, cast(nn.Module, model.model).layers):
        (cast(nn.Module, layer.mlp) if capped else layer).compile(dynamic=True)


def check_supported(config: PreTrainedConfig, where: str) -> None:
    """Refuse, by name, what the trainer cannot run: another engine would not help, for it must train it anyway."""
    if config.model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError(
            f"{where} is a {config.model_type} model, which the trainer does not run, whatever the engine; "
            f"use one of the families {supported}"
        )
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    for present, what in (
        (getattr(config, "use_sliding_window", False), f"{config.model_type}'s sliding-window attention"),
        (getattr(config, "use_bidirectional_attention", False), "attention to what follows a token"),
        (unknown, f"layers of {min(unknown, default='')}"),
    ):
        if present:
            raise ConfigError(f"{where} has {what}, which the trainer does not run, whatever the engine; use another")


def load_config(path: str) -> PreTrainedConfig:
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} is not a model directory: it has no config.json")
    looks_local = path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).parent.is_dir()
    if looks_local and not Path(path).exists():
        raise ConfigError(f"model directory {path} does not exist; make it (`headway sft CONFIG`) or set model.path")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path} cannot be read: {_first_line(error)}") from error
    check_supported(config, path)
    return config


def load_model(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a transformers directory or hub name, with our attention."""
    load_config(path)
    # transformers reports weights it cannot read by several unrelated exception types.
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="headway", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"the weights of {path} cannot be loaded: {_first_line(error)}") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(f"the weights of {path} are incomplete: {missing[0]} is missing; fetch the model again")
    for parameter in model.parameters():
        # A mapped file's tensors start at odd addresses; some products differ by that, in their last bits.
        parameter.data = parameter.data.clone()
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def build_model(init: InitSection, vocab_size: int, pad: int, eos: int, max_context: int, seed: int) -> PreTrainedModel:
    """A small Llama from nothing, its weights drawn from `seed`."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_hidden_layers=init.num_layers,
        num_attention_heads=init.num_heads,
        num_key_value_heads=init.num_kv_heads,
        max_position_embeddings=max_context,
        pad_token_id=pad,
        eos_token_id=eos,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=init.hidden_size**-0.5,  # the usual 0.02 is for wide models; a narrow one would start slowly
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="headway")
    return model


def model_shape(config: PreTrainedConfig) -> ModelShape:
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
    )


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters under the names `save_pretrained` writes, `lm_head.weight` always among them, tied or not."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors.setdefault("lm_head.weight", cast(nn.Linear, model.lm_head).weight)
    return tensors
