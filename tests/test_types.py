"""Messages are checked on construction and do their own arithmetic.

Invariant 8: group identity. Invariant 9: explicit stop reasons travel with the completion.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from headway import types
from headway.codec import decode, encode
from headway.types import (
    NOT_SAMPLED,
    Batch,
    Chunk,
    Completion,
    Failure,
    Group,
    Prompt,
    Request,
    RequestKey,
    Reward,
    Sampling,
    Sequence,
    StopReason,
    TensorInfo,
    Trajectory,
    WeightUpdate,
)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def completion(num_tokens: int, version: int = 0, stop: StopReason = StopReason.STOP) -> Completion:
    return Completion(
        tokens=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, -0.5, np.float32),
        versions=np.full(num_tokens, version, np.int32),
        stop=stop,
    )


def trajectory(index: int, *versions: int, reward: float = 0.0) -> Trajectory:
    """One sampled token of each version, after a prompt of two."""
    spoken = dataclasses.replace(completion(len(versions)), versions=np.array(versions, np.int32))
    sequence = Sequence.single_turn(ints(7, 8), spoken)
    return Trajectory(index, (sequence,), (Reward(0, 0, reward),), 1.0, (spoken.stop,))


def group(id: int, *trajectories: Trajectory, failures: tuple[Failure, ...] = ()) -> Group:
    return Group(id, id, 0, len(trajectories) + len(failures), trajectories, failures)


def refused(kind: type, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ValueError) as error:
        kind(*arguments, **named)
    return str(error.value)


# Checked at birth


def test_arrays_of_different_lengths_are_refused_and_counted() -> None:
    said = refused(Sequence, ints(1, 2, 3), floats(0, 1), floats(0, 0, 0), ints(-1, 0, 0))
    assert said == "Sequence: lengths differ: {'tokens': 3, 'versions': 3, 'loss_mask': 2, 'logprobs': 3}"
    assert "lengths differ" in refused(Completion, ints(1), floats(), ints(0), StopReason.STOP)
    assert "lengths differ" in refused(Chunk, ints(1, 2), floats(0, 0), ints(0))


@pytest.mark.parametrize(
    ("field", "array", "said"),
    [
        ("tokens", np.array([1, 2]), "Sequence.tokens is int64, not int32"),
        ("versions", np.array([0.0, 1.0], np.float32), "Sequence.versions is float32, not int32"),
        ("logprobs", np.array([0.0, 1.0]), "Sequence.logprobs is float64, not float32"),
        ("loss_mask", np.array([False, True]), "Sequence.loss_mask is bool, not float32"),
    ],
)
def test_an_array_of_another_type_is_refused_by_name(field: str, array: Any, said: str) -> None:
    good = {"tokens": ints(1, 2), "loss_mask": floats(0, 1), "logprobs": floats(0, -1), "versions": ints(-1, 0)}
    assert refused(Sequence, **good | {field: array}) == said
    Sequence(**good)


@pytest.mark.parametrize(
    ("mask", "versions", "said"),
    [
        ([1, 0, 0], [0, 0, 0], "Sequence.loss_mask: the first token follows nothing, so it cannot be trained"),
        ([0, 1, 0], [0, NOT_SAMPLED, 0], "Sequence.loss_mask: a token that no policy sampled cannot be trained"),
        ([0, 0.5, 1], [-1, 0, 0], "Sequence.loss_mask holds 0 and 1 only"),
        ([0, math.nan, 1], [-1, 0, 0], "Sequence.loss_mask holds 0 and 1 only"),
    ],
)
def test_only_sampled_tokens_that_follow_something_can_be_trained(
    mask: list[float], versions: list[int], said: str
) -> None:
    assert refused(Sequence, ints(4, 5, 6), floats(*mask), floats(0, 0, 0), ints(*versions)) == said


def test_empty_sequences_and_sampled_tokens_that_are_not_trained_are_possible() -> None:
    assert Sequence(ints(), floats(), floats(), ints()).num_sampled == 0
    assert Sequence(ints(1, 2), floats(0, 0), floats(-1, -1), ints(0, 0)).num_sampled == 2


def test_prompts_and_requests_have_tokens() -> None:
    assert refused(Prompt, 4, ints(), "", {}) == "prompt 4 has no tokens"
    assert refused(Prompt, 4, np.array([1]), "", {}) == "Prompt.tokens is int64, not int32"
    said = refused(Request, RequestKey(3, 1), ints(), Sampling(), 0)
    assert said == "request train/3/1/0 has no prompt tokens"


@pytest.mark.parametrize(
    "knobs",
    [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.1},
     {"top_k": -1}, {"max_tokens": 0}],
)  # fmt: skip
def test_impossible_sampling_is_refused(knobs: dict[str, Any]) -> None:
    assert next(iter(knobs)) in refused(Sampling, **knobs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_is_a_finite_number(value: float) -> None:
    assert refused(Reward, 0, 0, value) == f"a reward must be a finite number, not {value}"


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (Reward(1, 0, 1.0), "reward for sequence 1 of 1"),
        (Reward(-1, 0, 1.0), "reward for sequence -1 of 1"),
        (Reward(0, 5, 1.0), "reward at position 5, outside its sequence"),
        (Reward(0, -1, 1.0), "reward at position -1, outside its sequence"),
    ],
)
def test_a_reward_lies_at_a_token_of_its_trajectory(reward: Reward, said: str) -> None:
    sequence = Sequence.single_turn(ints(7, 8), completion(3))
    assert refused(Trajectory, 0, (sequence,), (reward,), 1.0, (StopReason.STOP,)) == said


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        completion(3).stop = StopReason.LENGTH  # type: ignore[misc]


# A prompt with its completion


def test_a_single_turn_trains_what_was_sampled_and_nothing_else() -> None:
    sequence = Sequence.single_turn(ints(7, 8), completion(3, version=4))
    assert sequence.tokens.tolist() == [7, 8, 0, 1, 2]
    assert sequence.loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert sequence.logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert sequence.versions.tolist() == [NOT_SAMPLED, NOT_SAMPLED, 4, 4, 4]
    assert sequence.num_sampled == 3
    assert [a.dtype for a in (sequence.tokens, sequence.loss_mask, sequence.logprobs, sequence.versions)] == [
        np.int32, np.float32, np.float32, np.int32,
    ]  # fmt: skip


def test_a_completion_without_tokens_is_a_sequence_without_age() -> None:
    silent = trajectory(0)
    assert silent.num_sampled == 0 and silent.oldest_version is None and silent.stops == (StopReason.STOP,)
    assert group(0, silent).oldest_version is None
    assert Batch(9, (group(0, silent),)).staleness == ()


def test_invariant_9_stop_reasons_survive_a_journey() -> None:
    for stop in StopReason:
        travelled = decode(encode(completion(2, stop=stop)))
        assert travelled.stop is stop
    assert {stop.value for stop in StopReason} == {"stop", "length", "context", "aborted"}


# Arithmetic


def test_staleness_is_counted_from_the_oldest_token_of_each_trajectory() -> None:
    batch = Batch(7, (group(0, trajectory(0, 5, 6, 7), trajectory(1, 7)), group(3, trajectory(0, 2), trajectory(1))))
    assert batch.staleness == (2, 0, 5)
    assert [g.oldest_version for g in batch.groups] == [5, 2]
    assert batch.num_sampled == 5


def test_a_trajectory_adds_up_its_sequences_and_its_rewards() -> None:
    sequences = tuple(Sequence.single_turn(ints(1), completion(n, version=v)) for n, v in ((3, 4), (0, 0), (2, 1)))
    rewards = (Reward(0, 3, 0.25), Reward(2, 0, 0.5))
    whole = Trajectory(0, sequences, rewards, 1.0, (StopReason.STOP,) * 3)
    assert whole.reward == 0.75 and whole.num_sampled == 5 and whole.oldest_version == 1


def test_no_reward_is_zero() -> None:
    assert Trajectory(0, (), (), 1.0, ()).reward == 0


def test_invariant_8_an_incomplete_group_says_so_and_accounts_for_every_trajectory() -> None:
    broken = Failure(1, "verifier: unreachable", 12)
    whole, partial = group(0, trajectory(0, 1)), group(1, trajectory(0, 1), failures=(broken,))
    assert whole.complete and not partial.complete
    assert partial.size == 2 and partial.num_sampled == 1
    said = refused(Group, 5, 5, 0, 4, (trajectory(0, 1),), (broken,))
    assert said == "group 5: 1 trajectories and 1 failures, not 4"


@pytest.mark.parametrize("ids", [(1, 0), (2, 2)])
def test_a_batch_holds_distinct_groups_in_id_order(ids: tuple[int, int]) -> None:
    said = refused(Batch, 0, tuple(group(id, trajectory(0, 0)) for id in ids))
    assert said == f"a batch holds distinct groups in id order, not {list(ids)}"


def test_an_update_knows_its_size_and_its_fingerprints() -> None:
    tensors = tuple(TensorInfo(name, "float32", (2,), 0, 8, name * 2) for name in ("a", "b"))
    update = WeightUpdate(3, "full", "shared_memory", "/dev/null", tensors)
    assert update.num_bytes == 16 and update.fingerprints == {"a": "aa", "b": "bb"}


def test_a_batch_survives_a_journey_bit_for_bit() -> None:
    batch = Batch(7, (group(0, trajectory(0, 5, 6), trajectory(1), failures=(Failure(2, "workflow: KeyError", 3),)),))
    travelled = decode(encode(batch))
    assert encode(travelled) == encode(batch)
    assert travelled.staleness == batch.staleness and travelled.groups[0].failures[0].reason == "workflow: KeyError"


def test_the_messages_need_no_torch() -> None:
    source = types.__file__
    assert source is not None
    with open(source, encoding="utf-8") as file:
        assert "torch" not in file.read().split('"""', 2)[2]
