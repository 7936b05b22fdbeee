"""What is encoded comes back as it was: type, value and shape; what cannot be sent is refused by name."""

import math
import struct
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
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


@codec.message
class OneField:
    only: tuple[int, ...]


@codec.message
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
        *(None, True, False, 0, -1, -(2**63), 2**64 - 1, 0.1, math.inf, "", "η ≤ 4", b"", b"\x00\xff", [], {}),
        *([1, [2, [3]]], {"a": {"b": None}}, {3: "an integer key"}, [[]], ["a", "\n", "b"], [{"a": [{}]}]),
    ],
    ids=repr,
)
def test_plain_values_keep_type_and_value(value: Any) -> None:
    assert repr(round_trip(value)) == repr(value)


def test_tuples_enumerations_and_numpy_scalars_become_plain_outside_messages() -> None:
    values = (1, ("a", ()), [StopReason.STOP], {StopReason.STOP: np.int32(3)}, np.float32(0.5), np.bool_(True))
    received = round_trip(values)
    assert repr(received) == "[1, ['a', []], ['stop'], {'stop': 3}, 0.5, True]"


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


def test_messages_of_one_field_and_of_none_come_back() -> None:
    received = round_trip([OneField((1, 2)), NoField(), OneField(())])
    assert [type(value) for value in received] == [OneField, NoField, OneField]
    assert received[0].only == (1, 2) and received[2].only == ()


def test_a_batch_of_many_groups_comes_back_in_order() -> None:
    received = round_trip(tuple(replace(make_group(), id=id) for id in range(3000)))
    assert [group.id for group in received] == list(range(3000))


def test_a_config_section_comes_back_as_itself() -> None:
    section = RunSection(dir="runs/x", seed=7, deadline_s=1.5)
    received = round_trip([section])[0]
    assert type(received) is RunSection and received == section


def test_a_message_is_checked_again_where_it_arrives() -> None:
    data = codec.encode(Reward(0, 0, 1.0)).replace(struct.pack(">d", 1.0), struct.pack(">d", math.nan))
    with pytest.raises(ValueError, match="a reward must be a finite number"):
        codec.decode(data)


def test_a_message_with_a_field_missing_or_of_another_type_is_refused_by_its_place() -> None:
    with pytest.raises(msgspec.ValidationError, match="at least length 3"):
        codec.decode(msgspec.msgpack.encode(["\0RequestKey", 1]))
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$\[2\]`"):
        codec.decode(msgspec.msgpack.encode(["\0RequestKey", 1, "2"]))


def test_unknown_classes_are_refused_by_name() -> None:
    class Stranger:
        pass

    for value in (Stranger(), 1j, len, np.datetime64(0, "s")):
        with pytest.raises(TypeError, match=f"{type(value).__name__} cannot be sent"):
            codec.encode([value])


def test_bytes_that_name_an_unregistered_class_build_nothing() -> None:
    data = codec.encode(RequestKey(1, 2)).replace(b"RequestKey", b"subprocess")
    with pytest.raises(KeyError, match="subprocess"):
        codec.decode(data)
    data = codec.encode(RunSection()).replace(b"RunSection", b"subprocess")
    with pytest.raises(KeyError, match="subprocess"):
        codec.decode(data)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (2**64, "the row['a'][1] is an integer of more than 64 bits; write it as a string"),
        ({1}, "the row['a'][1] is a set; write it as a sorted list"),
        (datetime(2026, 1, 1), "the row['a'][1] is a datetime; write it as a string"),
        (np.datetime64(0, "s"), "the row['a'][1] is a datetime64; write it as a string"),
        ({(1, 2): 3}, "the row['a'][1] has the key (1, 2); write keys as strings"),
        ("\ud800", "the row['a'][1] is a text with half a surrogate pair, which is no character; remove it"),
    ],
    ids=repr,
)
def test_a_row_that_cannot_be_sent_is_refused_with_the_place_and_the_remedy(value: Any, why: str) -> None:
    assert codec.check_value({"a": [1, value]}, "the row") == why


def test_a_row_that_passes_the_check_can_be_sent() -> None:
    row = {"a": [None, True, -(2**63), 2**64 - 1, 0.5, "η", b"\xff", (1, 2), np.int64(3), np.arange(3), {1: {}}]}
    assert codec.check_value(row) == ""
    assert repr(round_trip(row)["a"][6:]) == "[b'\\xff', [1, 2], 3, array([0, 1, 2]), {1: {}}]"


def assert_same_array(received: NDArray[Any], sent: NDArray[Any]) -> None:
    assert received.dtype == sent.dtype and received.shape == sent.shape
    np.testing.assert_array_equal(received, sent)
