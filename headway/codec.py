"""Nouns to bytes and back: the one encoding of the wire between processes and of the record on disk.

MessagePack with five extension types (array, noun, tuple, enum, portable). Decoding builds only registered classes
and plain values: nothing is unpickled, so bytes from a stranger can be wrong but cannot run code.
"""

import dataclasses
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol, Self, TypeVar, dataclass_transform

import msgpack
import numpy as np

_ARRAY, _NOUN, _TUPLE, _ENUM, _PORTABLE = 1, 2, 3, 4, 5


class Portable(Protocol):
    """A class that says itself how it travels, as plain values."""

    def to_plain(self) -> Any: ...

    @classmethod
    def from_plain(cls, plain: Any) -> Self: ...


_NOUNS: dict[str, type] = {}
_ENUMS: dict[str, type[StrEnum]] = {}
_PORTABLES: dict[str, type[Portable]] = {}

T = TypeVar("T")
E = TypeVar("E", bound=type[StrEnum])
P = TypeVar("P", bound=type[Portable])


@dataclass_transform(frozen_default=True)
def noun(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted dataclass that can travel between processes and into the record."""
    made: type[T] = dataclasses.dataclass(frozen=True, slots=True, eq=False)(cls)
    _NOUNS[made.__name__] = made
    return made


def word(cls: E) -> E:
    """Register a string enumeration, so that a noun's field keeps its type across a boundary."""
    _ENUMS[cls.__name__] = cls
    return cls


def portable(cls: P) -> P:
    """Register a class that has `to_plain` and `from_plain`."""
    _PORTABLES[cls.__name__] = cls
    return cls


def encode(value: Any) -> bytes:
    # A small buffer to start with: nested values each have a packer of their own, and most are short.
    packed: bytes = msgpack.packb(
        value, default=_to_extension, strict_types=True, unicode_errors="surrogatepass", buf_size=4096
    )
    return packed


def decode(data: bytes | bytearray | memoryview) -> Any:
    return msgpack.unpackb(data, ext_hook=_from_extension, strict_map_key=False, unicode_errors="surrogatepass")


def _to_extension(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.ndarray):
        header = msgpack.packb((value.dtype.str, value.shape))
        return msgpack.ExtType(_ARRAY, header + np.ascontiguousarray(value).tobytes())
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, encode(list(value)))
    if isinstance(value, StrEnum):
        return msgpack.ExtType(_ENUM, encode([type(value).__name__, value.value]))
    if type(value).__name__ in _NOUNS:
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return msgpack.ExtType(_NOUN, encode([type(value).__name__, *fields]))
    if type(value).__name__ in _PORTABLES:
        return msgpack.ExtType(_PORTABLE, encode([type(value).__name__, value.to_plain()]))
    if isinstance(value, np.generic):
        raise TypeError(f"convert numpy scalar {value!r} to a Python number before sending it")
    raise TypeError(f"{type(value).__name__} cannot travel: it is neither a plain value nor a registered noun")


def _from_array(data: bytes) -> np.ndarray:
    unpacker = msgpack.Unpacker()
    unpacker.feed(data[:256])
    dtype, shape = unpacker.unpack()
    return np.frombuffer(data, dtype=np.dtype(dtype), offset=unpacker.tell()).reshape(shape)


def _from_noun(data: bytes) -> Any:
    name, *fields = decode(data)
    return _NOUNS[name](*fields)


def _from_enum(data: bytes) -> StrEnum:
    name, value = decode(data)
    return _ENUMS[name](value)


def _from_portable(data: bytes) -> Any:
    name, plain = decode(data)
    return _PORTABLES[name].from_plain(plain)


_DECODERS: dict[int, Callable[[bytes], Any]] = {
    _ARRAY: _from_array,
    _NOUN: _from_noun,
    _TUPLE: lambda data: tuple(decode(data)),
    _ENUM: _from_enum,
    _PORTABLE: _from_portable,
}


def _from_extension(code: int, data: bytes) -> Any:
    return _DECODERS[code](data)
