"""What is encoded comes back as it was: type, value and shape; what cannot travel is refused by name."""

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway import codec
from headway.config import RunSection
from headway.types import (
    Completion,
    Failure,
    Group,
    Request,
    RequestKey,
    Reward,
    Sampling,
    Sequence,
    StopReason,
    Trajectory,
)

INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", "complex64")


@codec.noun
class OneField:
    only: tuple[int, ...]


@codec.noun
class NoField:
    pass


def round_trip(value: Any) -> Any:
    return codec.decode(codec.encode(value))


def make_group() -> Group:
    completion = Completion(
        np.array([5, 6], np.int32), np.array([-0.5, -1.5], np.float32), np.array([3, 4], np.int32), StopReason.LENGTH
    )
    sequence = Sequence.single_turn(np.array([1, 2, 3], np.int32), completion)
    trajectory = Trajectory(0, (sequence,), (Reward(0, 4, 1.0),), 0.7, (StopReason.LENGTH,))
    return Group(9, 2, 4, 2, (trajectory,), (Failure(1, "verifier hung", 17),))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**63 - 1, 2**64 - 1, 0.1, math.inf, "", "η ≤ 4", b"", b"\x00\xff", [], {}, ()),
        *([1, [2, [3]]], {"a": {"b": None}}, {3: "an integer key"}, (1, ("a", ()), [2]), [(1, 2), (3,)]),
        *({(1, "a"): "a tuple as key"}, [[]], [()], ([],), [(), [()]], [StopReason.STOP], {StopReason.STOP: 1}),
    ],
    ids=repr,
)
def test_plain_values_keep_type_and_value(value: Any) -> None:
    assert repr(round_trip(value)) == repr(value)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3), (0, 4), (), (2, 1, 3)])
def test_arrays_keep_dtype_shape_and_every_bit(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)) * 3 - 1).astype(dtype).reshape(shape)
    assert_same_array(round_trip(array), array)


def test_arrays_that_are_not_contiguous_travel_by_value() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (array.T, array[::2, ::-1], array[:, 1]):
        assert_same_array(round_trip(view), view)


def test_arrays_keep_nan_and_infinity() -> None:
    array = np.array([math.nan, math.inf, -math.inf, -0.0], np.float32)
    assert round_trip(array).tobytes() == array.tobytes()


def test_a_group_comes_back_whole() -> None:
    sent, received = make_group(), round_trip(make_group())
    assert type(received) is Group
    assert (received.id, received.prompt_index, received.eta, received.size) == (9, 2, 4, 2)
    assert type(received.trajectories) is tuple and type(received.failures) is tuple
    assert received.failures[0].reason == "verifier hung"
    [sent_trajectory], [trajectory] = sent.trajectories, received.trajectories
    assert trajectory.stops == (StopReason.LENGTH,) and type(trajectory.stops[0]) is StopReason
    assert trajectory.reward == 1.0 and trajectory.temperature == 0.7
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        assert_same_array(getattr(trajectory.sequences[0], name), getattr(sent_trajectory.sequences[0], name))


def test_a_request_keeps_its_key_and_its_sampling() -> None:
    sampling = Sampling(temperature=0.5, stop_tokens=(2, 7), stop_strings=("\n",))
    received = round_trip(Request(RequestKey(1, 2, 3, "eval"), np.array([1], np.int32), sampling, 2**40))
    assert str(received.key) == "eval/1/2/3" and received.seed == 2**40
    assert received.sampling.stop_tokens == (2, 7) and received.sampling.stop_strings == ("\n",)


def test_nouns_of_one_field_and_of_none_come_back() -> None:
    received = round_trip([OneField((1, 2)), NoField(), OneField(())])
    assert [type(value) for value in received] == [OneField, NoField, OneField]
    assert received[0].only == (1, 2) and received[2].only == ()


def test_a_batch_of_many_groups_comes_back_in_order() -> None:
    received = round_trip(tuple(replace(make_group(), id=id) for id in range(3000)))
    assert type(received) is tuple and [group.id for group in received] == list(range(3000))


def test_a_config_section_comes_back_as_itself() -> None:
    section = RunSection(dir="runs/x", seed=7, deadline_s=1.5)
    received = round_trip([section])[0]
    assert type(received) is RunSection and received == section


def test_a_noun_is_checked_again_where_it_arrives() -> None:
    data = codec.encode(Reward(0, 0, 1.0)).replace(struct.pack(">d", 1.0), struct.pack(">d", math.nan))
    with pytest.raises(ValueError, match="a reward must be a finite number"):
        codec.decode(data)


def test_a_mark_that_begins_no_list_is_not_taken_for_a_value() -> None:
    name = b"RequestKey"
    mark = codec.encode(RequestKey(1, 2))[1:].partition(name)[0] + name
    with pytest.raises(TypeError, match="_Mark cannot travel"):
        round_trip(codec.decode(b"\x92\x01" + mark))
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        codec.decode(b"\x91" + mark)


def test_numpy_scalars_are_refused_by_value() -> None:
    for scalar in (np.int32(3), np.float64(0.5), np.bool_(True)):
        with pytest.raises(TypeError, match="convert numpy scalar"):
            codec.encode({"x": scalar})


def test_unknown_classes_are_refused_by_name() -> None:
    class Stranger:
        pass

    for value in (Stranger(), {1, 2}, 1j, len):
        with pytest.raises(TypeError, match=f"{type(value).__name__} cannot travel"):
            codec.encode([value])


def test_bytes_that_name_an_unregistered_class_build_nothing() -> None:
    data = codec.encode(RequestKey(1, 2)).replace(b"RequestKey", b"subprocess")
    with pytest.raises(KeyError, match="subprocess"):
        codec.decode(data)


def assert_same_array(received: NDArray[Any], sent: NDArray[Any]) -> None:
    assert received.dtype == sent.dtype and received.shape == sent.shape
    np.testing.assert_array_equal(received, sent)
