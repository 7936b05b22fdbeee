"""Reading, building and naming models: what cannot be run is one sentence, before anything heavy starts."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.config import InitSection
from headway.errors import ConfigError
from headway.model.device import find_device
from headway.model.loading import build_model, check_weights, load_config, load_model, model_shape, named_weights

FAMILIES = ["llama", "llama-untied", "qwen2", "qwen2-tied", "qwen3"]
FAMILIES += ["mistral", "gemma", "gemma2", "gemma2-untied", "gemma3_text"]
CUDA = torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
Variant = Callable[[str], str]


@pytest.fixture
def copied(tiny_model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refused(load: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        load()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    said = refused(lambda: load_config(str(tmp_path)))
    assert said == f"{tmp_path} is not a model directory: it has no config.json"


def test_a_damaged_config_is_one_sentence(copied: Path) -> None:
    (copied / "config.json").write_text("{")
    assert refused(lambda: load_model(str(copied))).startswith(f"model {copied} cannot be read: ")


def test_a_family_the_trainer_cannot_run_is_refused_by_name(copied: Path) -> None:
    (copied / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    said = refused(lambda: load_config(str(copied)))
    assert said == (
        f"{copied} is a mixtral model, which the trainer does not run, whatever the engine; "
        "use one of the families llama, qwen2, qwen3, mistral, gemma, gemma2, gemma3_text"
    )


@pytest.mark.parametrize(
    ("family", "changed", "what"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "qwen2's sliding-window attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention to what follows a token"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "layers of chunked_attention"),
    ],
)
def test_attention_the_trainer_cannot_run_is_refused_by_name(
    tiny_variant: Variant, tmp_path: Path, family: str, changed: dict[str, Any], what: str
) -> None:
    directory = Path(shutil.copytree(tiny_variant(family), tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changed))
    said = refused(lambda: load_config(str(directory)))
    assert said == f"{directory} has {what}, which the trainer does not run, whatever the engine; use another"


def test_a_model_without_weights_is_one_sentence(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert refused(lambda: load_model(str(copied))).startswith(f"the weights of {copied} cannot be loaded: ")


def test_a_half_copied_weight_file_is_one_sentence(copied: Path) -> None:
    os.truncate(copied / "model.safetensors", 5000)
    assert refused(lambda: load_model(str(copied))).startswith(f"the weights of {copied} cannot be loaded: ")


def test_a_tensor_missing_from_the_weights_is_named_rather_than_drawn_at_random(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    said = refused(lambda: load_model(str(copied)))
    assert said == (
        f"the weights of {copied} are incomplete: model.layers.1.mlp.up_proj.weight is missing; fetch the model again"
    )


def test_a_tensor_of_another_shape_is_refused(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:8].contiguous()
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert refused(lambda: load_model(str(copied))).startswith(f"the weights of {copied} cannot be loaded: ")


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_are_those_save_pretrained_writes_and_the_head(tiny_variant: Variant, family: str) -> None:
    path = tiny_variant(family)
    written = load_file(Path(path) / "model.safetensors")
    named = named_weights(load_model(path))
    assert named.keys() == written.keys() | {"lm_head.weight"}
    assert all(torch.equal(named[name].detach(), tensor) for name, tensor in written.items())
    assert (named["lm_head.weight"] is named["model.embed_tokens.weight"]) == ("lm_head.weight" not in written)


def test_a_built_model_depends_on_its_seed_alone_and_leaves_the_random_state_alone() -> None:
    init = InitSection(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=48)
    before = torch.get_rng_state()
    one, same, other = (build_model(init, 20, 0, 1, 64, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    weights = [named_weights(model) for model in (one, same, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])
    shape = model_shape(one.config)
    assert (shape.hidden_size, shape.num_layers, shape.num_kv_heads, shape.head_dim) == (32, 1, 1, 16)


def test_a_gpu_that_is_not_there_is_one_sentence() -> None:
    wanted = f"cuda:{torch.cuda.device_count()}"
    said = refused(lambda: find_device("trainer.device", wanted, torch.float32))
    assert said.startswith(f"trainer.device = {wanted} asks for a GPU that is not there")
    assert find_device("trainer.device", "cpu", torch.bfloat16) == torch.device("cpu")


# What a directory must not make us do, or believe


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "embeddings of type dynamic"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights"),
    ],
)
def test_what_would_give_silently_wrong_numbers_is_refused_by_name(
    copied: Path, changed: dict[str, Any], what: str
) -> None:
    """Angles that follow the longest position of a pass would depend on a sequence's neighbours in a micro-batch."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | changed))
    said = refused(lambda: load_config(str(copied)))
    assert f"{what}, which the trainer does not run, whatever the engine; use another" in said


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_config_that_contradicts_the_weights_is_refused(copied: Path, num_layers: int) -> None:
    config = json.loads((copied / "config.json").read_text())
    changed = {"num_hidden_layers": num_layers, "layer_types": None}
    (copied / "config.json").write_text(json.dumps(config | changed))
    assert f"its config.json has {num_layers} layers and its weights have 2" in refused(lambda: load_model(str(copied)))


def test_17_layer_types_that_contradict_the_number_of_layers_are_one_sentence(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention"]}))
    said = refused(lambda: load_config(str(copied)))
    assert said.startswith(f"model {copied} cannot be read: ") and "`layer_types` (1)" in said and "\n" not in said


def test_code_in_a_model_directory_is_not_run(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": classes}))
    (copied / "evil.py").write_text(f"open({str(copied / 'ran')!r}, 'w')")
    said = refused(lambda: load_config(str(copied)))
    assert said == f"model {copied} needs code of its own, which Headway does not run; use another"
    assert not (copied / "ran").exists()


def test_a_pickled_checkpoint_is_refused_in_one_sentence(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    said = refused(lambda: load_model(str(copied)))
    assert said == (
        f"the weights of {copied} are a pickle (pytorch_model.bin), which can run code when it is loaded; "
        "convert them to safetensors"
    )


@pytest.mark.parametrize("num_bytes", [-1, 8, 5000])
def test_truncated_weights_are_found_by_their_headers(copied: Path, num_bytes: int) -> None:
    path = copied / "model.safetensors"
    os.truncate(path, num_bytes if num_bytes > 0 else path.stat().st_size + num_bytes)
    said = refused(lambda: check_weights(str(copied), load_config(str(copied))))
    assert said.startswith(f"the weights of {copied} cannot be loaded: model.safetensors: ")


def test_a_shard_that_is_missing_is_named(copied: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors: " in refused(lambda: check_weights(str(copied), load_config(str(copied))))


def test_weights_that_are_not_finite_are_refused_by_the_tensor(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    said = refused(lambda: load_model(str(copied)))
    assert said == (
        f"the weights of {copied} are damaged: model.layers.1.mlp.up_proj.weight holds NaN or infinity; "
        "fetch the model again"
    )
