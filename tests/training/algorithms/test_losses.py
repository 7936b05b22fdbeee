"""Invariant 7: the loss is Eq. 5, value and gradient; invariant 12: packing-independent gradient."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithm import AlgorithmSection
from headway.training.algorithms.losses import (
    Figures,
    PolicyLossInput,
    PolicyLossOutput,
    merge_metrics,
    policy_loss,
)

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=100)


@dataclass(frozen=True)
class Token:
    current: float
    proximal: float
    behaviour: float
    advantage: float
    mask: bool


@dataclass(frozen=True)
class Choice:
    """Which objective, with which knobs."""

    decoupled: bool
    clip_eps: float = 0.2
    cap: float = 0.0
    mode: str = "mask"

    @property
    def section(self) -> AlgorithmSection:
        cap = {"behaviour_cap": self.cap, "behaviour_cap_mode": self.mode} if self.decoupled else {}
        return AlgorithmSection.model_validate(
            {"objective": "decoupled" if self.decoupled else "naive", "clip_eps": self.clip_eps} | cap
        )


def scalar_loss(tokens: list[Token], denominator: float, choice: Choice) -> float:
    """Eq. 5 as it is printed, or plain PPO, token by token."""
    total = 0.0
    for token in (token for token in tokens if token.mask):
        weight = math.exp(token.proximal) / math.exp(token.behaviour) if choice.decoupled else 1.0
        if choice.decoupled and choice.cap and weight > choice.cap:
            weight = {"mask": 0.0, "truncate": choice.cap}[choice.mode]
        u = math.exp(token.current) / math.exp(token.proximal if choice.decoupled else token.behaviour)
        clipped = min(max(u, 1 - choice.clip_eps), 1 + choice.clip_eps)
        total += weight * min(u * token.advantage, clipped * token.advantage)
    return -total / denominator


def scalar_gradient(tokens: list[Token], denominator: float, choice: Choice) -> list[float]:
    """Central differences of the scalar loss in each current log-prob."""
    step, gradient = 1e-6, []
    for index, token in enumerate(tokens):
        up, down = list(tokens), list(tokens)
        up[index] = Token(token.current + step, token.proximal, token.behaviour, token.advantage, token.mask)
        down[index] = Token(token.current - step, token.proximal, token.behaviour, token.advantage, token.mask)
        difference = scalar_loss(up, denominator, choice) - scalar_loss(down, denominator, choice)
        gradient.append(difference / (2 * step))
    return gradient


def at_a_kink(token: Token, choice: Choice) -> bool:
    u = math.exp(token.current - (token.proximal if choice.decoupled else token.behaviour))
    return min(abs(u - 1 - choice.clip_eps), abs(u - 1 + choice.clip_eps)) < 1e-4


def packed(tokens: list[Token], dtype: torch.dtype = torch.float64) -> PolicyLossInput:
    return PolicyLossInput(
        logprobs_T=torch.tensor([token.current for token in tokens], dtype=dtype, requires_grad=True),
        proximal_T=torch.tensor([token.proximal for token in tokens], dtype=dtype),
        behaviour_T=torch.tensor([token.behaviour for token in tokens], dtype=dtype),
        advantages_T=torch.tensor([token.advantage for token in tokens], dtype=dtype),
        mask_T=torch.tensor([token.mask for token in tokens], dtype=dtype),
    )


def computed(inputs: PolicyLossInput, denominator: float, choice: Choice) -> tuple[PolicyLossOutput, list[float]]:
    output = policy_loss(inputs, Figures(denominator), choice.section)  # type: ignore[arg-type]
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs_T.grad is not None
    return output, inputs.logprobs_T.grad.tolist()


logprobs = st.floats(-4, 0)
near = st.floats(-0.6, 0.6)


@st.composite
def tokens(draw: st.DrawFn) -> Token:
    """Log-probs near one another as in training, so that both sides of each clip and cap occur."""
    behaviour = draw(logprobs)
    proximal = behaviour + draw(near)
    current = draw(st.one_of(st.just(proximal), near.map(lambda gap: proximal + gap)))
    return Token(current, proximal, behaviour, draw(st.sampled_from([-2.0, -0.7, 0.0, 0.3, 1.5])), draw(st.booleans()))


choices = st.one_of(
    st.builds(Choice, st.just(False), st.sampled_from([0.1, 0.2])),
    st.builds(
        Choice,
        st.just(True),
        st.sampled_from([0.1, 0.2]),
        st.sampled_from([0.0, 0.8, 1.2]),
        st.sampled_from(["mask", "truncate"]),
    ),
)


@repeatable
@given(st.lists(tokens(), min_size=1, max_size=12), st.floats(1, 50), choices)
def test_value_and_gradient_equal_the_scalar_reference(tokens: list[Token], denominator: float, choice: Choice) -> None:
    output, gradient = computed(packed(tokens), denominator, choice)
    assert output.loss.item() == pytest.approx(scalar_loss(tokens, denominator, choice), rel=1e-12, abs=1e-12)
    expected = scalar_gradient(tokens, denominator, choice)
    for token, got, wanted in zip(tokens, gradient, expected, strict=True):
        assert at_a_kink(token, choice) or got == pytest.approx(wanted, rel=1e-6, abs=1e-7)


@repeatable
@given(st.lists(tokens(), min_size=1, max_size=12), choices, st.data())
def test_any_micro_batch_split_adds_up_to_the_whole_in_loss_gradient_and_metrics(
    tokens: list[Token], choice: Choice, data: st.DataObject
) -> None:
    home = data.draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))
    whole, whole_gradient = computed(packed(tokens), 7.0, choice)
    loss, gradient, metrics = 0.0, [0.0] * len(tokens), []
    for number in sorted(set(home)):
        members = [index for index in range(len(tokens)) if home[index] == number]
        part, part_gradient = computed(packed([tokens[index] for index in members]), 7.0, choice)
        loss += part.loss.item()
        metrics.append(part.metrics)
        for index, value in zip(members, part_gradient, strict=True):
            gradient[index] = value
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-12)
    assert gradient == whole_gradient
    merged = merge_metrics(metrics)
    assert merged.keys() == whole.metrics.keys()
    for name, total in merged.items():
        assert total.item() == pytest.approx(whole.metrics[name].item(), rel=1e-12, abs=1e-12), name


@repeatable
@given(st.lists(tokens(), min_size=1, max_size=12), choices)
def test_metrics_equal_a_scalar_count(tokens: list[Token], choice: Choice) -> None:
    metrics = computed(packed(tokens), 1.0, choice)[0].metrics
    trained = [token for token in tokens if token.mask]
    weights = [math.exp(token.proximal - token.behaviour) for token in trained]
    gaps = [token.current - token.proximal for token in trained]
    capped = [weight for weight in weights if choice.decoupled and 0 < choice.cap < weight]
    expected = {
        "tokens": len(trained),
        "capped_count": len(capped),
        "behaviour_weight_sum": sum(weights),
        "behaviour_weight_max": max(weights, default=0.0),
        "kl_sum": sum(math.expm1(gap) - gap for gap in gaps),
        "behaviour_kl_sum": sum(weight - 1 - math.log(weight) for weight in weights),
    }
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not any(value.requires_grad for value in metrics.values())


def test_clip_count_counts_tokens_whose_gradient_the_clip_removed() -> None:
    half = math.log(0.5)
    cases = [
        Token(-half - 2, -2, -2, 1.0, True),  # u = 2 and A > 0: clipped
        Token(-half - 2, -2, -2, -1.0, True),  # u = 2 and A < 0: pushed down without limit
        Token(half - 2, -2, -2, 1.0, True),  # u = 1/2 and A > 0
        Token(half - 2, -2, -2, -1.0, True),  # u = 1/2 and A < 0: clipped
        Token(-2, -2, -2, 1.0, True),
        Token(-half - 2, -2, -2, 1.0, False),
    ]
    output, gradient = computed(packed(cases), 1.0, Choice(True))
    assert output.metrics["clip_count"].item() == 2
    assert gradient == pytest.approx([0, 2, -0.5, 0, -1, 0])
    assert output.loss.item() == pytest.approx(-(1.2 - 2 + 0.5 - 0.8 + 1))


def test_the_behaviour_weight_is_applied_even_when_current_equals_proximal() -> None:
    token = Token(-1.0, -1.0, -1.5, 2.0, True)
    output, gradient = computed(packed([token]), 4.0, Choice(True))
    assert output.loss.item() == pytest.approx(-math.exp(0.5) * 2.0 / 4.0)
    assert gradient == pytest.approx([-math.exp(0.5) * 2.0 / 4.0])


def test_a_token_over_the_cap_is_masked_or_truncated_and_its_denominator_stays() -> None:
    over, under = Token(-1.0, -1.0, -3.0, 1.0, True), Token(-1.0, -1.0, -1.0, 1.0, True)
    losses = {
        mode: computed(packed([over, under]), 2.0, Choice(True, cap=5.0, mode=mode))[0] for mode in ("mask", "truncate")
    }
    assert losses["mask"].loss.item() == pytest.approx(-(0 + 1) / 2)
    assert losses["truncate"].loss.item() == pytest.approx(-(5 + 1) / 2)
    assert [output.metrics["capped_count"].item() for output in losses.values()] == [1, 1]
    assert computed(packed([over, under]), 2.0, Choice(True))[0].loss.item() == pytest.approx(-(math.e**2 + 1) / 2)


@pytest.mark.parametrize("decoupled", [True, False])
def test_nothing_outside_the_mask_is_read_not_even_a_nan(decoupled: bool) -> None:
    nan, inf = math.nan, math.inf
    trained = Token(-1.0, -1.1, -1.2, 1.0, True)
    rubbish = [Token(nan, 0, 0, 0, False), Token(-1, nan, -inf, 0, False), Token(-1, -1, -1, nan, False)]
    alone, gradient_alone = computed(packed([trained]), 1.0, Choice(decoupled))
    output, gradient = computed(packed([trained, *rubbish]), 1.0, Choice(decoupled))
    assert output.loss.item() == alone.loss.item()
    assert gradient == [*gradient_alone, 0, 0, 0]
    assert {k: v.item() for k, v in output.metrics.items()} == {k: v.item() for k, v in alone.metrics.items()}


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(decoupled: bool) -> None:
    output, gradient = computed(packed([Token(-1, -2, -3, 1.0, False)] * 3), 5.0, Choice(decoupled))
    assert output.loss.item() == 0 and gradient == [0, 0, 0]
    assert all(value.item() == 0 for value in output.metrics.values())


def test_an_extreme_ratio_stays_finite_in_float32_and_a_nan_stays_visible() -> None:
    extreme = packed([Token(-1.0, -200.0, -400.0, -1.0, True), Token(-400.0, -1.0, -1.0, 1.0, True)], torch.float32)
    output, gradient = computed(extreme, 1.0, Choice(True))
    assert math.isfinite(output.loss.item()) and all(map(math.isfinite, gradient))
    assert all(value.isfinite() for value in output.metrics.values())
    assert math.isnan(computed(packed([Token(math.nan, -1, -1, 1.0, True)]), 1.0, Choice(True))[0].loss.item())


def test_float32_agrees_with_the_scalar_reference_to_rounding() -> None:
    tokens = [Token(-0.3 * i, -0.31 * i, -0.29 * i, (-1.0) ** i, i % 3 > 0) for i in range(32)]
    output, _ = computed(packed(tokens, torch.float32), 20.0, Choice(True))
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(scalar_loss(tokens, 20.0, Choice(True)), rel=1e-5)


@pytest.mark.parametrize(
    "knobs",
    [
        {"aggregate": "sequence"},
        {"ratio": "sequence", "dual_clip": 3.0},
        {"behaviour_cap": 2.0, "behaviour_level": "sequence", "mask_token_low": 0.5, "mask_token_high": 2.0},
        {"mask_sequence_low": 0.5, "mask_sequence_high": 2.0, "mask_negative_kl": 0.1},
        {"objective": "cispo", "kl_coef": 0.1, "entropy_coef": 0.1},
    ],
)
def test_no_value_is_read_back_from_the_device(knobs: dict[str, object]) -> None:
    """On a GPU each such reading makes the host wait. Tensors of the device `meta` have no values to read."""
    logprobs_T = torch.zeros(6, device="meta", requires_grad=True)
    others = [torch.zeros(6, device="meta") for _ in range(5)]
    inputs = PolicyLossInput(logprobs_T, *others[:4], torch.tensor([2, 4], device="meta"), others[4], others[4] + 1)
    figures = Figures(6, 2, entropy_coef=0.1)
    output = policy_loss(inputs, figures, AlgorithmSection.model_validate({"objective": "decoupled"} | knobs))
    output.loss.backward()
    assert {tensor.device.type for tensor in (output.loss, output.fate_T, *output.metrics.values())} == {"meta"}


def test_wrong_inputs_are_refused() -> None:
    good = packed([Token(-1, -1, -1, 1.0, True)] * 2)
    with pytest.raises(ValueError, match="shapes differ"):
        PolicyLossInput(good.logprobs_T, good.proximal_T[:1], good.behaviour_T, good.advantages_T, good.mask_T)
    with pytest.raises(ValueError, match="detach"):
        PolicyLossInput(good.logprobs_T, good.logprobs_T, good.behaviour_T, good.advantages_T, good.mask_T)
    with pytest.raises(ValueError, match="denominator"):
        policy_loss(good, Figures(0), AlgorithmSection())
