"""The same log-probs through TRL's published loss code give the same loss and gradient, for the variants both have."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithm import AlgorithmSection
from headway.training.algorithms.losses import Figures, PolicyLossInput, policy_loss

pytestmark = pytest.mark.slow

LENGTHS = (5, 2, 7, 4)
WIDTH, LIMIT = max(LENGTHS), 9

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"aggregate": "sequence"}, {"loss_type": "grpo"}),
    "asymmetric clip, by token": (
        {"clip_eps": 0.1, "clip_eps_high": 0.3},
        {"loss_type": "bnpo", "low": 0.1, "high": 0.3},
    ),
    "dr_grpo": ({"aggregate": "constant", "length_limit": LIMIT}, {"loss_type": "dr_grpo"}),
    "dapo": ({}, {"loss_type": "dapo"}),
    "dual clip": ({"dual_clip": 1.5}, {"loss_type": "bnpo", "delta": 1.5}),
    "gspo": (
        {"ratio": "sequence", "clip_eps": 0.05, "clip_eps_high": 0.07, "aggregate": "sequence"},
        {"loss_type": "grpo", "level": "sequence", "low": 0.05, "high": 0.07},
    ),
    "cispo": (
        {"objective": "cispo", "clip_eps": 1.0, "clip_eps_high": 0.2},
        {"loss_type": "cispo", "high": 1.2},
    ),
    "sapo": (
        {"objective": "sapo", "sapo_temperature": 1.0, "sapo_temperature_negative": 1.05, "aggregate": "sequence"},
        {"loss_type": "sapo"},
    ),
    "kl in the loss": ({"kl_coef": 0.3, "aggregate": "sequence"}, {"loss_type": "grpo", "beta": 0.3}),
    "truncated importance sampling": (
        {"behaviour_cap": 1.1, "behaviour_cap_mode": "truncate"},
        {"loss_type": "bnpo", "weights": "token_truncate"},
    ),
    "masked importance sampling": ({"behaviour_cap": 1.1}, {"loss_type": "bnpo", "weights": "token_mask"}),
    "truncated by sequence": (
        {"behaviour_cap": 1.1, "behaviour_cap_mode": "truncate", "behaviour_level": "sequence"},
        {"loss_type": "bnpo", "weights": "sequence_truncate"},
    ),
    "off-policy sequence mask": ({"mask_negative_kl": 0.05}, {"loss_type": "bnpo", "off_policy": 0.05}),
}


def rows(seed: int) -> dict[str, Tensor]:
    """Padded log-probs near one another, as those of one batch are."""
    random = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), WIDTH, generator=random, dtype=torch.float64)

    behaviour = -2 + noise(0.5)
    proximal = behaviour + noise(0.15)
    current = proximal + noise(0.2)
    advantages = torch.tensor([1.0, -1.3, 0.4, -0.2], dtype=torch.float64)
    mask = torch.tensor([[1] * length + [0] * (WIDTH - length) for length in LENGTHS])
    reference = current + noise(0.3)
    return dict(zip(
        ("behaviour", "proximal", "current", "advantages", "mask", "reference"),
        (behaviour, proximal, current, advantages, mask, reference), strict=True,
    ))  # fmt: skip


def of_trl(given: dict[str, Tensor], knobs: dict[str, Any]) -> tuple[float, Tensor]:
    """The loss of `GRPOTrainer`, of which this gives it just the attributes that its loss reads."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    current = given["current"].clone().requires_grad_()
    mask, mode = given["mask"], knobs.get("weights")
    gap = (given["proximal"] - given["behaviour"]) * mask
    weights = (gap.sum(1, keepdim=True) if mode == "sequence_truncate" else gap).exp()
    weights = weights.masked_fill(weights > 1.1, 0) if mode == "token_mask" else weights.clamp(max=1.1)
    args = SimpleNamespace(
        use_bias_correction_kl=False,
        delta=knobs.get("delta"),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    itself = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=knobs.get("off_policy"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        importance_sampling_level=knobs.get("level", "token"),
        beta=knobs.get("beta", 0.0),
        args=args,
        loss_type=knobs["loss_type"],
        epsilon_low=knobs.get("low", 0.2),
        epsilon_high=knobs.get("high", 0.2),
        use_vllm=mode is not None,
        vllm_importance_sampling_correction=mode is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (current, torch.zeros_like(current), None),
    )
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["proximal"],
        "sampling_per_token_logps": given["behaviour"],
        "ref_per_token_logps": given["reference"],
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(itself, None, inputs)
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad[mask.bool()]


def of_headway(given: dict[str, Tensor], knobs: dict[str, Any], with_weights: bool) -> tuple[float, Tensor]:
    mask = given["mask"].bool()
    current = given["current"][mask].clone().requires_grad_()
    chosen = AlgorithmSection.model_validate(knobs)
    # TRL knows the policy that sampled only in importance sampling and the off-policy mask.
    behaviour = "behaviour" if with_weights else "proximal"
    inputs = PolicyLossInput(
        logprobs_T=current,
        proximal_T=given["proximal"][mask],
        behaviour_T=given[behaviour][mask],
        advantages_T=given["advantages"][:, None].expand(-1, WIDTH)[mask],
        mask_T=torch.ones_like(current),
        counts_N=torch.tensor(LENGTHS),
        reference_T=given["reference"][mask] if chosen.kl_coef else None,
    )
    loss = policy_loss(inputs, Figures(sum(LENGTHS), len(LENGTHS)), chosen).loss
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_variant_gives_the_same_numbers_as_trl(name: str, seed: int) -> None:
    pytest.importorskip("trl")
    ours, theirs = VARIANTS[name]
    given = rows(seed)
    if "off_policy" in theirs:  # TRL applies no weight here, and Headway always does: make it 1
        given["proximal"] = given["behaviour"]
    with_weights = "weights" in theirs or "off_policy" in theirs
    loss, gradient = of_headway(given, ours, with_weights)
    expected, expected_gradient = of_trl(given, theirs)
    assert loss == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
