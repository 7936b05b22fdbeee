"""Frames between two processes, and how errors cross: both ends of a socket are a `Channel`.

A frame is a header (payload length, call number, kind) and a payload in `codec`'s encoding. The header is not part
of the encoding, so that a payload this process cannot read still fails the call it belongs to, and only that one.

The first frames prove to each end that the other has the run's token, which itself never travels: the client sends a
nonce (HELLO), the worker answers with its own and a keyed hash of both (CHALLENGE), the client with another (PROOF).
Until then an end reads at most `MAX_UNVERIFIED_BYTES` of a frame and decodes nothing. Frames are not encrypted.

An address is PLACE/RUN/NUMBER, and no two workers of a run have the same: a Unix-domain socket's path, or HOST:PORT
and then the run and the number. Both hashes are over it, so that a process that took over a
dead worker's port cannot pass for it.
"""

import asyncio
import hmac
import socket
import struct
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast

from headway.errors import BY_NAME, HeadwayError

HELLO, CHALLENGE, PROOF, CALL, CANCEL, RESULT, ITEM, END, ERROR = range(9)

TOKEN_BYTES = NONCE_BYTES = 32
MAX_UNVERIFIED_BYTES = 64
MAX_FRAME_BYTES = 2**31 - 1
BACKLOG = 4096  # clients that may connect before a busy worker accepts them

_HEADER = struct.Struct("<IQB")
_READ_BYTES, _UNVERIFIED_READ_BYTES = 256 * 1024, 512
_LARGE_BYTES = 64 * 1024
_SILENCE_S = 30  # a machine that acknowledges nothing for this long counts as lost
_UNREAD_S = 120  # the same for data that is not read; a busy machine reads late

C = TypeVar("C", bound="Channel")


class RemoteError(HeadwayError):
    """An exception that was not written for users, raised inside a worker; its notes hold the worker's traceback."""


_ERRORS: dict[str, type[HeadwayError]] = {**BY_NAME, RemoteError.__name__: RemoteError}


def error_to_plain(where: str, error: BaseException) -> list[Any]:
    """Name, sentence and notes of `error`: one of Headway's unchanged, any other with `where` it was raised."""
    notes = list(getattr(error, "__notes__", []))
    for cls in type(error).__mro__:
        if cls.__name__ in _ERRORS and isinstance(error, HeadwayError):
            return [cls.__name__, str(error), notes]
    trace = "".join(traceback.format_exception(error)).rstrip()
    return [RemoteError.__name__, f"{where} failed with {type(error).__name__}: {error}", [*notes, trace]]


def error_from_plain(plain: list[Any]) -> HeadwayError:
    name, sentence, notes = plain
    error = _ERRORS[name](sentence)
    for note in notes:
        error.add_note(note)
    return error


def run_of(address: str) -> str:
    """The run a worker belongs to, by its address."""
    return address.rsplit("/", 2)[1]


def is_unix(address: str) -> bool:
    return address.startswith("/")


def listen_on_path(directory: str, number: int) -> tuple[socket.socket, str]:
    """A listening socket in a directory that is named after the run, and its address."""
    listener, address = socket.socket(socket.AF_UNIX), f"{directory}/{number}"
    listener.bind(address)
    listener.listen(BACKLOG)
    return listener, address


def listen_on_host(host: str, run: str, number: int) -> tuple[socket.socket, str]:
    """A listening socket on a free port of this one address of the machine, and its address in the run."""
    is_v6 = ":" in host
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if is_v6 else socket.AF_INET, backlog=BACKLOG)
    shown = f"[{host}]" if is_v6 else host
    return listener, f"{shown}:{listener.getsockname()[1]}/{run}/{number}"


async def connect(make: Callable[[], C], address: str) -> C:
    loop = asyncio.get_running_loop()
    if is_unix(address):
        return (await loop.create_unix_connection(make, address))[1]
    host, _, port = address.rsplit("/", 2)[0].rpartition(":")
    return (await loop.create_connection(make, host.strip("[]"), int(port)))[1]


