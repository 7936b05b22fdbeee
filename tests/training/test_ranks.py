"""Two trainer ranks in two processes against one: gradients, steps, scores, and how the work is dealt.

Invariant 12: packing-independent gradient: same minibatch, any micro-batch split, any rank count.
"""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from ranked import Stage
from training import (
    distance,
    make_batch,
    make_group,
    make_trainer,
    make_trajectory,
    near_policy,
    plain_model,
    same_bits,
    trained_gradients,
)

from headway.algorithm import AlgorithmSection
from headway.errors import DeadlineExceeded, InvariantBroken
from headway.training import checkpoint
from headway.training.batches import deal, share_of
from headway.training.collective import LOOPBACK, RankSpec, Rendezvous, join
from headway.types import Batch, Group, Trajectory
from headway.weights.fingerprints import digest

FP32_ROUNDING = 2e-6
SEQUENCES = tuple(np.random.default_rng(4).integers(3, 52, length).astype(np.int32) for length in (3, 40, 1, 17, 2))


def batch_of(random: np.random.Generator, *lengths: int, version: int = 0) -> Batch:
    """A group for every two lengths, which are numbers of sampled tokens; one of the two is rewarded."""
    groups = []
    for id, pair in enumerate(zip(lengths[::2], lengths[1::2], strict=True)):
        made = tuple(
            make_trajectory(random, index, float(index), (length,), version, temperature=1.0 - 0.3 * (id % 2))
            for index, length in enumerate(pair)
        )
        groups.append(Group(id, id, 0, 2, made))
    return Batch(version, tuple(groups))


def stale(path: str, batch: Batch) -> Batch:
    return near_policy(batch, plain_model(path))


# Training


@pytest.mark.parametrize("budget", [40, 64, 100, 4096])
@pytest.mark.parametrize("seed", [0, 1])
def test_invariant_12_two_ranks_have_the_gradient_of_one_for_any_lengths_and_number_of_micro_batches(
    stage: Stage, budget: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    lengths = [int(length) for length in random.integers(1, 34, 2 * int(random.integers(2, 7)))]
    batch = stale(stage.path, batch_of(random, *lengths))
    report = stage.run(stage.begin(clip_norm=1e9, token_budget=budget).train(batch))
    expected = trained_gradients(stage.path, batch, token_budget=4096)
    assert not report.skipped
    assert distance(stage.gradients(), expected) < FP32_ROUNDING


@pytest.mark.parametrize("owners", ["0000", "1111", "0001", "1010"])
def test_invariant_12_the_gradient_does_not_depend_on_who_has_which_sample(stage: Stage, owners: str) -> None:
    """Even where one rank has none and another has more than fit into one micro-batch."""
    batch = stale(stage.path, batch_of(np.random.default_rng(7), 30, 2, 17, 25))
    ranked = stage.begin(clip_norm=1e9, token_budget=48)
    dealt = [[i for i, owner in enumerate(owners) if int(owner) == rank] for rank in range(2)]
    reports = stage.run(ranked._pass("train_dealt", batch, dealt))
    assert reports[0].metrics == reports[1].metrics and reports[0].metrics["num_micro_batches"] >= 2
    assert distance(stage.gradients(), trained_gradients(stage.path, batch)) < FP32_ROUNDING


def test_dropping_one_sample_is_seen(stage: Stage) -> None:
    """So that the two tests above can fail."""
    batch = stale(stage.path, batch_of(np.random.default_rng(7), 30, 2, 17, 25))
    ranked = stage.begin(clip_norm=1e9)
    stage.run(ranked._pass("train_dealt", batch, [[0, 1], [2]]))
    assert distance(stage.gradients(), trained_gradients(stage.path, batch)) > 1000 * FP32_ROUNDING


@pytest.mark.parametrize("objective", ["decoupled", "naive"])
def test_steps_of_several_minibatches_are_those_of_one_rank(stage: Stage, objective: str) -> None:
    """The clipped gradient, the proximal pass, the optimizer and what is reported."""
    knobs: dict[str, Any] = {"lr": 1e-3, "minibatches": 2, "token_budget": 48, "warmup_steps": 2, "clip_norm": 0.5}
    ranked, one = stage.begin(objective=objective, **knobs), stage.one(objective=objective, **knobs)
    for version in range(3):
        batch = stale(stage.path, make_batch(version, first=10 * version))
        found, expected = stage.run(ranked.train(batch)), one.train(batch)
        assert (found.version, found.skipped, found.num_tokens) == (version + 1, "", batch.num_sampled)
        assert found.metrics.keys() == expected.metrics.keys()
        for name in found.metrics.keys() - {"num_micro_batches"}:
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3, abs=1e-5), name
        assert found.metrics["num_micro_batches"] < expected.metrics["num_micro_batches"]
        assert found.started > 0 and found.seconds > 0
    scores, exact = stage.run(ranked.score(SEQUENCES, 0.8)), one.score(SEQUENCES, 0.8)
    assert max(float(np.abs(a - b).max()) for a, b in zip(scores.logprobs, exact.logprobs, strict=True)) < 1e-4


