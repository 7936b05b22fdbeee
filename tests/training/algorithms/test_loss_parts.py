"""Every part of a loss against a scalar reference, value and gradient; invariant 12: packing-independent gradient."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithm import AlgorithmSection
from headway.training.algorithms.algorithm import entropy_coef
from headway.training.algorithms.losses import MASKS, Figures, PolicyLossInput, PolicyLossOutput, policy_loss

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=40)


@dataclass(frozen=True)
class Token:
    current: float
    proximal: float
    behaviour: float
    advantage: float
    reference: float
    entropy: float


Sequences = list[list[Token]]
FIGURES = Figures(num_tokens=11, num_sequences=4, moment_limit=0.3, entropy_coef=0.05)


def ratio_of(token: Token, frozen: list[Token], index: int, chosen: AlgorithmSection) -> float:
    """u of one token; of a sequence, the geometric mean, which as GSPO has it moves with this token alone."""

    def start(each: Token) -> float:
        return each.behaviour if chosen.objective == "naive" else each.proximal

    if chosen.ratio == "token":
        return math.exp(token.current - start(token))
    mean = sum(each.current - start(each) for each in frozen) / len(frozen)
    return math.exp(mean + token.current - frozen[index].current)


def surrogate_of(token: Token, u: float, frozen_u: float, chosen: AlgorithmSection) -> float:
    low, high, advantage = 1 - chosen.clip_eps, 1 + (chosen.clip_eps_high or chosen.clip_eps), token.advantage
    match chosen.objective:
        case "cispo":
            return min(max(frozen_u, low), high) * advantage * token.current
        case "sapo":
            tau = chosen.sapo_temperature if advantage > 0 else chosen.sapo_temperature_negative
            return 4 / tau / (1 + math.exp(-tau * (u - 1))) * advantage
        case "reinforce":
            return advantage * token.current
    least = min(u * advantage, min(max(u, low), high) * advantage)
    return max(least, chosen.dual_clip * advantage) if chosen.dual_clip and advantage < 0 else least


def weight_of(token: Token, sequence: list[Token], chosen: AlgorithmSection) -> float:
    weight = math.exp(token.proximal - token.behaviour)
    if chosen.behaviour_level == "sequence":
        weight = math.exp(sum(each.proximal - each.behaviour for each in sequence))
    if chosen.objective == "naive":
        return 1.0
    if chosen.behaviour_cap and weight > chosen.behaviour_cap:
        return 0.0 if chosen.behaviour_cap_mode == "mask" else chosen.behaviour_cap
    return weight


def reasons_of(token: Token, sequence: list[Token], chosen: AlgorithmSection) -> list[str]:
    """Why a token takes no part in the policy's loss."""
    log_weight = token.proximal - token.behaviour
    mean = sum(each.proximal - each.behaviour for each in sequence) / len(sequence)
    moved = sum(each.behaviour - each.current for each in sequence) / len(sequence)
    bounds = {
        "masked_token": (math.exp(log_weight), chosen.mask_token_low, chosen.mask_token_high),
        "masked_sequence": (math.exp(mean), chosen.mask_sequence_low, chosen.mask_sequence_high),
        "masked_moment": (abs(log_weight), 0.0, FIGURES.moment_limit if chosen.mask_second_moment else 0.0),
        "masked_negative": (moved, -math.inf, chosen.mask_negative_kl if token.advantage < 0 else 0.0),
    }
    return [name for name, (value, low, high) in bounds.items() if value < low or (high and value > high)]


def scalar_loss(sequences: Sequences, frozen: Sequences, chosen: AlgorithmSection) -> float:
    """The loss token by token. What carries no gradient is read from `frozen`, the same tokens before they moved."""
    total = 0.0
    for sequence, fixed in zip(sequences, frozen, strict=True):
        for index, token in enumerate(sequence):
            u, frozen_u = (ratio_of(each, fixed, index, chosen) for each in (token, fixed[index]))
            weight = 0.0 if reasons_of(fixed[index], fixed, chosen) else weight_of(token, fixed, chosen)
            gap = token.reference - token.current
            kl = {"k1": -gap, "k2": gap**2 / 2, "k3": math.exp(gap) - 1 - gap}[chosen.kl_estimator]
            term = weight * surrogate_of(token, u, frozen_u, chosen) + FIGURES.entropy_coef * token.entropy
            term -= chosen.kl_coef * kl
            share = {"token": 11, "sequence": 4 * len(sequence), "constant": 4 * chosen.length_limit}
            total += term / share[chosen.aggregate]
    return -total


def scalar_gradient(sequences: Sequences, chosen: AlgorithmSection, step: float = 1e-6) -> list[float]:
    def moved(row: int, place: int, by: float) -> Sequences:
        rows = [list(sequence) for sequence in sequences]
        rows[row][place] = replace(rows[row][place], current=rows[row][place].current + by)
        return rows

    places = [(row, place) for row, sequence in enumerate(sequences) for place in range(len(sequence))]
    differences = [
        scalar_loss(moved(*where, step), sequences, chosen) - scalar_loss(moved(*where, -step), sequences, chosen)
        for where in places
    ]
    return [difference / (2 * step) for difference in differences]


