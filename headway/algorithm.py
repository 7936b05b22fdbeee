"""The knobs of the algorithm, the presets that set several of them at once, and the combinations that are refused.

A preset is a named set of knobs. Whatever a person sets besides wins, so every part can be overridden.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from headway.section import Section
from headway.types import DropReason

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "areal": (
        "decoupled PPO with advantages normalised over all tokens of the batch (the AReaL paper)",
        {"objective": "decoupled", "clip_eps": 0.2, "baseline": "none", "normalise": "token", "aggregate": "token"},
    ),
    "grpo": (
        "rewards normalised within the group, sequences of equal weight",
        {"objective": "decoupled", "clip_eps": 0.2, "baseline": "group", "normalise": "group", "aggregate": "sequence"},
    ),
    "dapo": (
        "GRPO with a higher upper clip, tokens of equal weight, groups without spread replaced, overlong shaping",
        {
            "objective": "decoupled",
            "clip_eps": 0.2,
            "clip_eps_high": 0.28,
            "baseline": "group",
            "normalise": "group",
            "aggregate": "token",
            "drop_zero_variance": True,
            "overlong_share": 0.2,
        },
    ),
    "dr_grpo": (
        "GRPO without its two divisions: by the group's deviation and by the sequence's length",
        {"objective": "decoupled", "clip_eps": 0.2, "baseline": "group", "normalise": "none", "aggregate": "constant"},
    ),
    "rloo": (
        "REINFORCE with the mean of the group's other trajectories as the baseline",
        {"objective": "reinforce", "baseline": "leave_one_out", "normalise": "none", "aggregate": "constant"},
    ),
    "reinforce++": (
        "PPO without a critic: no baseline, advantages normalised over all tokens of the batch",
        {
            "objective": "decoupled",
            "clip_eps": 0.2,
            "baseline": "none",
            "normalise": "token",
            "reward_level": "token",
            "aggregate": "token",
        },
    ),
    "gspo": (
        "one importance ratio a sequence, clipped within a narrow range",
        {
            "objective": "decoupled",
            "ratio": "sequence",
            "clip_eps": 3e-4,
            "clip_eps_high": 4e-4,
            "baseline": "group",
            "normalise": "group",
            "aggregate": "sequence",
        },
    ),
    "cispo": (
        "REINFORCE with truncated importance weights: no token loses its gradient",
        {
            "objective": "cispo",
            "clip_eps": 1.0,
            "clip_eps_high": 4.0,
            "behaviour_cap": 5.0,
            "behaviour_cap_mode": "truncate",
            "baseline": "group",
            "normalise": "group",
            "aggregate": "token",
        },
    ),
    "ppo": (
        "a critic, generalised advantage estimation, advantages normalised over all tokens of the batch",
        {
            "objective": "decoupled",
            "clip_eps": 0.2,
            "baseline": "critic",
            "normalise": "token",
            "aggregate": "token",
            "gae_lambda": 0.95,
        },
    ),
}

Preset = Literal["", "areal", "grpo", "dapo", "dr_grpo", "rloo", "reinforce++", "gspo", "cispo", "ppo"]


class AlgorithmSection(Section):
    preset: Preset = Field("", description="a named set of the parts below; whatever is set besides wins")

    objective: Literal["decoupled", "naive", "cispo", "sapo", "reinforce"] = Field(
        "decoupled", description="decoupled PPO (Eq. 5) or plain PPO; cispo, sapo, reinforce: Eq. 5's weights, no min"
    )
    ratio: Literal["token", "sequence"] = Field("token", description="an importance ratio a token, or one a sequence")
    clip_eps: float = Field(0.2, gt=0, le=1, description="PPO clipping range ε; the ratio stays above 1 − ε")
    clip_eps_high: float = Field(0.0, ge=0, description="the ratio stays below 1 + this; 0 takes clip_eps")
    dual_clip: float = Field(0.0, ge=0, description="largest ratio that a negative advantage is multiplied by; 0: any")
    sapo_temperature: float = Field(1.0, gt=0, description="steepness of SAPO's gate for positive advantages")
    sapo_temperature_negative: float = Field(1.05, gt=0, description="its steepness for negative advantages")

    behaviour_cap: float = Field(5.0, ge=0, description="largest π_prox/π_behav that is trained on; 0: any")
    behaviour_cap_mode: Literal["mask", "truncate"] = Field(
        "mask", description="drop tokens over the cap, or clamp them to it"
    )
    behaviour_level: Literal["token", "sequence"] = Field(
        "token", description="π_prox/π_behav a token, or the product over the sequence"
    )
    mask_token_low: float = Field(0.0, ge=0, description="mask tokens with π_prox/π_behav below this (IcePop); 0: none")
    mask_token_high: float = Field(0.0, ge=0, description="mask tokens with π_prox/π_behav above this; 0: none")
    mask_sequence_low: float = Field(
        0.0, ge=0, description="mask sequences whose geometric mean of π_prox/π_behav is below this; 0: none"
    )
    mask_sequence_high: float = Field(0.0, ge=0, description="mask sequences whose geometric mean is above; 0: none")
    mask_second_moment: float = Field(
        0.0, ge=0, description="mask the most off-policy tokens until the mean (log π_prox/π_behav)² is this; 0: none"
    )
    mask_negative_kl: float = Field(
        0.0, ge=0, description="mask sequences of negative advantage with a mean log π_behav/π_θ above this; 0: none"
    )
    mask_truncated: bool = Field(False, description="trajectories that were cut off are not trained")

    baseline: Literal["group", "leave_one_out", "none", "critic"] = Field(
        "group", description="what a return is compared with: the group's mean, the others' mean, nothing, or a critic"
    )
    normalise: Literal["group", "batch", "token", "none"] = Field(
        "group", description="divide by the group's deviation, or normalise over the batch by trajectory or by token"
    )
    reward_level: Literal["trajectory", "turn", "token"] = Field(
        "trajectory", description="a reward counts for the whole trajectory, or for its turn or token and those before"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of later rewards, a turn or a token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="λ of generalised advantage estimation")
    critic_lr: float = Field(1e-5, gt=0, description="learning rate of the critic")

    aggregate: Literal["token", "sequence", "constant"] = Field(
        "token", description="equal weight to tokens, to sequences, or to tokens by a constant length (Dr.GRPO)"
    )
    length_limit: int = Field(
        0, ge=0, description="the longest completion, for constant and overlong; 0 takes sampling.max_tokens"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL divergence from the reference policy; 0: none")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="its estimator")
    kl_place: Literal["loss", "reward"] = Field("loss", description="where it enters")
    reference: str = Field("", description="transformers directory of the reference policy; empty takes model.path")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus; 0: none")
    entropy_target: float = Field(
        0.0, ge=0, description="steers the bonus: it fades as the entropy rises to this, then reverses; 0: fixed"
    )

    overlong_share: float = Field(
        0.0, ge=0, le=1, description="the last share of length_limit in which a penalty rises from 0; 0: no penalty"
    )
    overlong_penalty: float = Field(1.0, ge=0, description="the penalty of a completion of length_limit tokens")
    drop_zero_variance: bool = Field(False, description="replace groups whose rewards are all equal (DAPO)")
    success_low: float = Field(0.0, ge=0, le=1, description="replace groups with a lower share of rewards above 0")
    success_high: float = Field(1.0, ge=0, le=1, description="replace groups with a higher share of rewards above 0")
    rest_epochs: int = Field(
        0, ge=0, description="a curriculum: pass over a prompt so often after its group was replaced; 0: never"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        """A preset's knobs lie under those that were set."""
        name = values.get("preset", "") if isinstance(values, dict) else ""
        _, knobs = PRESETS.get(name, ("", {})) if isinstance(name, str) else ("", {})
        return knobs | values if knobs else values

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def high(self) -> float:
        """The upper clipping range."""
        return self.clip_eps_high or self.clip_eps