def proof(token: bytes, side: str, address: str, nonces: bytes) -> bytes:
    """Keyed hash that proves possession of the token, for one side of one connection to one worker."""
    return hmac.digest(token, f"{side} {address} ".encode() + nonces, "sha256")


def _watch_over(connection: socket.socket) -> None:
    """Set TCP keepalive, so that the kernel notices a machine that vanished."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_S)


class Channel(asyncio.BufferedProtocol, ABC):
    """One end of a connection: whole frames in, whole frames out, once each end has proved itself to the other.

    Frames of one turn of the event loop leave in one write. Received payloads are views into a buffer that is used
    again: a subclass decodes them before it returns. Calls made before the other end is verified leave once it is.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_bytes = MAX_UNVERIFIED_BYTES
        self._held: list[tuple[int, int, bytes]] | None = []  # None once the other end is verified
        self._buffer = bytearray(_UNVERIFIED_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._large: tuple[int, int, memoryview] | None = None  # kind, call and payload of a frame beyond the buffer
        self._large_end = 0
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        _watch_over(transport.get_extra_info("socket"))

    @abstractmethod
    def prove(self, kind: int, payload: bytes) -> bool:
        """Answer a frame of an end that is not verified yet; False closes the connection."""

    def verified(self) -> None:
        self._max_bytes = MAX_FRAME_BYTES
        received, self._buffer = self._buffer, bytearray(_READ_BYTES)
        self._buffer[: len(received)] = received
        self._view = memoryview(self._buffer)
        held, self._held = self._held, None
        for frame in held or ():
            self.send(*frame)

    @abstractmethod
    def frame_received(self, kind: int, call: int, payload: memoryview) -> None:
        """A whole frame has arrived; the payload is valid during this call only."""

    def send(self, kind: int, call: int, payload: bytes = b"") -> None:
        if len(payload) > MAX_FRAME_BYTES:
            raise HeadwayError(
                f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}; send it in pieces"
            )
        if self.transport.is_closing():
            return
        if self._held is not None and kind >= CALL:
            self._held.append((kind, call, payload))
            return
        header = _HEADER.pack(len(payload), call, kind)
        if len(payload) > _LARGE_BYTES:
            self._outbox.append(header)
            self._flush()
            self.transport.write(payload)
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(header + payload)
        self._outbox_bytes += len(payload)
        if self._outbox_bytes > _LARGE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._outbox and not self.transport.is_closing():
            self.transport.write(b"".join(self._outbox))
        self._outbox.clear()
        self._outbox_bytes = 0

    async def drain(self) -> None:
        """Wait while the other end reads more slowly than this one writes."""
        if not self._writable.is_set():
            await self._writable.wait()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[2][self._large_end :]
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._large is not None:
            self._large_end += nbytes
            kind, call, payload = self._large
            if self._large_end == len(payload):
                self._large = None
                self.frame_received(kind, call, payload)
            return
        self._end += nbytes
        while self._next_frame():
            pass
        if self._start:
            rest = self._end - self._start
            self._buffer[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest

    def _next_frame(self) -> bool:
        """Process the first frame in the buffer; False while it is incomplete."""
        begin = self._start + _HEADER.size
        if self._end < begin or self.transport.is_closing():
            return False
        num_bytes, call, kind = _HEADER.unpack_from(self._buffer, self._start)
        if num_bytes > self._max_bytes:
            self.transport.abort()
            return False
        if begin + num_bytes <= self._end:
            self._start = begin + num_bytes
            payload = self._view[begin : begin + num_bytes]
            if self._held is None:
                self.frame_received(kind, call, payload)
            elif not self.prove(kind, bytes(payload)):
                self.transport.abort()
            return True
        if _HEADER.size + num_bytes > len(self._buffer):
            payload, self._large_end = memoryview(bytearray(num_bytes)), self._end - begin
            payload[: self._large_end] = self._view[begin : self._end]
            self._large = (kind, call, payload)
            self._start = self._end
        return False
