"""What the loss saw of each token, as the trainer reports it: the log-probs, weights, advantages and fates it used."""

import numpy as np
import pytest
from training import make_trainer, stale_batch

from headway.trained_tokens import TOKEN_FATES, TrainedTokens
from headway.training.trainer import Trainer
from headway.types import Batch

CAP = 1.5


@pytest.fixture(scope="module")
def step(tiny_model: str) -> tuple[Trainer, Batch, dict[tuple[int, int, int], np.ndarray], TrainedTokens]:
    """A step of two minibatches, with the log-probs of every sequence before any weight moved."""
    batch = stale_batch(tiny_model)
    trainer = make_trainer(tiny_model, lr=3e-2, minibatches=2, behaviour_cap=CAP, token_budget=64)
    before = {}
    for group in batch.groups:
        for trajectory in group.trajectories:
            sequences = tuple(sequence.tokens for sequence in trajectory.sequences)
            scores = trainer.score(sequences, trajectory.temperature).logprobs
            before |= {(group.id, trajectory.index, number): found for number, found in enumerate(scores)}
    tokens = trainer.train(batch).tokens
    assert tokens is not None
    return trainer, batch, before, tokens


def test_every_trained_token_is_reported_with_the_policies_weight_and_fate_of_its_loss(step) -> None:
    _, batch, before, tokens = step
    fates = set()
    for group in batch.groups:
        rewards = np.array([trajectory.reward for trajectory in group.trajectories])
        for trajectory in group.trajectories:
            advantage = (trajectory.reward - rewards.mean()) / (rewards.std() + 1e-6)
            for number, sequence in enumerate(trajectory.sequences):
                trained = sequence.loss_mask > 0
                place = tokens.place(group.id, trajectory.index, number)
                assert place is not None
                expected = before[group.id, trajectory.index, number][trained]
                np.testing.assert_allclose(tokens.proximal[place], expected, atol=1e-5)
                weights = np.exp(tokens.proximal[place] - sequence.logprobs[trained])
                np.testing.assert_allclose(tokens.weights[place], np.where(weights > CAP, 0, weights), rtol=1e-5)
                np.testing.assert_allclose(tokens.advantages[place], advantage, rtol=1e-5, atol=1e-6)
                capped = tokens.fates[place] == TOKEN_FATES.index("capped")
                assert (capped == (weights > CAP)).all()
                fates |= set(tokens.fates[place].tolist())
    assert fates == {TOKEN_FATES.index(name) for name in ("trained", "clipped", "capped")}
    assert int(tokens.counts.sum()) == sum(
        int(s.loss_mask.sum()) for g in batch.groups for t in g.trajectories for s in t.sequences
    )


def test_the_current_policy_is_the_proximal_one_until_the_first_minibatch_has_moved_it(step) -> None:
    _, batch, _, tokens = step
    for number, group in enumerate(batch.groups):
        for trajectory in group.trajectories:
            place = tokens.place(group.id, trajectory.index, 0)
            equal = np.array_equal(tokens.current[place], tokens.proximal[place])
            assert equal == (number % 2 == 0)


def test_a_step_of_one_minibatch_reports_each_figure_once(tiny_model: str) -> None:
    tokens = make_trainer(tiny_model).train(stale_batch(tiny_model)).tokens
    assert tokens is not None and len(tokens.current) == len(tokens.fates) == 0 < len(tokens.proximal)
    assert tokens.current_or_proximal is tokens.proximal and not tokens.all_fates.any()


def test_a_trainer_that_is_not_asked_to_reports_no_tokens(tiny_model: str) -> None:
    batch = stale_batch(tiny_model)
    with_tokens, without = (make_trainer(tiny_model, record_tokens=told).train(batch) for told in (True, False))
    assert without.tokens is None and with_tokens.metrics == without.metrics


def test_the_shares_of_ranks_join_to_one_report(step) -> None:
    *_, tokens = step
    half = len(tokens.counts) // 2
    places = int(tokens.counts[:half].sum())
    parts = [
        TrainedTokens(
            tokens.sources[3 * half :] if late else tokens.sources[: 3 * half],
            tokens.counts[half:] if late else tokens.counts[:half],
            *(
                row[places:] if late else row[:places]
                for row in (tokens.proximal, tokens.current, tokens.weights, tokens.advantages, tokens.fates)
            ),
        ).compact()
        for late in (False, True)
    ]
    joined = TrainedTokens.join(parts)
    for name in ("sources", "counts", "proximal", "current", "weights", "advantages", "fates"):
        assert np.array_equal(getattr(joined, name), getattr(tokens, name)), name
    assert joined.place(999, 0, 0) is None