def drop_reason(chosen: AlgorithmSection, rewards: list[float]) -> DropReason | None:
    """Why a finished group is replaced by another prompt's, or None if it is trained. A reward above 0 is a success."""
    if chosen.drop_zero_variance and len(set(rewards)) == 1:
        return DropReason.ZERO_VARIANCE
    success = sum(reward > 0 for reward in rewards) / len(rewards)
    return None if chosen.success_low <= success <= chosen.success_high else DropReason.SUCCESS_RATE


def describe(section: AlgorithmSection) -> list[str]:
    """The chosen preset with what it sets, and what was overridden."""
    if not section.preset:
        return []
    sentence, knobs = PRESETS[section.preset]
    lines = [f"algorithm {section.preset}: {sentence}"]
    for name, value in knobs.items():
        chosen = getattr(section, name)
        lines.append(f"  {name} = {_toml(chosen)}" + (f" (the preset has {_toml(value)})" if chosen != value else ""))
    return lines


def listing() -> list[str]:
    """Every preset with its sentence and what it sets."""
    return [line for name in PRESETS for line in describe(AlgorithmSection(preset=name))]  # type: ignore[arg-type]


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def contradictions(algorithm: AlgorithmSection, group_size: int, ranks: int) -> dict[str, object]:
    """Combinations that exclude one another, each a sentence with whether it is the case."""
    a, prefix = algorithm, f"algorithm.preset = {algorithm.preset} with " if algorithm.preset else ""
    compared = f"baseline = {a.baseline}" if a.baseline in ("group", "leave_one_out") else ""
    compared = compared or ("normalise = group" if a.normalise == "group" else "")
    compared = compared or ("drop_zero_variance = true" if a.drop_zero_variance else "")
    bounds = [("mask_token", a.mask_token_low, a.mask_token_high)]
    bounds += [("mask_sequence", a.mask_sequence_low, a.mask_sequence_high)]
    empty = [name for name, low, high in bounds if high and low >= high]
    return {
        f"{prefix}algorithm.{compared} compares trajectories of one prompt and needs rollout.group_size "
        "of 2 or more": compared and group_size < 2,
        f"{prefix}algorithm.baseline = {a.baseline} excludes normalise = group; set normalise to token, batch or "
        "none": a.baseline in ("critic", "none") and a.normalise == "group",
        f"{prefix}algorithm.objective = {a.objective} has no clipped ratio, which ratio = sequence is about; set "
        "objective = decoupled or naive": a.ratio == "sequence" and a.objective in ("cispo", "sapo", "reinforce"),
        f"algorithm.dual_clip = {a.dual_clip:g} must lie above 1 + clip_eps_high = {1 + a.high:g}; raise it or set 0": (
            0 < a.dual_clip <= 1 + a.high
        ),
        f"{prefix}algorithm.dual_clip is a part of PPO's clip, and objective = {a.objective}; set dual_clip = 0": (
            a.dual_clip and a.objective not in ("decoupled", "naive")
        ),
        f"{prefix}algorithm.objective = naive applies no π_prox/π_behav that behaviour_cap could limit; set "
        "objective = decoupled or behaviour_cap = 0": (
            a.objective == "naive" and a.behaviour_cap and "behaviour_cap" in a.model_fields_set
        ),
        f"algorithm.{empty[0] if empty else ''}_low is not below its high; widen the bounds": empty,
        "algorithm.behaviour_level = sequence multiplies ratios of a whole sequence and needs behaviour_cap": (
            a.behaviour_level == "sequence" and not a.behaviour_cap and a.objective != "naive"
        ),
        "algorithm.entropy_target steers a bonus of weight 0; set entropy_coef too": (
            a.entropy_target and not a.entropy_coef
        ),
        "algorithm.success_low is not below success_high, so every group would be replaced; widen the bounds": (
            a.success_low >= a.success_high
        ),
        "algorithm.rest_epochs passes over prompts whose groups were replaced, and none are; set success_low, "
        "success_high or drop_zero_variance too": (
            a.rest_epochs and not a.drop_zero_variance and (a.success_low, a.success_high) == (0, 1)
        ),
        "algorithm.reference names a model, and kl_coef = 0 has no use for it; set kl_coef or leave reference out": (
            a.reference and not a.needs_reference
        ),
        f"{prefix}algorithm.baseline = critic is for one trainer rank; set trainer.ranks = 1": (
            a.needs_critic and ranks > 1
        ),
        f"{prefix}algorithm.kl_place = reward is for one trainer rank; set trainer.ranks = 1 or kl_place = loss": (
            a.needs_reference and a.kl_place == "reward" and ranks > 1
        ),
    }
