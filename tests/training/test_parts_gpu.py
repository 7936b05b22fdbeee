"""Every part of an objective, LoRA, critic and reference on a GPU: the CPU's numbers, repeatable, without waiting."""

from typing import Any

import pytest
import torch
from training import digest_of, distance, gradients_of, make_trainer, stale_batch

from headway.config import LoraSection
from headway.training import trainer as trainer_module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICE = "cuda"

PARTS: dict[str, dict[str, Any]] = {
    "gspo": {"preset": "gspo"},
    "sequence weight": {"behaviour_level": "sequence", "behaviour_cap": 5.0},
    "sequence mask": {"mask_sequence_low": 0.7, "mask_sequence_high": 1.3},
    "token mask": {"mask_token_low": 0.5, "mask_token_high": 2.0},
    "second moment": {"mask_second_moment": 0.1},
    "negative": {"mask_negative_kl": 0.05},
    "cispo": {"preset": "cispo"},
    "sapo": {"objective": "sapo"},
    "rloo": {"preset": "rloo", "length_limit": 16},
    "dual clip": {"objective": "naive", "dual_clip": 3.0},
    "entropy": {"entropy_coef": 0.05},
    "kl": {"kl_coef": 0.1},
    "kl in the reward": {"kl_coef": 0.1, "kl_place": "reward"},
    "ppo": {"preset": "ppo"},
    "lora": {"lora": LoraSection(rank=4)},
    "lora, entropy": {"lora": LoraSection(rank=4), "entropy_coef": 0.05},
}
READ_BACK = {"second moment", "kl in the reward", "ppo"}
"""Their figures are needed on the host before the step goes on."""


@pytest.fixture(autouse=True)
def repeatable_only_here() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("part", PARTS)
def test_gradients_are_those_of_the_cpu(tiny_model: str, part: str) -> None:
    knobs = {"clip_norm": 1e9, "token_budget": 64, **PARTS[part]}
    found = []
    for device in ("cpu", DEVICE):
        trainer = make_trainer(tiny_model, device=device, **knobs)
        report = trainer.train(stale_batch(tiny_model))
        assert not report.skipped
        found.append(({n: g.cpu() for n, g in gradients_of(trainer.masters).items()}, report.metrics))
    (exact, one), (other_gradients, other) = found
    assert distance(other_gradients, exact) < 1e-4
    for name in one:
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode_repeats_and_raises_for_no_operation(tiny_model: str, part: str, dtype: str) -> None:
    digests = set()
    for _ in range(2):
        knobs = {"dtype": dtype, "minibatches": 2, "token_budget": 64, "lr": 1e-3, "deterministic": True}
        trainer = make_trainer(tiny_model, device=DEVICE, **(knobs | PARTS[part]))
        for version in range(2):
            assert not trainer.train(stale_batch(tiny_model, version, first=10 * version)).skipped
        digests.add(digest_of(trainer))
    assert len(digests) == 1


@pytest.mark.parametrize("part", [part for part in PARTS if part not in READ_BACK])
def test_no_part_makes_the_host_wait(tiny_model: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(
        tiny_model, device=DEVICE, dtype="bfloat16", compile=False, minibatches=2, token_budget=64, **PARTS[part]
    )
    trainer.train(stale_batch(tiny_model))
    read_back = trainer_module.read_back

    def allowed(outcomes: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return read_back(outcomes)

    monkeypatch.setattr(trainer_module, "read_back", allowed)
    batch = stale_batch(tiny_model, 1, first=10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert not trainer.train(batch).skipped
    finally:
        torch.cuda.set_sync_debug_mode("default")
