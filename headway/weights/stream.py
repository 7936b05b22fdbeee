"""Weights over TCP, for engines on other machines: the trainer's process serves its buffers, and each engine fetches.

Both sides first prove by HMAC that they know the token. The engine then requests ranges of a version's buffer, a bucket
at a time and a few ahead; the server sends them out of the buffer, and the engine receives them into its shadow
weights, both with the GIL released. A broken connection is reopened a bounded number of times and continues with the
bucket it was in. The bytes are not encrypted.

Invariants that live here:
 11. Verified weight sync at every load: each answer says whether the buffer still holds the version, the last one
     after the last byte has arrived, so that two versions never mix unnoticed; shadow.py then compares fingerprints.
 15. Bounded waits: every wait has a deadline; one that expires fails with the name of what was awaited.
"""

import hmac
import ipaddress
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from headway.errors import CAUSE, ConfigError, WeightsUnreachable, translated
from headway.types import TensorInfo, WeightPlace, WeightUpdate

Span = tuple[TensorInfo, int, int]
"""A piece of a tensor that is moved at once: the tensor, its first byte, its number of bytes."""

LOOPBACK = "127.0.0.1"
OWN = "own"
"""In place of an address: the one by which other machines reach this one."""
MAX_BUCKET_BYTES = 2**26
CONNECT_S = 10.0
ANSWER_S = 60.0
"""The longest a bucket, or any other answer of the peer, may take."""
NUM_CONNECTIONS = 4
"""How often one fetch may connect: the first time, and after a connection broke."""

_LOG = logging.getLogger(__name__)
_ANY = ("0.0.0.0", "::")
_GREETING = b"headway-weights1"
_PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)
_REQUEST = struct.Struct("<QQQ")  # version, first byte, number of bytes
_ANSWER = struct.Struct("<?q")  # whether the bytes of that version follow, and the newest version
_AHEAD = 16  # requests in flight: small tensors must not cost a round trip each
_MAX_CLIENTS = 1024
_PAUSE_S = 0.1
_CLOSE_S = 5.0


class Source(Protocol):
    """Interface of the publisher: its newest version, and the bytes of the versions it still holds."""

    version: int

    def memory_of(self, version: int) -> memoryview | None:
        """The buffer of a version; None if it was overwritten."""
        ...


# What both sides do