def packed(sequences: Sequences) -> PolicyLossInput:
    flat = [token for sequence in sequences for token in sequence]

    def column(name: str, grad: bool = False) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in flat], dtype=torch.float64, requires_grad=grad)

    return PolicyLossInput(
        logprobs_T=column("current", True),
        proximal_T=column("proximal"),
        behaviour_T=column("behaviour"),
        advantages_T=column("advantage"),
        mask_T=torch.ones(len(flat)),
        counts_N=torch.tensor([len(sequence) for sequence in sequences]),
        reference_T=column("reference"),
        entropy_T=column("entropy", True),
    )


def computed(sequences: Sequences, chosen: AlgorithmSection) -> tuple[PolicyLossOutput, list[float]]:
    inputs = packed(sequences)
    output = policy_loss(inputs, FIGURES, chosen)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs_T.grad is not None
    return output, inputs.logprobs_T.grad.tolist()


near = st.floats(-0.5, 0.5).map(lambda gap: gap + 1e-5)


@st.composite
def tokens(draw: st.DrawFn) -> Token:
    behaviour = draw(st.floats(-4, -1))
    proximal = behaviour + draw(near)
    current = proximal + draw(near)
    advantage = draw(st.sampled_from([-2.0, -0.7, 0.3, 1.5]))
    return Token(current, proximal, behaviour, advantage, current + draw(near), draw(st.floats(0, 2)))


rows = st.lists(st.lists(tokens(), min_size=1, max_size=4), min_size=1, max_size=4)

PARTS: dict[str, dict[str, Any]] = {
    "asymmetric clip": {"clip_eps": 0.1, "clip_eps_high": 0.3},
    "dual clip": {"dual_clip": 1.3},
    "naive, sequence ratio": {"objective": "naive", "ratio": "sequence", "clip_eps": 0.05},
    "sequence ratio (GSPO)": {"ratio": "sequence", "clip_eps": 0.05, "clip_eps_high": 0.07, "aggregate": "sequence"},
    "cispo": {"objective": "cispo", "clip_eps": 0.9, "clip_eps_high": 0.1},
    "sapo": {"objective": "sapo", "sapo_temperature": 1.5, "sapo_temperature_negative": 2.0},
    "reinforce": {"objective": "reinforce"},
    "truncated importance sampling": {"behaviour_cap": 1.1, "behaviour_cap_mode": "truncate"},
    "product over the sequence": {
        "behaviour_cap": 1.2,
        "behaviour_cap_mode": "truncate",
        "behaviour_level": "sequence",
    },
    "token bounds (IcePop)": {"mask_token_low": 0.8, "mask_token_high": 1.2},
    "geometric rejection": {"mask_sequence_low": 0.9, "mask_sequence_high": 1.1},
    "second moment (M2PO)": {"mask_second_moment": 0.04},
    "negative divergence": {"mask_negative_kl": 0.05},
    "all masks": {"mask_token_high": 1.3, "mask_sequence_low": 0.8, "mask_second_moment": 1.0, "mask_negative_kl": 0.1},
    "masks of plain PPO": {"objective": "naive", "mask_token_high": 1.2},
    "by sequence": {"aggregate": "sequence"},
    "by constant length": {"aggregate": "constant", "length_limit": 7},
    "kl k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "kl k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "kl k3": {"kl_coef": 0.3, "kl_estimator": "k3", "aggregate": "sequence"},
}
every_part = pytest.mark.parametrize("part", PARTS)


def section(part: str) -> AlgorithmSection:
    return AlgorithmSection.model_validate(PARTS[part])


