"""Proof by score: an engine without fingerprints must score the probe as the trainer does, and not as it did before.

Invariant 11: verified weight sync at every load.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stage import Stage, StandInTrainer
from system import check_finished, make_config

from headway import launch
from headway.engine.fake import FakeEngine
from headway.engine.protocol import KvPolicy
from headway.errors import WeightMismatch
from headway.record.log import read
from headway.types import Ints, Scores, SwapReport
from headway.weights.probe import BOUND, PARITY, ScoreProof, check_parity, distance

NUM_TOKENS = 188


def scores(version: int, values: np.ndarray) -> Scores:  # type: ignore[type-arg]
    first, second = np.split(values.astype(np.float32), 2)
    return Scores(version, (np.concatenate([[np.float32(0)], first]), np.concatenate([[np.float32(0)], second])))


def random(seed: int, scale: float) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).normal(0, scale, NUM_TOKENS)


START = -2 + random(0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "noise", "step"),
    [("float32", 1e-6, 1e-3), ("float32", 1e-6, 1e-7), ("bfloat16", 0.05, 0.5), ("bfloat16", 0.05, 1e-3)],
)
def test_honest_loads_are_proved_whatever_the_step(dtype: str, noise: float, step: float) -> None:
    """Engine and trainer differ by noise that the weights decide; versions differ by steps above and below it."""
    proof = ScoreProof(dtype)
    for version in range(50):
        exact = START + sum((random(100 + v, step) for v in range(version)), np.zeros(NUM_TOKENS))
        proof.check("engine", scores(version, exact + random(1000 + version, noise)), scores(version, exact))


@pytest.mark.parametrize(("dtype", "noise", "step"), [("float32", 1e-6, 1e-3), ("bfloat16", 0.05, 0.2)])
def test_the_weights_of_the_version_before_are_recognised(dtype: str, noise: float, step: float) -> None:
    proof = ScoreProof(dtype)
    proof.check("engine", scores(0, START + random(1, noise)), scores(0, START))
    stale = scores(1, START + random(2, noise))
    with pytest.raises(WeightMismatch, match="engine does not run version 1: its probe is that of version 0"):
        proof.check("engine", stale, scores(1, START + random(3, step)))


def test_an_engine_that_scores_exactly_as_before_has_loaded_nothing() -> None:
    """Even where the step is smaller than what engine and trainer differ by."""
    proof = ScoreProof("bfloat16")
    before = START + random(1, 0.05)
    proof.check("engine", scores(0, before), scores(0, START))
    with pytest.raises(WeightMismatch, match="it scores the probe exactly as under version 0"):
        proof.check("engine", scores(1, before), scores(1, START + random(3, 1e-3)))


def test_weights_that_did_not_move_may_score_alike() -> None:
    proof = ScoreProof("bfloat16")
    for version in range(3):
        proof.check("engine", scores(version, START + random(1, 0.05)), scores(version, START))


@pytest.mark.parametrize("wrong", [START + random(5, 1.0), START * np.nan])
def test_scores_of_other_weights_are_out_of_bounds(wrong: np.ndarray) -> None:  # type: ignore[type-arg]
    for dtype, bound in BOUND.items():
        with pytest.raises(WeightMismatch, match=f"nats a token, and {bound:g} is the bound"):
            ScoreProof(dtype).check("engine", scores(0, wrong), scores(0, START))


def test_distance_leaves_out_what_follows_nothing() -> None:
    one, other = (np.array([5, 1, 2], np.float32),), (np.array([0, 2, 4], np.float32),)
    assert distance(one, other) == 1.5


# In a run


class Repacking(FakeEngine):
    """Has no fingerprints. From version 2 on it may load nothing and say it did."""

    def __init__(self, is_stale: bool) -> None:
        super().__init__(mean_tokens=6.0)
        self._is_stale, self._loaded = is_stale, 0

    async def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        self._loaded = version if version < 2 or not self._is_stale else self._loaded
        return replace(await super().swap(version, kv), fingerprints={})

    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return Scores(self.version, scored(sequences, self._loaded + 1e-7))


class ScoringTrainer(StandInTrainer):
    async def score(self, sequences: tuple[Ints, ...], temperature: float) -> Scores:
        return Scores(self.version, scored(sequences, self.version))


def scored(sequences: tuple[Ints, ...], version: float) -> tuple[np.ndarray, ...]:  # type: ignore[type-arg]
    return tuple(np.full(len(tokens), -1 - version / 1000, np.float32) for tokens in sequences)


@pytest.fixture
def stage_with(tiny_model: str, tmp_path: Path) -> Callable[[FakeEngine], Stage]:
    config = make_config(tmp_path, tiny_model, run={"steps": 5})
    prepared = launch.prepare(config)
    return lambda engine: Stage(prepared, ScoringTrainer(prepared.staleness().worst_staleness), engines=[engine])


def test_a_run_goes_on_when_every_load_is_proved_by_score(stage_with: Callable[[FakeEngine], Stage]) -> None:
    stage = stage_with(Repacking(is_stale=False))
    events = stage.run()
    check_finished(stage.config, events)
    assert [event.version for event in events if event.kind == "swapped"] == list(range(6))


def test_invariant_11_a_run_stops_when_an_engine_loads_nothing(stage_with: Callable[[FakeEngine], Stage]) -> None:
    stage = stage_with(Repacking(is_stale=True))
    with pytest.raises(WeightMismatch, match="engine does not run version 2: it scores the probe exactly as under"):
        stage.run()
    swapped = [event.version for event in read(stage.directory / "events.jsonl") if event.kind == "swapped"]
    assert swapped == [0, 1], "a version that was not proved must not count as confirmed"


@pytest.mark.parametrize("dtype", PARITY)
def test_invariant_6_parity_beyond_the_bound_of_the_type_stops_the_run(dtype: str) -> None:
    """Parity is enforced; NaN is beyond any bound."""
    exact = scores(3, START)
    check_parity("engine-1", scores(3, START + random(1, PARITY[dtype])), exact, dtype)
    for wrong in (START + random(1, 2 * PARITY[dtype]), np.full(NUM_TOKENS, np.nan)):
        with pytest.raises(WeightMismatch, match=f"engine-1 scores other log-probs .* version 3: .* in {dtype}"):
            check_parity("engine-1", scores(3, wrong), exact, dtype)
