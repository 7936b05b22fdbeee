"""Loads, builds and checks transformers causal LMs of the supported families.

Nothing of a model directory is executed: neither code of its own (`auto_map`) nor pickles.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from headway.config import InitSection
from headway.errors import CAUSE, ConfigError, first_line, translated
from headway.model.attention import attention_softcap
from headway.model.shape import ModelShape

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")

_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 64  # of each file: milliseconds, however large it is

_loading = threading.Lock()

disable_progress_bar()  # each process would show its own


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile the decoder's blocks in place: one graph for all layers of a kind and any number of tokens."""
    # Capped attention is a loop over sequences, which would be recompiled for every micro-batch.
    capped = attention_softcap(model.config) > 0
    for layer in cast(nn.ModuleList, cast(nn.Module, model.model).layers):
        (cast(nn.Module, layer.mlp) if capped else layer).compile(dynamic=True)


def check_supported(config: PreTrainedConfig, where: str) -> None:
    """Refuse models that the trainer cannot run; another engine would not help, since the trainer must run them too."""
    if config.model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError(
            f"{where} is a {config.model_type} model, which the trainer does not run, whatever the engine; "
            f"use one of the families {supported}"
        )
    layer_types = getattr(config, "layer_types", None) or ()
    if layer_types and len(layer_types) != config.num_hidden_layers:
        raise ConfigError(
            f"{where} contradicts itself: its config.json has {config.num_hidden_layers} layers and "
            f"{len(layer_types)} layer_types; fetch the model again"
        )
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    # Their angles depend on the longest position in a forward pass, so on other sequences of a micro-batch.
    unstable = sorted(set(_rope_types(config)) & {"dynamic", "longrope"})
    for present, what in (
        (getattr(config, "quantization_config", None), "quantised weights"),
        (unstable, f"rotary embeddings of type {min(unstable, default='')}"),
        (getattr(config, "use_sliding_window", False), f"{config.model_type}'s sliding-window attention"),
        (getattr(config, "use_bidirectional_attention", False), "attention to what follows a token"),
        (unknown, f"layers of {min(unknown, default='')}"),
    ):
        if present:
            raise ConfigError(f"{where} has {what}, which the trainer does not run, whatever the engine; use another")


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """RoPE types of all layers; some families have parameters for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and "rope_type" in each:
            yield each["rope_type"]


def load_config(path: str) -> PreTrainedConfig:
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} is not a model directory: it has no config.json")
    looks_local = path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).parent.is_dir()
    if looks_local and not Path(path).exists():
        raise ConfigError(f"model directory {path} does not exist; make it (`headway sft CONFIG`) or set model.path")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # of several unrelated types
        if "trust_remote_code" in str(error):
            raise ConfigError(f"model {path} needs code of its own, which Headway does not run; use another") from error
        raise ConfigError(f"model {path} cannot be read: {first_line(error)}") from error
    check_supported(config, path)
    return config


def load_model(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a transformers directory or hub name, with our attention."""
    check_weights(path, load_config(path))
    # Loading patches torch for the whole process: two threads at once would take each other's weights for missing.
    with _loading:
        return _load_model(path, dtype)


def _load_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    # transformers reports weights it cannot read by several unrelated exception types.
    with translated(
        (OSError, ValueError, RuntimeError, SafetensorError),
        ConfigError,
        f"the weights of {path} cannot be loaded: {CAUSE}",
    ):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="headway",
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(f"the weights of {path} are incomplete: {missing[0]} is missing; fetch the model again")
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
            raise ConfigError(f"the weights of {path} are damaged: {name} holds NaN or infinity; fetch the model again")
        # A mapped file's tensors start at odd addresses; some products differ by that, in their last bits.
        parameter.data = parameter.data.clone()
    return model


def check_weights(path: str, config: PreTrainedConfig) -> None:
    """Read the headers of a directory's weight files: refuse missing, pickled, truncated or contradicting ones."""
    directory = Path(path)
    if not directory.is_dir():
        return
    names: set[str] = set()
    for file in _weight_files(directory):
        try:
            with safe_open(file, framework="pt") as opened:
                names |= set(opened.keys())
        except (OSError, SafetensorError) as error:
            sentence = f"the weights of {path} cannot be loaded: {file.name}: {first_line(error)}"
            raise ConfigError(f"{sentence}; fetch the model again") from error
    layers = {int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    if len(layers) != config.num_hidden_layers:
        raise ConfigError(
            f"{path} contradicts itself: its config.json has {config.num_hidden_layers} layers and its weights have "
            f"{len(layers)}; fetch the model again"
        )


def sample_weights(path: str) -> str:
    """A checksum of places all over a directory's weight files, of which any training changes some; empty for a name
    on the hub."""
    digest = xxhash.xxh3_64()
    for file in _weight_files(Path(path)) if Path(path).is_dir() else ():
        num_bytes = file.stat().st_size
        with open(file, "rb") as opened:
            for place in range(0, num_bytes, max(_SAMPLE_BYTES, num_bytes // _NUM_SAMPLES)):
                opened.seek(place)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest() if Path(path).is_dir() else ""


def _weight_files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        with translated(
            (ValueError, KeyError, TypeError, AttributeError),
            ConfigError,
            f"the weights of {directory} cannot be loaded: {INDEX} is damaged; fetch it again",
        ):
            index = json.loads((directory / INDEX).read_text())
            return [directory / name for name in sorted(set(index["weight_map"].values()))]
    if not (directory / SINGLE_FILE).is_file() and (pickles := sorted(directory.glob("*.bin"))):
        raise ConfigError(
            f"the weights of {directory} are a pickle ({pickles[0].name}), which can run code when it is loaded; "
            "convert them to safetensors"
        )
    return [directory / SINGLE_FILE]


def end_tokens(path: str, config: PreTrainedConfig) -> set[int]:
    """Tokens that end a text: those of config.json, and of generation_config.json where chat models list theirs."""
    listed = [config.eos_token_id]
    # The file is optional, and from a hub only the attempt says whether it is there.
    with suppress(OSError):
        listed.append(GenerationConfig.from_pretrained(path).eos_token_id)
    return {i for item in listed for i in (item if isinstance(item, list) else [item]) if i is not None}


def build_model(init: InitSection, vocab_size: int, pad: int, eos: int, max_context: int, seed: int) -> PreTrainedModel:
    """A small Llama with random weights drawn from `seed`."""
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