def test_training_twice_on_the_same_ranks_gives_the_same_bits(stage: Stage) -> None:
    digests = []
    for _ in range(2):
        ranked = stage.begin(lr=1e-3, minibatches=2, token_budget=48)
        for version in range(3):
            stage.run(ranked.train(make_batch(version, first=10 * version)))
        digests.append(digest(stage.run(ranked.publish()).fingerprints))
    assert digests[0] == digests[1]


def silent_group(id: int) -> Group:
    random = np.random.default_rng(id)
    return Group(id, id, 0, 2, tuple(make_trajectory(random, index, 1.0 - index, (0,)) for index in range(2)))


def test_a_batch_with_nothing_to_train_is_skipped_and_one_with_hardly_anything_is_no_trouble(stage: Stage) -> None:
    ranked = stage.begin(minibatches=2, lr=1e-3)
    before = digest(stage.run(ranked.publish()).fingerprints)
    report = stage.run(ranked.train(Batch(0, (silent_group(0), silent_group(1)))))
    assert (report.version, report.skipped) == (0, "no trajectory of the batch has a token to train")
    assert digest(stage.run(ranked.publish()).fingerprints) == before
    lonely = make_group(2, rewards=(1.0,))
    assert stage.run(ranked.train(Batch(0, (silent_group(0), lonely)))).version == 1


def damaged(batch: Batch, group: int, **changes: Any) -> Batch:
    def changed(trajectory: Trajectory) -> Trajectory:
        return dataclasses.replace(trajectory, **changes)

    groups = (
        dataclasses.replace(g, trajectories=(changed(g.trajectories[0]), *g.trajectories[1:])) if g.id == group else g
        for g in batch.groups
    )
    return Batch(batch.version, tuple(groups))


def with_infinite_logprob(batch: Batch, group: int) -> Batch:
    (sequence,) = next(g for g in batch.groups if g.id == group).trajectories[0].sequences
    logprobs = sequence.logprobs.copy()
    logprobs[-1] = -math.inf
    return damaged(batch, group, sequences=(dataclasses.replace(sequence, logprobs=logprobs),))


@pytest.mark.parametrize("culprit", [10, 11, 12, 13])
def test_one_bad_sample_on_one_rank_skips_the_step_on_all_and_leaves_no_trace(
    stage: Stage, tmp_path: Path, culprit: int
) -> None:
    """Divided by a temperature of 0, one sample's loss is not a number, in either minibatch and on either rank."""
    ranked = stage.begin(lr=1e-2, minibatches=2)
    stage.run(ranked.train(make_batch(0)))
    stage.save(tmp_path / "before")
    for bad in (
        damaged(make_batch(1, first=10), culprit, temperature=0.0),
        with_infinite_logprob(make_batch(1, first=10), culprit),
    ):
        report = stage.run(ranked.train(bad))
        assert report.skipped in ("loss nan, gradient norm nan", "a behaviour log-prob is not finite")
        assert report.version == 1
    stage.save(tmp_path / "after")
    one, other = (checkpoint.load(tmp_path / name) for name in ("before", "after"))
    assert same_bits(one.tensors, other.tensors)
    assert stage.run(ranked.train(make_batch(1, first=20))).version == 2