def at_a_kink(sequences: Sequences, chosen: AlgorithmSection) -> bool:
    """Whether a tiny step changes which side of a clip a token is on."""
    gradients = [scalar_gradient(sequences, chosen, step) for step in (1e-6, 1e-5)]
    return any(abs(a - b) > 1e-4 for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("part", ["asymmetric clip", "by sequence", "by constant length", "all masks"])
def test_the_bonus_raises_the_entropy_of_every_token_by_its_share(part: str) -> None:
    """Of masked tokens too: a mask takes a token out of the policy's loss, not out of the bonus."""
    chosen = section(part)
    sequences = [[Token(-1.0, -1.1, -3.0, 1.0, -1.0, 0.7)] * 3, [Token(-2.0, -2.0, -2.1, -1.0, -2.0, 0.2)]]
    inputs = packed(sequences)
    policy_loss(inputs, FIGURES, chosen).loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.entropy_T is not None and inputs.entropy_T.grad is not None
    share = {"token": lambda num: 11, "sequence": lambda num: 4 * num, "constant": lambda num: 4 * 7}[chosen.aggregate]
    expected = [-FIGURES.entropy_coef / share(len(own)) for own in sequences for _ in own]
    assert inputs.entropy_T.grad.tolist() == pytest.approx(expected)


def test_a_steered_bonus_fades_as_the_entropy_nears_its_target_and_reverses_beyond_it() -> None:
    fixed, steered = AlgorithmSection(entropy_coef=0.1), AlgorithmSection(entropy_coef=0.1, entropy_target=0.5)
    assert [entropy_coef(fixed, entropy) for entropy in (0.0, 2.0)] == [0.1, 0.1]
    found = [entropy_coef(steered, entropy) for entropy in (0.0, 0.25, 0.5, 0.75, 5.0)]
    assert found == pytest.approx([0.1, 0.05, 0, -0.05, -0.1])


@every_part
@repeatable
@given(sequences=rows)
def test_value_and_gradient_equal_the_scalar_reference(part: str, sequences: Sequences) -> None:
    chosen = section(part)
    output, gradient = computed(sequences, chosen)
    assert output.loss.item() == pytest.approx(scalar_loss(sequences, sequences, chosen), rel=1e-9, abs=1e-12)
    if not at_a_kink(sequences, chosen):
        assert gradient == pytest.approx(scalar_gradient(sequences, chosen), rel=1e-5, abs=1e-7)


@every_part
@repeatable
@given(sequences=rows, data=st.data())
def test_any_order_and_any_micro_batches_add_up_to_the_same(
    part: str, sequences: Sequences, data: st.DataObject
) -> None:
    chosen = section(part)
    whole, gradient = computed(sequences, chosen)
    order = data.draw(st.permutations(range(len(sequences))))
    cut = data.draw(st.integers(0, len(order)))
    parts = [[sequences[row] for row in rows] for rows in (order[:cut], order[cut:]) if rows]
    outputs = [computed(each, chosen) for each in parts]
    assert sum(output.loss.item() for output, _ in outputs) == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-12)
    counts = [len(sequence) for sequence in sequences]
    starts = [sum(counts[:row]) for row in range(len(counts))]
    expected = [gradient[starts[row] + place] for row in order for place in range(counts[row])]
    assert [value for _, own in outputs for value in own] == expected
    for name in (*MASKS, "clip_count", "weight_square_sum"):
        if name in whole.metrics:
            total = sum(output.metrics[name].item() for output, _ in outputs)
            assert total == pytest.approx(whole.metrics[name].item(), rel=1e-9)


@repeatable
@given(sequences=rows)
def test_masked_tokens_are_counted_under_the_first_reason_that_holds(sequences: Sequences) -> None:
    chosen = section("all masks")
    output, _ = computed(sequences, chosen)
    found = [reasons_of(token, sequence, chosen)[:1] for sequence in sequences for token in sequence]
    for name in MASKS:
        assert output.metrics[name].item() == sum(reasons == [name] for reasons in found)


@repeatable
@given(sequences=rows)
def test_with_one_advantage_a_sequence_gspos_gradient_is_that_of_the_mean_ratio_itself(sequences: Sequences) -> None:
    """Where every token moves the mean, as it is written in the paper."""
    alike = [[replace(token, advantage=sequence[0].advantage) for token in sequence] for sequence in sequences]
    chosen = AlgorithmSection(objective="naive", ratio="sequence", clip_eps=0.05, aggregate="sequence")
    inputs = packed(alike)
    loss = -torch.zeros((), dtype=torch.float64)
    start = 0
    for sequence in alike:
        own = slice(start, start := start + len(sequence))
        u = (inputs.logprobs_T[own] - inputs.behaviour_T[own]).mean().exp()
        advantage = sequence[0].advantage
        loss = loss - torch.minimum(u * advantage, u.clamp(0.95, 1.05) * advantage) / 4
    expected = torch.autograd.grad(loss, inputs.logprobs_T)[0].tolist()
    without_bonus = policy_loss(inputs, replace(FIGURES, entropy_coef=0.0), chosen)
    assert without_bonus.loss.item() == pytest.approx(loss.item(), rel=1e-9)
    assert torch.autograd.grad(without_bonus.loss, inputs.logprobs_T)[0].tolist() == pytest.approx(expected, abs=1e-9)


def test_the_effective_sample_size_falls_with_uneven_weights_and_masks() -> None:
    def size(chosen: AlgorithmSection, *log_weights: float) -> float:
        sequence = [Token(-1.0, -1.0, -1.0 - gap, 1.0, -1.0, 0.0) for gap in log_weights]
        metrics = computed([sequence], chosen)[0].metrics
        return float(metrics["weight_sum"] ** 2 / metrics["weight_square_sum"])

    assert size(AlgorithmSection(), 0.0, 0.0, 0.0) == pytest.approx(3)
    assert size(AlgorithmSection(behaviour_cap=0.0), 0.0, 0.0, 5.0) < 1.1
    assert size(AlgorithmSection(behaviour_cap=2.0), 0.0, 0.0, 5.0) == pytest.approx(2)
    assert size(AlgorithmSection(objective="naive"), 0.0, 0.0, 5.0) < 1.1


def test_everything_masked_is_a_loss_of_zero_not_a_division_by_zero() -> None:
    sequence = [Token(-1.0, -1.0, -3.0, 1.0, -1.0, 0.0)]
    output, gradient = computed([sequence], AlgorithmSection(mask_token_high=1.5))
    assert output.loss.item() == 0 and gradient == [0.0]
    assert output.metrics["masked_token"].item() == 1 and output.metrics["weight_square_sum"].item() == 0
