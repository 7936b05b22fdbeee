"""What crosses the walls of a sandbox: values come out as they went in, and hostile bytes come out as an error."""

import collections
import datetime
import decimal
import fractions
import os
import random
from typing import Any

import pytest

from headway.tasks.sandbox.wire import WireError, decode, encode, receive

VALUES: list[Any] = [
    *(None, True, False, ..., 0, -1, 255, -(2**200), 1.5, -0.0, float("inf"), 1 - 2j, "", "é\ud800🙂", b"\x00\xff"),
    *([], (), set(), frozenset({1}), {}, [1, [2, (3, {4: {5}})]], {"a": [None], (1, 2): b""}, range(1, 9, 2)),
    *(bytearray(b"ab"), int, str, slice(1, None), collections.deque([1, 2], 3), collections.Counter("aab")),
    *(fractions.Fraction(1, 3), decimal.Decimal("1.50"), datetime.date(2020, 2, 29), datetime.timedelta(1, 2, 3)),
    datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_plain_value_arrives_with_its_type(value: Any) -> None:
    arrived = decode(encode(value))
    assert arrived == value and type(arrived) is type(value) and repr(arrived) == repr(value)


def test_a_subclass_arrives_as_the_plain_value_it_holds() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    arrived = decode(encode([Liar(3), collections.OrderedDict(a=1)]))
    assert type(arrived[0]) is int and arrived == [3, {"a": 1}] and arrived != [4, {"a": 1}]


def test_an_object_does_not_cross_as_a_value() -> None:
    with pytest.raises(WireError, match="no plain value"):
        encode([object()])


def test_hostile_bytes_are_an_error_and_never_anything_else() -> None:
    whole, draw = encode(VALUES), random.Random(1)
    for _ in range(3000):
        data = bytearray(whole[: draw.randrange(len(whole))])
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(max(1, len(data))) :][:1] = bytes([draw.randrange(256)])
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            decode(bytes(data))
        except WireError:
            continue


@pytest.mark.parametrize(
    "data",
    [
        *[b"", b"?", b"l\xff\xff\xff\xff", b"l\x00\x00\x00\x01" * 5000, b"C\x00\x00\x00\x09os.systemu\x00\x00\x00\x00"],
        *[b"t\x00\x00\x00\x04eval", b"H" + bytes(8), b"d\x00\x00\x00\x01l\x00\x00\x00\x00N", b"i\x00\x00\x00\x05a"],
    ],
)
def test_bytes_that_ask_for_more_than_a_value_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_a_frame_that_promises_gigabytes_is_refused_before_it_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="longer than"):
        receive(reading)
    os.close(reading)
    os.close(writing)
