"""The calling side: a handle looks like the worker's object, and every call on it is a frame to another process.

Invariant that lives here:
 15. Bounded waits: every wait has a deadline; one that expires fails with the name of what was awaited. When a
     worker dies, the calls pending on it fail with its name, in every process.
"""

import asyncio
import hmac
import inspect
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from headway import codec
from headway.errors import DeadlineExceeded, HeadwayError, WorkerDied
from headway.runtime import channel
from headway.runtime.channel import Channel, RemoteError, error_from_plain

T = TypeVar("T")

_END = object()
_EXIT_S = 5.0  # a connection that broke waits this long for the operating system to say how the worker ended
_CONNECT_S = 30.0  # for the other machine's kernel to answer; the worker itself may be busy
_TOKENS: dict[str, bytes] = {}  # a run -> its token
_PEERS: dict[str, "Peer"] = {}  # a worker's address -> this process's one connection to it


def join_run(run: str, token: bytes) -> None:
    """Let this process connect to the workers of `run`."""
    _TOKENS[run] = token


def leave_run(run: str) -> None:
    _TOKENS.pop(run, None)
    for address in [address for address in _PEERS if channel.run_of(address) == run]:
        _PEERS.pop(address).disconnect()


def remote_methods(cls: type) -> dict[str, bool]:
    """The methods a handle of `cls` has, and whether each is a stream: every public method but `open`."""
    methods = {}
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name)
        if inspect.isfunction(attribute) and not name.startswith("_") and name != "open":
            methods[name] = inspect.isasyncgenfunction(attribute)
    return methods


class Inbox:
    """The items of a stream that its consumer has not taken yet, or its error."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._waiter: asyncio.Future[None] | None = None

    def done(self) -> bool:
        return self.error is not None

    def set_exception(self, error: BaseException) -> None:
        self.error, self._trace = error, error.__traceback__
        self._wake()

    def put(self, item: Any) -> None:
        self.items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when there is an item or an error."""
        if not self.items and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def next(self) -> Any:
        """The first item; the error, once there is no item before it."""
        await self.wait()
        if not self.items and self.error is not None:
            # One error may be raised in thousands of waiters, each of which adds to its traceback: reset it.
            raise self.error.with_traceback(self._trace)
        return self.items.popleft()


Waiter = asyncio.Future[Any] | Inbox


class Peer:
    """One worker as this process sees it; connects at the first call."""

    def __init__(self, name: str, address: str, log: str) -> None:
        self.name, self.address, self.log = name, address, log
        self.exit: asyncio.Task[WorkerDied] | None = None  # only in the process that started it
        self.connection: PeerConnection | None = None
        self._connecting: asyncio.Task[PeerConnection] | None = None

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], deadline_s: float) -> Any:
        payload = codec.encode([method, list(args), kwargs])
        connection = self.connection or await self._connect()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = connection.post(payload, answer)
        timer = connection.expire(answer, f"{method} did not answer", deadline_s)
        try:
            return await answer
        finally:
            timer.cancel()
            connection.forget(call)

    async def open(self, spec: tuple[Any, ...], deadline_s: float, silence_s: float) -> None:
        """The first call, which may take long; meanwhile the worker must answer health checks within `silence_s`."""
        opening = asyncio.ensure_future(self.call("open", spec, {}, deadline_s))
        calls: set[asyncio.Future[Any]] = {opening}
        try:
            while not opening.done():
                ping = asyncio.ensure_future(self.call("is_alive", (), {}, silence_s))
                calls = {opening, ping}
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                if ping.done() and isinstance(ping.exception(), DeadlineExceeded) and not opening.done():
                    sentence = f"worker {self.name} answered no health check for {silence_s:g} s while it started"
                    raise DeadlineExceeded(f"{sentence}; see {self.log}")
                await asyncio.wait({opening}, timeout=silence_s / 4)
            await opening
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def stream(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], deadline_s: float
    ) -> AsyncGenerator[Any, None]:
        payload = codec.encode([method, list(args), kwargs])
        connection = self.connection or await self._connect()
        inbox = Inbox()
        call = connection.post(payload, inbox)
        try:
            while True:
                if not inbox.items:
                    timer = connection.expire(inbox, f"{method} sent nothing", deadline_s)
                    try:
                        await inbox.wait()
                    finally:
                        timer.cancel()
                item = await inbox.next()
                if item is _END:
                    return
                yield item
        finally:
            connection.forget(call)

    async def _connect(self) -> "PeerConnection":
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open_connection())
            # Every waiter may have been cancelled by the time it fails.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._connecting)  # others may wait for the same connection

    async def _open_connection(self) -> "PeerConnection":
        run = channel.run_of(self.address)
        try:
            if run not in _TOKENS and self.exit is None:
                raise HeadwayError(
                    f"worker {self.name} is of run {run}, whose token this process lacks; join the run first"
                )
            if run not in _TOKENS:
                raise await self.ended()
            async with asyncio.timeout(_CONNECT_S):
                return await channel.connect(lambda: PeerConnection(self), self.address)
        except OSError as error:  # TimeoutError is one
            raise await self.ended() from error
        finally:
            self._connecting = None

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.transport.abort()

    async def ended(self) -> WorkerDied:
        """Why there is no connection; the process that started the worker also says how it ended."""
        if self.exit is not None:
            await asyncio.wait({self.exit}, timeout=_EXIT_S)
            if self.exit.done() and not self.exit.cancelled():
                return WorkerDied(str(self.exit.result()), self.name)
        return WorkerDied(f"worker {self.name} ended while it was still needed; see {self.log}", self.name)


