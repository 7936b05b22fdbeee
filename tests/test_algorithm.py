"""Presets and refused combinations."""

from typing import Any, get_args

import pytest

from headway.algorithm import PRESETS, AlgorithmSection, Preset, contradictions, describe, listing


def refusals(knobs: dict[str, Any], group_size: int = 8, ranks: int = 1) -> list[str]:
    section = AlgorithmSection.model_validate(knobs)
    return [sentence for sentence, wrong in contradictions(section, group_size, ranks).items() if wrong]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_parts_and_is_possible_as_it_is(name: str) -> None:
    section = AlgorithmSection.model_validate({"preset": name})
    assert all(getattr(section, knob) == value for knob, value in PRESETS[name][1].items())
    assert refusals({"preset": name}) == []
    assert AlgorithmSection.from_plain(section.to_plain()) == section


def test_every_preset_that_can_be_chosen_is_listed() -> None:
    assert set(get_args(Preset)) == {"", *PRESETS}
    assert all(any(line.startswith(f"algorithm {name}:") for line in listing()) for name in PRESETS)


def test_what_is_set_besides_a_preset_wins_and_is_said() -> None:
    section = AlgorithmSection.model_validate({"preset": "dapo", "clip_eps_high": 0.5})
    assert section.clip_eps_high == 0.5 and section.drop_zero_variance
    assert "  clip_eps_high = 0.5 (the preset has 0.28)" in describe(section)
    assert describe(AlgorithmSection()) == []


def test_without_a_preset_it_is_decoupled_ppo_with_group_advantages_and_no_corrections() -> None:
    section = AlgorithmSection()
    assert (section.objective, section.baseline, section.normalise) == ("decoupled", "group", "group")
    assert (section.aggregate, section.ratio, section.reward_level) == ("token", "token", "trajectory")
    assert (section.behaviour_cap, section.behaviour_cap_mode) == (5.0, "mask")
    off = ("mask_token_low", "mask_sequence_high", "mask_second_moment", "kl_coef", "entropy_coef")
    assert not any(getattr(section, name) for name in off)


@pytest.mark.parametrize(
    ("knobs", "context", "said"),
    [
        ({"preset": "grpo"}, {"group_size": 1}, "algorithm.preset = grpo with algorithm.baseline = group compares"),
        ({"baseline": "critic"}, {"group_size": 1}, "algorithm.normalise = group compares trajectories of one prompt"),
        (
            {"preset": "areal", "drop_zero_variance": True},
            {"group_size": 1},
            "algorithm.drop_zero_variance = true compares trajectories of one prompt",
        ),
        (
            {"preset": "ppo", "normalise": "group"},
            {},
            "algorithm.baseline = critic excludes",
        ),
        # A group of equal rewards has no deviation, and without a baseline its returns are not 0.
        ({"preset": "areal", "normalise": "group"}, {}, "algorithm.baseline = none excludes normalise = group"),
        ({"preset": "ppo"}, {"ranks": 2}, "algorithm.preset = ppo with algorithm.baseline = critic is for one trainer"),
        ({"preset": "cispo", "ratio": "sequence"}, {}, "algorithm.objective = cispo has no clipped ratio"),
        ({"objective": "naive", "behaviour_cap": 5.0}, {}, "algorithm.objective = naive applies no π_prox/π_behav"),
        ({"dual_clip": 1.1}, {}, "algorithm.dual_clip = 1.1 must lie above 1 + clip_eps_high = 1.2"),
        ({"objective": "sapo", "dual_clip": 3.0}, {}, "algorithm.dual_clip is a part of PPO's clip"),
        ({"mask_token_low": 2.0, "mask_token_high": 0.5}, {}, "algorithm.mask_token_low is not below its high"),
        ({"entropy_target": 1.0}, {}, "algorithm.entropy_target steers a bonus of weight 0"),
        ({"success_low": 0.9, "success_high": 0.5}, {}, "algorithm.success_low is not below success_high"),
        ({"rest_epochs": 2}, {}, "algorithm.rest_epochs passes over prompts whose groups were replaced, and none are"),
        ({"reference": "some/model"}, {}, "algorithm.reference names a model, and kl_coef = 0 has no use for it"),
        ({"behaviour_level": "sequence", "behaviour_cap": 0.0}, {}, "behaviour_level = sequence multiplies ratios"),
        ({"kl_coef": 0.1, "kl_place": "reward"}, {"ranks": 2}, "algorithm.kl_place = reward is for one trainer rank"),
    ],
)
def test_parts_that_exclude_one_another_are_refused_in_one_sentence(
    knobs: dict[str, Any], context: dict[str, int], said: str
) -> None:
    found = refusals(knobs, **context)
    assert any(said in sentence for sentence in found), found
    assert not any("\n" in sentence for sentence in found)
