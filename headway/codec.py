"""Values to bytes and back: the one encoding of the wire between processes and of the record on disk.

MessagePack, in one pass. What it does not know becomes a list that begins with a mark, an extension type that says
what the rest of the list becomes; an array and a member of an enumeration are extension types of their own. Decoding
builds only registered classes and plain values: nothing is unpickled, so bytes from a stranger can be wrong but cannot
run code.
"""

import dataclasses
from collections.abc import Callable, Iterable
from enum import StrEnum
from operator import attrgetter
from typing import Any, Protocol, Self, TypeVar, dataclass_transform

import msgpack
import numpy as np
from numpy.typing import NDArray

_ARRAY, _NOUN, _TUPLE, _ENUM, _PORTABLE, _INT32_ROW, _FLOAT32_ROW = range(1, 8)
_ROWS = {_INT32_ROW: np.dtype("<i4"), _FLOAT32_ROW: np.dtype("<f4")}  # one-dimensional: what nouns are full of
_ROW_CODES = {dtype: code for code, dtype in _ROWS.items()}


class Portable(Protocol):
    """A class that says itself how it travels, as plain values."""

    def to_plain(self) -> Any: ...

    @classmethod
    def from_plain(cls, plain: Any) -> Self: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    """The first item of a list that becomes something else."""

    build: Callable[..., Any]


_TUPLE_MARK = msgpack.ExtType(_TUPLE, b"")
_MARKS: dict[tuple[int, bytes], _Mark] = {(_TUPLE, b""): _Mark(lambda *items: items)}
_MEMBERS: dict[bytes, StrEnum] = {}
_ENCODERS: dict[type, Callable[[Any], Any]] = {}

T = TypeVar("T")
E = TypeVar("E", bound=type[StrEnum])
P = TypeVar("P", bound=type[Portable])


@dataclass_transform(frozen_default=True)
def noun(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted dataclass that can travel between processes and into the record."""
    made: type[T] = dataclasses.dataclass(frozen=True, slots=True, eq=False)(cls)
    fields, mark = _getter(made), _mark(_NOUN, made, made)
    _ENCODERS[made] = lambda value: [mark, *fields(value)]
    return made


def word(cls: E) -> E:
    """Register a string enumeration, so that a noun's field keeps its type across a boundary."""
    names = {member: f"{cls.__name__}.{member.value}".encode() for member in cls}
    _MEMBERS.update({name: member for member, name in names.items()})
    _ENCODERS[cls] = {member: msgpack.ExtType(_ENUM, name) for member, name in names.items()}.__getitem__
    return cls


def portable(cls: P) -> P:
    """Register a class that has `to_plain` and `from_plain`."""
    mark = _mark(_PORTABLE, cls, cls.from_plain)
    _ENCODERS[cls] = lambda value: [mark, value.to_plain()]
    return cls


def _getter(cls: Any) -> Callable[[Any], Iterable[Any]]:
    names = [field.name for field in dataclasses.fields(cls)]
    if len(names) > 1:
        return attrgetter(*names)
    # attrgetter of one name returns the bare value
    return lambda value: [getattr(value, name) for name in names]


def _mark(code: int, cls: type, build: Callable[..., Any]) -> msgpack.ExtType:
    name = cls.__name__.encode()
    _MARKS[code, name] = _Mark(build)
    return msgpack.ExtType(code, name)


def encode(value: Any) -> bytes:
    # A small buffer to start with, because most messages are short.
    packed: bytes = msgpack.packb(
        value, default=_to_known, strict_types=True, unicode_errors="surrogatepass", buf_size=4096
    )
    return packed


def decode(data: bytes | bytearray | memoryview) -> Any:
    return msgpack.unpackb(
        data, ext_hook=_from_extension, list_hook=_from_list, strict_map_key=False, unicode_errors="surrogatepass"
    )


def _to_known(value: Any) -> Any:
    """What MessagePack can encode in place of `value`; it comes back here for what that holds."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.ndarray):
        return _encode_array(value)
    if isinstance(value, tuple):
        return [_TUPLE_MARK, *value]
    if isinstance(value, np.generic):
        raise TypeError(f"convert numpy scalar {value!r} to a Python number before sending it")
    raise TypeError(f"{type(value).__name__} cannot travel: it is neither a plain value nor a registered noun")


def _encode_array(array: NDArray[Any]) -> msgpack.ExtType:
    code = _ROW_CODES.get(array.dtype) if array.ndim == 1 else None
    if code is not None:
        return msgpack.ExtType(code, array.tobytes())
    return msgpack.ExtType(_ARRAY, msgpack.packb((array.dtype.str, array.shape)) + array.tobytes())


def _decode_array(data: bytes) -> NDArray[Any]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(data[:256])
    dtype, shape = unpacker.unpack()
    return np.frombuffer(data, dtype=np.dtype(dtype), offset=unpacker.tell()).reshape(shape)


def _from_extension(code: int, data: bytes) -> Any:
    if code in _ROWS:
        return np.frombuffer(data, _ROWS[code])
    if code == _ENUM:
        return _MEMBERS[data]
    if code == _ARRAY:
        return _decode_array(data)
    return _MARKS[code, data]


def _from_list(items: list[Any]) -> Any:
    if items and type(items[0]) is _Mark:
        return items[0].build(*items[1:])
    return items