def test_what_a_trainer_refuses_ranks_refuse_with_the_same_words(stage: Stage, tmp_path: Path) -> None:
    ranked = stage.begin()
    with pytest.raises(InvariantBroken) as error:
        stage.run(ranked.train(make_batch(version=3)))
    assert str(error.value) == "a batch for version 3 reached a trainer at version 0"
    assert stage.run(ranked.train(make_batch())).version == 1, "the ranks must still be there"
    stage.run(ranked.train(make_batch(1)))
    stage.save(tmp_path / "a")
    ranked = stage.begin(worst_staleness=1)
    stage.run(ranked.load(str(tmp_path / "a")))
    with pytest.raises(InvariantBroken) as error:
        stage.run(ranked.train(make_batch(version=2, data_version=0)))
    assert str(error.value) == "a batch is 2 versions stale, beyond the bound of 1"


def test_ranks_that_disagree_are_found_out_by_name(stage: Stage) -> None:
    with pytest.raises(InvariantBroken) as error:
        stage.begin()._check_agreement("the version", [4, 5])
    assert str(error.value) == "trainer ranks disagree on the version: trainer-0 says 4, trainer-1 says 5"


def test_scores_are_those_of_one_rank_in_the_order_they_were_asked_for(stage: Stage) -> None:
    exact = stage.one().score(SEQUENCES, 1.3)
    for chosen in (SEQUENCES, SEQUENCES[:1], ()):
        scores = stage.run(stage.begin(token_budget=48).score(chosen, 1.3))
        assert scores.version == 0 and len(scores.logprobs) == len(chosen)
        for found, expected in zip(scores.logprobs, exact.logprobs, strict=False):
            assert np.abs(found - expected).max() < 1e-5


def test_every_rank_is_a_process_with_its_own_threads(stage: Stage) -> None:
    assert len({os.getpid(), *stage.each("pid")}) == 3


# Meeting and dealing


def test_a_rank_missing_from_the_rendezvous_is_named() -> None:
    rendezvous = Rendezvous(["trainer-0", "trainer-1", "trainer-2"], deadline_s=1.0)
    with pytest.raises(DeadlineExceeded) as error:
        join(rendezvous.specs[1], torch.device("cpu"))
    assert str(error.value) == "the rendezvous of ranks timed out after 0.5 s: trainer-0, trainer-2 missing"


def test_the_rendezvous_is_on_loopback() -> None:
    rendezvous = Rendezvous(["trainer-0", "trainer-1"], 1.0)
    (spec, _) = rendezvous.specs
    assert isinstance(spec, RankSpec) and spec.host == LOOPBACK
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == spec.port] == [LOOPBACK]


def quadratic(length: int) -> float:
    return float(length * length)


def test_samples_are_dealt_by_work_and_each_exactly_once() -> None:
    random = np.random.default_rng(0)
    for num_ranks in (1, 2, 3, 7):
        lengths = [int(length) for length in random.integers(1, 900, 40)]
        dealt = deal(lengths, num_ranks, quadratic)
        assert len(dealt) == num_ranks and sorted(i for mine in dealt for i in mine) == list(range(40))
        work = [sum(quadratic(lengths[i]) for i in mine) for mine in dealt]
        assert max(work) - min(work) <= quadratic(max(lengths))
    assert deal([5, 5], 4, quadratic) == [[0], [1], [], []]
    assert deal([], 2, quadratic) == [[], []]


def test_advantages_are_those_of_whole_groups_on_every_rank(tiny_model: str) -> None:
    batch = make_batch(num_groups=5)
    for algorithm in (AlgorithmSection(), AlgorithmSection(baseline="none", normalise="batch")):
        whole = share_of(batch, algorithm, 2, float)
        shares = [share_of(batch, algorithm, 2, float, rank, 3) for rank in range(3)]
        for number, samples in enumerate(whole.minibatches):
            dealt = [sample for share in shares for sample in share.minibatches[number]]
            assert sorted(s.advantages[0] for s in dealt) == sorted(s.advantages[0] for s in samples)
            assert whole.num_trained[number] == sum(len(sample.where) for sample in samples)
        assert all(share.num_trained == whole.num_trained for share in shares)
        assert {(share.longest, share.finite) for share in shares} == {(whole.longest, True)}


def test_a_trainer_alone_is_one_rank(tiny_model: str) -> None:
    trainer = make_trainer(tiny_model)
    assert trainer.ranks.num == 1 and trainer.ranks.rows(7) == range(7) and trainer.ranks.most(3) == 3
    assert not trainer.publish().parts
