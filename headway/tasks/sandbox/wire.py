"""What crosses the walls of a sandbox: frames of plain values, and calls between two processes on top of them.

A value is a Python primitive, a container of them, or one of a few immutable types of the standard library, rebuilt
exactly on arrival; nothing a sender writes can make the receiver run code. Any other object stays where it is and
crosses as a `Remote`: its attributes and methods are calls back to its owner, and it is equal to nothing but itself,
so that a class whose `__eq__` always says yes gains nothing by it.

Part of the program inside the sandbox: standard library only, and of that only what is quick to load.
"""

from __future__ import annotations

import builtins
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # as a name alone: the module typing takes longer to load than all that is used here
    from collections.abc import Callable
    from typing import Any

LONGEST = 16 << 20
_SIZE = struct.Struct(">I")
_DOUBLE = struct.Struct(">d")
_NOT_OURS = frozenset(("collections.deque", "collections.Counter", "fractions.Fraction", "decimal.Decimal"))
_DATES = frozenset(("datetime.date", "datetime.datetime", "datetime.timedelta", "datetime.time"))


class WireError(Exception):
    """What arrived is no frame, or too large a one, or the other side is gone."""


def send(descriptor: int, payload: bytes) -> None:
    if len(payload) > LONGEST:
        raise WireError(f"a message of {len(payload)} bytes is longer than {LONGEST}")
    data = memoryview(_SIZE.pack(len(payload)) + payload)
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> bytes:
    """The next frame; reads not one byte more."""
    (size,) = _SIZE.unpack(_read(descriptor, _SIZE.size))
    if size > LONGEST:
        raise WireError(f"a message of {size} bytes is longer than {LONGEST}")
    return _read(descriptor, size)


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = os.read(descriptor, min(size, 1 << 20))
        except ConnectionError:
            part = b""
        if not part:
            raise WireError("the other side is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode(value: Any, keep: Callable[[Any], bytes] | None = None) -> bytes:
    """`keep` gives the eight bytes that name an object which is no plain value; without it such an object raises."""
    parts: list[bytes] = []
    _encode(value, parts.append, keep)
    return b"".join(parts)


def _encode(value: Any, out: Callable[[bytes], None], keep: Callable[[Any], bytes] | None) -> None:
    if value is None or value is True or value is False or value is Ellipsis:
        out({None: b"N", True: b"T", False: b"F", Ellipsis: b"."}[value])
    elif isinstance(value, int):
        _sized(b"i", int.to_bytes(value, (int.bit_length(value) + 8) // 8, "big", signed=True), out)
    elif isinstance(value, float):
        out(b"f" + _DOUBLE.pack(value))
    elif isinstance(value, complex):
        out(b"c" + _DOUBLE.pack(value.real) + _DOUBLE.pack(value.imag))
    elif isinstance(value, str):
        _sized(b"s", str.encode(value, "utf-8", "surrogatepass"), out)
    elif isinstance(value, bytes | bytearray):
        _sized(b"b" if isinstance(value, bytes) else b"a", bytes(value), out)
    elif _of_library(value):
        _encode_of_library(value, out, keep)
    elif isinstance(value, list | tuple | set | frozenset):
        tag = next(tag for kind, tag in _CONTAINERS if isinstance(value, kind))
        out(tag + _SIZE.pack(len(value)))
        for item in value:
            _encode(item, out, keep)
    elif isinstance(value, dict):
        out(b"d" + _SIZE.pack(len(value)))
        for key, item in dict.items(value):
            _encode(key, out, keep)
            _encode(item, out, keep)
    elif isinstance(value, range | slice):
        out(b"r" if isinstance(value, range) else b"k")
        _encode((value.start, value.stop, value.step), out, keep)
    elif isinstance(value, type) and vars(builtins).get(name := value.__name__) is value:
        _sized(b"t", name.encode(), out)
    elif keep is not None:
        out(keep(value))
    else:
        raise WireError(f"an object of type {type(value).__name__} is no plain value")


def _sized(tag: bytes, data: bytes, out: Callable[[bytes], None]) -> None:
    out(tag + _SIZE.pack(len(data)))
    out(data)


_CONTAINERS: tuple[tuple[type, bytes], ...] = ((list, b"l"), (tuple, b"u"), (set, b"e"), (frozenset, b"z"))


def _of_library(value: Any) -> bool:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return name in _NOT_OURS or name in _DATES


def _encode_of_library(value: Any, out: Callable[[bytes], None], keep: Callable[[Any], bytes] | None) -> None:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in _DATES:
        arguments = value.__reduce__()[1]  # of types in C: what their constructors take
    elif name == "collections.deque":
        arguments = (list(value), value.maxlen)
    else:
        arguments = (dict(value) if name == "collections.Counter" else str(value),)
    _sized(b"C", name.encode(), out)
    _encode(arguments, out, keep)


class _Reader:
    """One frame being decoded."""

    def __init__(self, data: bytes, find: Callable[[bytes, int], Any]) -> None:
        self._data, self._at, self._find = data, 0, find

    def value(self) -> Any:
        tag = self._take(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _SIZED:
            return _SIZED[tag](self._take(self._size()))
        if tag in _MANY:
            return _MANY[tag]([self.value() for _ in range(self._size())])
        if tag == b"d":
            return {self.value(): self.value() for _ in range(self._size())}
        if tag == b"f":
            return _DOUBLE.unpack(self._take(8))[0]
        if tag == b"c":
            return complex(_DOUBLE.unpack(self._take(8))[0], _DOUBLE.unpack(self._take(8))[0])
        if tag in b"rk" and tag:
            return (range if tag == b"r" else slice)(*self.value())
        if tag == b"C":
            return _construct(self._take(self._size()).decode(), self.value())
        if tag in b"HO" and tag:
            return self._find(tag, int.from_bytes(self._take(8), "big"))
        raise WireError("this is no value")

    def _size(self) -> int:
        size: int = _SIZE.unpack(self._take(4))[0]
        if size > len(self._data):  # of bytes or of items, each of which takes a byte
            raise WireError("a frame that promises more than it holds")
        return size

    def _take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            raise WireError("a frame that ends early")
        self._at += size
        return part


def _construct(name: str, arguments: tuple[Any, ...]) -> Any:
    if name not in _NOT_OURS and name not in _DATES:
        raise WireError(f"{name[:80]} is no type that may cross")
    module, _, kind = name.partition(".")
    return getattr(__import__(module), kind)(*arguments)


def _builtin_type(data: bytes) -> Any:
    found = vars(builtins).get(data.decode())
    if not isinstance(found, type):
        raise WireError("this is no built-in type")
    return found


_CONSTANTS: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False, b".": Ellipsis}
_SIZED: dict[bytes, Callable[[bytes], Any]] = {
    b"i": lambda data: int.from_bytes(data, "big", signed=True),
    b"s": lambda data: data.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"a": bytearray,
    b"t": _builtin_type,
}
_MANY: dict[bytes, Callable[[list[Any]], Any]] = {b"l": list, b"u": tuple, b"e": set, b"z": frozenset}


def decode(data: bytes, find: Callable[[bytes, int], Any] | None = None) -> Any:
    """The value of a frame; raises `WireError` for anything else. `find` gives the object behind a name."""

    def nothing(tag: bytes, number: int) -> Any:
        raise WireError("an object where only plain values may be")

    try:
        return _Reader(data, find or nothing).value()
    except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError) as error:
        raise WireError(f"this is no value: {type(error).__name__}") from None


class Remote:
    """An object that lives in the other process."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: CallPeer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.request("setitem", self, key, value)

    def __len__(self) -> int:
        size = self._peer.request("len", self)
        return size if isinstance(size, int) else -1

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(self._peer.request("list", self))

    def __next__(self) -> Any:
        return self._peer.request("next", self)

    def __contains__(self, item: Any) -> bool:
        return item in list(self)

    def __str__(self) -> str:
        said = self._peer.request("str", self)
        return said if isinstance(said, str) else ""

    __repr__ = __str__


class CallPeer:
    """One end of a line on which each process calls objects of the other, one call inside another if need be.

    `serve` answers one request for the other side, given the name of the operation and its arguments.
    """

    def __init__(self, descriptor: int, serve: Callable[..., Any]) -> None:
        self._descriptor, self._serve = descriptor, serve
        self._mine: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._theirs: dict[int, Remote] = {}
        self.broken = False

    def request(self, operation: str, *arguments: Any) -> Any:
        """What the other side answers; raises what it raised, where that is a built-in exception."""
        if self.broken:
            raise WireError("the other side is gone")
        try:
            self._say([operation, list(arguments)])
            while (said := self._hear())[0] not in ("return", "raise"):
                self._answer(said)
        except WireError:
            self.broken = True  # a caller that catches every exception does not make it whole
            raise
        if said[0] == "return":
            return said[1]
        raise _exception(said[1], said[-1])

    def call(self, function: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lists, sets and dicts given as arguments are changed here as the call changed them there."""
        answer = self.request("call", function, list(args), kwargs)
        try:
            result, changed = answer
            for index, now in changed.items():
                _become(args[index], now)
        except (TypeError, ValueError, AttributeError, LookupError):
            self.broken = True
            raise WireError("this is no result of a call") from None
        return result

    def serve_forever(self) -> None:
        while True:
            self._answer(self._hear())

    def _answer(self, said: list[Any]) -> None:
        try:
            answer = ["return", self._serve(said[0], *said[1])]
            payload = encode(answer, self._refer)
        except WireError:
            raise
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            payload = encode(["raise", names, _text_of(error)], self._refer)
        send(self._descriptor, payload)

    def _say(self, value: Any) -> None:
        send(self._descriptor, encode(value, self._refer))

    def _hear(self) -> list[Any]:
        said = decode(receive(self._descriptor), self._find)
        if not isinstance(said, list) or len(said) < 2:
            raise WireError("this is no message")
        return said

    def _refer(self, value: Any) -> bytes:
        if type(value) is Remote:
            return b"O" + int(value._number).to_bytes(8, "big")
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)  # kept, so that its id stays its own
        return b"H" + self._numbers[id(value)].to_bytes(8, "big")

    def _find(self, tag: bytes, number: int) -> Any:
        if tag == b"O":
            if number >= len(self._mine):
                raise WireError("an object that was never given")
            return self._mine[number]
        if number not in self._theirs:
            self._theirs[number] = Remote(self, number)
        return self._theirs[number]


def _become(value: Any, now: Any) -> None:
    if isinstance(value, list | bytearray) and type(now) is type(value):
        value[:] = now
    elif isinstance(value, dict | set) and type(now) is type(value):
        value.clear()
        value.update(now)


def _exception(names: Any, text: Any) -> Exception:
    """The nearest built-in exception of the names; one that would end this process is a plain RuntimeError here."""
    for name in names if isinstance(names, list) else []:
        found = vars(builtins).get(name) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                return found(text)
            except TypeError:  # a Unicode error wants more than a text
                continue
    return RuntimeError(f"the program ended or raised what is no exception: {str(names)[:80]}")


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except BaseException:
        return ""
