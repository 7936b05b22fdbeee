"""LoRA: the gradient of the factors, what engines make of a published adapter, and what peft reads of a saved one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from system import check_finished, events_of, make_config, run_inline
from training import (
    digest_of,
    distance,
    load_state,
    make_trainer,
    plain_model,
    reference_loss,
    rows_of,
    same_bits,
    save_state,
    stale_batch,
    write_model,
)

from headway.config import LoraSection
from headway.control.resume import replay
from headway.errors import ConfigError, WeightMismatch
from headway.model.loading import load_model, named_weights
from headway.training.trainer import Trainer
from headway.weights.shadow import ShadowWeights

LORA = LoraSection(rank=4, alpha=8)


def lora_trainer(path: str, lora: LoraSection = LORA, **knobs: Any) -> Trainer:
    return make_trainer(path, lora=lora, **({"lr": 3e-3} | knobs))


def steps(trainer: Trainer, path: str, num: int) -> None:
    for _ in range(num):
        report = trainer.train(stale_batch(path, trainer.version))
        assert not report.skipped


def model_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_weights(trainer._model).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_makes_the_trainers_weights_of_a_published_adapter_bit_for_bit(tiny_model: str, dtype: str) -> None:
    trainer = lora_trainer(tiny_model, dtype=dtype)
    live = named_weights(load_model(tiny_model, getattr(torch, dtype)))
    shadow, whole = ShadowWeights(live), sum(tensor.nbytes for tensor in live.values())
    assert same_bits(dict(live), model_of(trainer)), "an adapter begins as no change"
    for _ in range(3):
        steps(trainer, tiny_model, 1)
        update = trainer.publish()
        assert update.kind == "adapter" and update.num_bytes < whole / 4
        shadow.stage(update)
        assert shadow.swap() == update.fingerprints
        assert same_bits(dict(live), model_of(trainer))


def test_only_adapters_are_trained_and_have_state_of_the_optimizer(tiny_model: str) -> None:
    trainer = lora_trainer(tiny_model)
    before = model_of(trainer)
    steps(trainer, tiny_model, 2)
    changed = {name for name, tensor in model_of(trainer).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "_proj" in name}
    assert all(parameter.grad is None for parameter in trainer._model.parameters())
    num_trained = sum(master.numel() for master in trainer.masters.named.values())
    assert sum(state["exp_avg"].numel() for state in trainer.optimizer.state.values()) == num_trained


def test_the_factors_gradient_is_that_of_peft(tiny_model: str) -> None:
    """peft runs x·(W + s·B·A)ᵀ as two products; autograd through them is the reference."""
    batch = stale_batch(tiny_model)
    trainer = lora_trainer(tiny_model, clip_norm=1e9)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in trainer.masters.named.values():
            master.copy_(0.05 * torch.randn(master.shape, generator=generator))
    trainer.masters.refresh()
    reference = plain_model(tiny_model)
    wrapped = get_peft_model(
        reference, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    theirs = {name: parameter for name, parameter in wrapped.named_parameters() if ".lora_" in name}
    key = "base_model.model.{}.default.weight"
    with torch.no_grad():
        for name, master in trainer.masters.named.items():
            theirs[key.format(name)].copy_(master)
    reference_loss(reference, rows_of(batch.groups)).backward()
    trainer.train(batch)
    found = {name: master.grad for name, master in trainer.masters.named.items() if master.grad is not None}
    expected = {name: theirs[key.format(name)].grad for name in trainer.masters.named}
    assert distance(found, expected) < 1e-5  # type: ignore[arg-type]


def test_peft_loads_what_is_saved_and_the_merged_model_is_the_trainers(tiny_model: str, tmp_path: Path) -> None:
    trainer = lora_trainer(tiny_model)
    steps(trainer, tiny_model, 2)
    write_model(trainer, tmp_path / "model")
    trained = model_of(trainer)
    assert same_bits(dict(named_weights(load_model(str(tmp_path / "model")))), trained)
    merged = PeftModel.from_pretrained(plain_model(tiny_model), str(tmp_path / "model" / "adapter")).merge_and_unload()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, trained[name], rtol=1e-6, atol=1e-7)
    write_model(lora_trainer(tiny_model, LORA.model_copy(update={"merged": False})), tmp_path / "adapter alone")
    assert [path.name for path in (tmp_path / "adapter alone").iterdir()] == ["adapter"]


def test_a_resumed_trainer_goes_on_as_the_one_that_was_lost(tiny_model: str, tmp_path: Path) -> None:
    trainer = lora_trainer(tiny_model)
    steps(trainer, tiny_model, 2)
    save_state(trainer, tmp_path / "a")
    again = lora_trainer(tiny_model)
    assert load_state(again, tmp_path / "a") == 2 and digest_of(again) == digest_of(trainer)
    for each in (trainer, again):
        steps(each, tiny_model, 1)
    assert digest_of(again) == digest_of(trainer) and same_bits(model_of(again), model_of(trainer))
    with pytest.raises(ConfigError, match=r"checkpoint .* is of another model"):
        load_state(make_trainer(tiny_model), tmp_path / "a")


def test_an_adapter_for_another_base_is_refused_by_engine_and_trainer(
    tiny_model: str, tmp_path: Path, tiny_variant: Any
) -> None:
    trainer = lora_trainer(tiny_model)
    steps(trainer, tiny_model, 1)
    live = named_weights(load_model(tiny_model))
    with torch.no_grad():
        live["model.norm.weight"][0] += 1
    with pytest.raises(WeightMismatch, match=r"version 1: its adapter was made for the base \w+, and the base here"):
        ShadowWeights(live).stage(trainer.publish())
    write_model(trainer, tmp_path / "model")
    started = lora_trainer(tiny_model, LORA.model_copy(update={"adapter": str(tmp_path / "model" / "adapter")}))
    assert same_bits(model_of(started), model_of(trainer)), "training goes on from a saved adapter"
    moved = LORA.model_copy(update={"adapter": str(tmp_path / "model" / "adapter")})
    with pytest.raises(ConfigError, match="was made for another base than"):
        lora_trainer(str(tmp_path / "model"), moved)
    with pytest.raises(ConfigError, match=r"does not fit model.path = .* with rank = 8 and targets = all-linear"):
        lora_trainer(tiny_model, moved.model_copy(update={"rank": 8}))
    with pytest.raises(ConfigError, match="is no adapter in peft"):
        lora_trainer(tiny_model, LORA.model_copy(update={"adapter": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"model\.lora\.targets = nothing does not fit"):
        lora_trainer(tiny_model, LORA.model_copy(update={"targets": "nothing"}))


def test_a_damaged_adapter_never_runs(tiny_model: str, tmp_path: Path) -> None:
    trainer = lora_trainer(tiny_model)
    write_model(trainer, tmp_path / "model")
    file = tmp_path / "model" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(min(tensors))
    save_file(tensors, file)
    with pytest.raises(ConfigError, match="does not fit"):
        lora_trainer(tiny_model, LORA.model_copy(update={"adapter": str(file.parent)}))


def test_a_run_with_adapters_holds_parity_and_replays(tiny_model: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, tiny_model, model={"path": tiny_model, "lora": {"rank": 4}}, run={"steps": 3})
    run_inline(config)
    events = events_of(config)
    check_finished(config, events)
    assert max(event.parity_max_abs for event in events if event.kind == "swapped") < 1e-4
    version, digest = asyncio.run(replay(Path(config.run.dir), lambda event: None))
    assert version == 3 and digest == [event.digest for event in events if event.kind == "trained"][-1]
    assert (Path(config.run.dir) / "model" / "adapter" / "adapter_config.json").is_file()