def _set_deadline(peer: socket.socket, seconds: float) -> None:
    """Set the kernel's deadline on each call. With Python's timeout the socket would not block, and a call would move
    the bytes available so far instead of a whole bucket."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    interval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, interval)


def _receive(peer: socket.socket, memory: memoryview, seconds: float) -> None:
    """Fill the memory, or raise: TimeoutError, or ConnectionError when the other side has closed."""
    deadline = time.monotonic() + seconds
    while len(memory):
        with translated(BlockingIOError, TimeoutError, CAUSE):
            num_received = peer.recv_into(memory, len(memory), socket.MSG_WAITALL)
        if num_received == 0:
            raise ConnectionError("the other side closed the connection")
        memory = memory[num_received:]
        if len(memory) and time.monotonic() > deadline:
            raise TimeoutError


def _receive_bytes(peer: socket.socket, num_bytes: int, seconds: float) -> bytes:
    received = bytearray(num_bytes)
    _receive(peer, memoryview(received), seconds)
    return bytes(received)


def _proof(token: bytes, role: bytes, challenges: bytes) -> bytes:
    return hmac.digest(token, role + challenges, "sha256")


# The serving side


class WeightServer:
    """Serves a source's versions to clients that prove the token, in one thread per client."""

    def __init__(self, address: str, source: Source) -> None:
        address = own_address() if address == OWN else address
        self.token = secrets.token_bytes(_PROOF_BYTES)
        self._source = source
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(_MAX_CLIENTS)
        except OSError as error:
            self._listener.close()
            raise ConfigError(
                f"weights.address = {address} cannot be listened on ({error.strerror}); name an address of the "
                "trainer's machine, or 0.0.0.0 for all of them"
            ) from error
        shown = own_address() if address in _ANY else address
        self.location = f"{shown}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._clients: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close the listener and all connections."""
        with self._lock:
            self._closed = True
            threads = [self._acceptor, *self._clients]
            for open_socket in (self._listener, *self._clients.values()):
                with suppress(OSError):  # the other side may have ended it
                    open_socket.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(_CLOSE_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:  # out of file descriptors, say; a client that waits will connect again
                    _LOG.warning("a client of the weight server could not be accepted: %s", error)
                    time.sleep(_PAUSE_S)
                continue
            thread = threading.Thread(target=self._serve, args=(client,), name="weights", daemon=True)
            with self._lock:
                if self._closed or len(self._clients) >= _MAX_CLIENTS:
                    client.close()
                    continue
                self._clients[thread] = client
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            # A client that disconnects, is silent or reads too slowly loses its own transfer, and reports that itself.
            with suppress(OSError), client:
                _set_deadline(client, CONNECT_S)
                if self._is_trusted(client):
                    _set_deadline(client, ANSWER_S)
                    while self._answer(client):
                        pass
        finally:
            with self._lock:
                del self._clients[threading.current_thread()]

    def _is_trusted(self, client: socket.socket) -> bool:
        ours = secrets.token_bytes(_PROOF_BYTES)
        client.sendall(_GREETING + ours)
        received = _receive_bytes(client, 2 * _PROOF_BYTES, CONNECT_S)
        theirs, proof = received[:_PROOF_BYTES], received[_PROOF_BYTES:]
        trusted = hmac.compare_digest(proof, _proof(self.token, b"engine", ours + theirs))
        client.sendall(_proof(self.token, b"trainer", ours + theirs) if trusted else _REFUSED)
        return trusted

    def _answer(self, client: socket.socket) -> bool:
        """Answer one request; False closes the connection."""
        version, start, num_bytes = _REQUEST.unpack(_receive_bytes(client, _REQUEST.size, ANSWER_S))
        memory = self._source.memory_of(version)
        if memory is None:
            client.sendall(_ANSWER.pack(False, self._source.version))
            return True
        if num_bytes > MAX_BUCKET_BYTES or start + num_bytes > len(memory):
            return False
        client.sendall(_ANSWER.pack(True, version), socket.MSG_MORE if num_bytes else 0)
        # Not sendfile, which works page by page: on loopback this is 1.5 times as fast.
        client.sendall(memory[start : start + num_bytes])
        return True


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def own_address() -> str:
    """This machine's address on its default route, by which other machines reach it. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address reserved for documents
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


# The fetching side


class _Fetch:
    """Progress of one engine's fetch of an update, across connections."""

    def __init__(self, update: WeightUpdate, spans: Sequence[Span], memory: Iterator[memoryview]) -> None:
        self._update, self._spans, self._memory = update, spans, memory
        self._num_done = 0
        self._next = next(memory, memoryview(b""))

    def resume(self, server: socket.socket) -> None:
        """Receive the missing spans; then check that the buffer still holds this version."""
        num_asked = self._num_done
        while self._num_done < len(self._spans):
            ahead = self._spans[num_asked : self._num_done + _AHEAD]
            server.sendall(b"".join(self._request(info.offset + start, size) for info, start, size in ahead))
            num_asked += len(ahead)
            self._read_answer(server)
            _receive(server, self._next, ANSWER_S)
            self._num_done += 1
            self._next = next(self._memory, memoryview(b""))
        server.sendall(self._request(0, 0))
        self._read_answer(server)

    def _request(self, start: int, num_bytes: int) -> bytes:
        return _REQUEST.pack(self._update.version, start, num_bytes)

    def _read_answer(self, server: socket.socket) -> None:
        holds, newest = _ANSWER.unpack(_receive_bytes(server, _ANSWER.size, ANSWER_S))
        if not holds:
            raise WeightsUnreachable(f"its publisher has overwritten it with version {newest}")


def fetch(update: WeightUpdate, place: WeightPlace, spans: Sequence[Span], memory: Iterator[memoryview]) -> None:
    """Receive the spans, in their order, each into the next piece of memory."""
    state = _Fetch(update, spans, memory)
    cause = ""
    for attempt in range(NUM_CONNECTIONS):
        time.sleep(_PAUSE_S * (2**attempt - 1))
        # Reconnect after a broken connection only: not to a server that is silent, refuses, or has a newer version.
        try:
            with _connect(place.location, update.token) as server:
                return state.resume(server)
        except TimeoutError:
            raise WeightsUnreachable(f"{place.location} sent no answer within {ANSWER_S:g} s") from None
        except OSError as error:
            cause = error.strerror or str(error)
    raise WeightsUnreachable(f"{place.location} could not be read in {NUM_CONNECTIONS} connections ({cause})")


def _connect(location: str, token: bytes) -> socket.socket:
    """Connect and authenticate in both directions."""
    host, _, port = location.rpartition(":")
    with translated(TimeoutError, WeightsUnreachable, f"{location} could not be connected to within {CONNECT_S:g} s"):
        server = socket.create_connection((host, int(port)), CONNECT_S)
    try:
        _set_deadline(server, ANSWER_S)
        _authenticate(server, location, token)
    except BaseException:
        server.close()
        raise
    return server


def _authenticate(server: socket.socket, location: str, token: bytes) -> None:
    greeting = _receive_bytes(server, len(_GREETING) + _PROOF_BYTES, ANSWER_S)
    if not greeting.startswith(_GREETING):
        raise WeightsUnreachable(f"the program that listens at {location} serves no weights")
    ours, theirs = secrets.token_bytes(_PROOF_BYTES), greeting[len(_GREETING) :]
    server.sendall(ours + _proof(token, b"engine", theirs + ours))
    answer = _receive_bytes(server, _PROOF_BYTES, ANSWER_S)
    if answer == _REFUSED:
        raise WeightsUnreachable(f"{location} refused this process's token")
    if not hmac.compare_digest(answer, _proof(token, b"trainer", theirs + ours)):
        raise WeightsUnreachable(f"the program that listens at {location} does not know the run's token")