class PeerConnection(Channel):
    """The calls of this process to one worker, identified by number."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer
        self._token = _TOKENS[channel.run_of(peer.address)]
        self._nonce = secrets.token_bytes(channel.NONCE_BYTES)
        self._pending: dict[int, Waiter] = {}
        self._num_calls = 0
        self._failing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(channel.HELLO, 0, self._nonce)
        self._peer.connection = self

    def prove(self, kind: int, payload: bytes) -> bool:
        """This side proves its token only after the other side has proved its own."""
        nonces, theirs = self._nonce + payload[: channel.NONCE_BYTES], payload[channel.NONCE_BYTES :]
        expected = channel.proof(self._token, "worker", self._peer.address, nonces)
        if kind != channel.CHALLENGE or not hmac.compare_digest(theirs, expected):
            return False
        self.send(channel.PROOF, 0, channel.proof(self._token, "client", self._peer.address, nonces))
        self.verified()
        return True

    def post(self, payload: bytes, waiter: Waiter) -> int:
        """Send a call; `waiter` receives its answer, its items or an error."""
        self._num_calls += 1
        self.send(channel.CALL, self._num_calls, payload)
        self._pending[self._num_calls] = waiter
        if self._failing is not None and self._failing.done():  # the connection was lost before this call
            self._failing = self._loop.create_task(self._fail_pending())
        return self._num_calls

    def forget(self, call: int) -> None:
        """The caller no longer waits: cancel the call at the worker if it has not been answered."""
        if self._pending.pop(call, None) is not None:
            self.send(channel.CANCEL, call)

    def expire(self, waiter: Waiter, what: str, deadline_s: float) -> asyncio.TimerHandle:
        return self._loop.call_later(deadline_s, self._expire, waiter, what, deadline_s)

    def _expire(self, waiter: Waiter, what: str, deadline_s: float) -> None:
        if not waiter.done():
            sentence = f"{self._peer.name}.{what} within {deadline_s:g} s; see {self._peer.log}"
            waiter.set_exception(DeadlineExceeded(sentence))

    def frame_received(self, kind: int, call: int, payload: memoryview) -> None:
        waiter = self._pending.get(call) if kind == channel.ITEM else self._pending.pop(call, None)
        if waiter is None or waiter.done():
            return
        try:
            value: Any = codec.decode(payload) if kind != channel.END else _END
        except Exception as error:
            sentence = f"worker {self._peer.name} sent an answer that this process cannot decode"
            waiter.set_exception(RemoteError(f"{sentence} ({type(error).__name__}: {error})"))
            return
        if kind == channel.ERROR:
            waiter.set_exception(error_from_plain(value))
        elif isinstance(waiter, Inbox):
            waiter.put(value)
        else:
            waiter.set_result(value)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._peer.connection is self:
            self._peer.connection = None
        self._failing = self._loop.create_task(self._fail_pending())

    async def _fail_pending(self) -> None:
        error = await self._peer.ended()
        for waiter in self._pending.values():
            if not waiter.done():
                waiter.set_exception(WorkerDied(str(error), error.worker))
        self._pending.clear()


@codec.portable
class Handle:
    """Behaves like the object of a worker: its public methods are awaited, its async generators iterated.

    Synchronous methods, too, are awaited: the worker runs them on its compute thread, one at a time.

    It travels to other workers with the names of its methods, not with its class, so that its receiver need
    not import what the worker imports; the token does not travel.
    """

    def __init__(self, peer: Peer, methods: dict[str, bool], deadline_s: float) -> None:
        self._peer, self._methods, self._deadline_s = peer, methods, deadline_s

    def __repr__(self) -> str:
        return f"<handle of worker {self._peer.name}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._methods:
            raise AttributeError(f"worker {self._peer.name} has no method {name!r} that can be called from elsewhere")
        remote = self._peer.stream if self._methods[name] else self._peer.call

        def method(*args: Any, **kwargs: Any) -> Any:
            return remote(name, args, kwargs, self._deadline_s)

        setattr(self, name, method)
        return method

    def to_plain(self) -> list[Any]:
        return [self._peer.name, self._peer.address, self._peer.log, self._methods, self._deadline_s]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Self:
        name, address, log, methods, deadline_s = plain
        return cls(find_peer(name, address, log), methods, deadline_s)


def find_peer(name: str, address: str, log: str) -> Peer:
    if address not in _PEERS:
        _PEERS[address] = Peer(name, address, log)
    return _PEERS[address]


def with_deadline(handle: T, seconds: float) -> T:
    """The same handle with another deadline for each call (for each item of a stream); inline, the object itself."""
    if not isinstance(handle, Handle):
        return handle
    return cast(T, Handle(handle._peer, handle._methods, seconds))
