"""Values to bytes and back: the one encoding of the wire between processes and of the record on disk.

MessagePack, by msgspec. A message is a struct: an array of its name and its fields, decoded by the types of its fields.
Two hooks add what MessagePack lacks, as extension types: numpy arrays, and classes that define `to_plain` and
`from_plain`. A tuple or a member of an enumeration comes back as one where a message's field says so, otherwise as a
list or a string; a numpy scalar comes back as a Python number. Decoding builds only registered classes and plain
values: nothing is unpickled, so untrusted bytes can be wrong but cannot run code.
"""

import dataclasses
from typing import Any, Protocol, Self, TypeVar, dataclass_transform

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext

_ARRAY, _PORTABLE, _INT32_ROW, _FLOAT32_ROW = range(1, 5)
_ROWS = {_INT32_ROW: np.dtype("<i4"), _FLOAT32_ROW: np.dtype("<f4")}  # the usual fields of messages
_ROW_CODES = {dtype: code for code, dtype in _ROWS.items()}
_TAG = "\0"  # begins the name of a message, so that a list of ordinary strings is not taken for one


class Portable(Protocol):
    """A class that converts itself to plain values and back."""

    def to_plain(self) -> Any: ...

    @classmethod
    def from_plain(cls, plain: Any) -> Self: ...


_MESSAGES: dict[str, Any] = {}
_PORTABLES: dict[str, type[Portable]] = {}

T = TypeVar("T")
P = TypeVar("P", bound=type[Portable])


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """Class decorator: a frozen struct that can be sent between processes and written to the record.

    The functions of `dataclasses`, such as `replace`, accept it as one.
    """
    made: Any = dataclasses.dataclass(eq=False)(cls)
    fields = [(field.name, cls.__annotations__[field.name], _default(field)) for field in dataclasses.fields(made)]
    left_out = {name for name, _, _ in fields} | _MADE_ANEW
    namespace = {key: value for key, value in vars(made).items() if key not in left_out}
    tag = _TAG + cls.__name__
    _MESSAGES[tag] = msgspec.defstruct(
        cls.__name__,
        fields,
        namespace=namespace,
        module=cls.__module__,
        tag=tag,
        array_like=True,
        frozen=True,
        eq=False,
    )
    return _MESSAGES[tag]  # type: ignore[no-any-return]


_MADE_ANEW = {"__init__", "__dict__", "__weakref__", "__annotations__", "__match_args__", "__module__"}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.NODEFAULT if field.default is dataclasses.MISSING else field.default


def portable(cls: P) -> P:
    """Register a class that has `to_plain` and `from_plain`."""
    _PORTABLES[cls.__name__] = cls
    return cls


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Raises msgspec.DecodeError or KeyError for bytes that are no value of a known class."""
    return _build(_DECODER.decode(data))


def _build(value: Any) -> Any:
    """Replace arrays that encode messages by the messages, also inside lists and dictionaries."""
    if type(value) is list:
        if value and type(value[0]) is str and value[0].startswith(_TAG):
            return msgspec.convert(value, _MESSAGES[value[0]])
        return [_build(item) if type(item) in (list, dict) else item for item in value]
    if type(value) is dict:
        return {key: _build(item) if type(item) in (list, dict) else item for key, item in value.items()}
    return value


def _to_known(value: Any) -> Any:
    """Encode hook: a value that MessagePack knows, in place of `value`."""
    if isinstance(value, np.ndarray):
        code = _ROW_CODES.get(value.dtype) if value.ndim == 1 else None
        if code is not None:
            return Ext(code, value.tobytes())
        return Ext(_ARRAY, encode((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    name = type(value).__name__
    if _PORTABLES.get(name) is type(value):
        return Ext(_PORTABLE, encode((name, value.to_plain())))
    raise TypeError(f"{name} cannot be sent: it is neither a plain value nor a registered message")


def _from_extension(code: int, data: memoryview) -> Any:
    if code in _ROWS:
        return np.frombuffer(data.tobytes(), _ROWS[code])
    if code == _ARRAY:
        dtype, shape, numbers = decode(data)
        return np.frombuffer(numbers, np.dtype(dtype)).reshape(shape)
    if code != _PORTABLE:
        raise KeyError(f"extension type {code} is not known")
    name, plain = decode(data)
    return _PORTABLES[name].from_plain(plain)


_ENCODER = Encoder(enc_hook=_to_known)
_DECODER = Decoder(ext_hook=_from_extension)

_FIXES: dict[type, str] = {set: "a sorted list", frozenset: "a sorted list", complex: "two numbers"}


def check_value(value: Any, name: str = "it") -> str:
    """Why a data row, or a value in one, cannot be sent to other processes; empty if it can.

    >>> check_value({"answers": [1, {2}]}, "the row")
    "the row['answers'][1] is a set; write it as a sorted list"
    """
    if value is None or isinstance(value, bool | float | bytes | np.ndarray | np.bool_ | np.integer | np.floating):
        return ""
    if isinstance(value, int):
        is_small = -(2**63) <= value < 2**64
        return "" if is_small else f"{name} is an integer of more than 64 bits; write it as a string"
    if isinstance(value, str):
        whole = value.isascii() or value.encode("utf-8", "replace").decode() == value
        return "" if whole else f"{name} is a text with half a surrogate pair, which is no character; remove it"
    if isinstance(value, list | tuple):
        parts = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        wrong = [key for key in value if type(key) not in (str, int)]
        if wrong:
            return f"{name} has the key {wrong[0]!r}; write keys as strings"
        parts = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    else:
        return f"{name} is a {type(value).__name__}; write it as {_FIXES.get(type(value), 'a string')}"
    return next((why for part, item in parts if (why := check_value(item, part))), "")
