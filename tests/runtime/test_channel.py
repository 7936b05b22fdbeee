"""Who may speak to a worker: strangers without the run's token are turned away, and learn nothing.

Invariant 15: bounded waits, neither for a stranger who says nothing.
"""

import asyncio
import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from probes import Probe
from runtimes import in_processes, with_probe

from headway import codec
from headway.errors import HeadwayError, WorkerDied
from headway.runtime import channel, handle, worker
from headway.runtime.protocol import Runtime


def reach(address: str) -> socket.socket:
    """A bare connection to a worker, as anybody on its machine or network could make it."""
    if channel.is_unix(address):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(address)
    else:
        host, port = address.split("/")[0].split(":")
        stranger = socket.create_connection((host, int(port)))
    stranger.settimeout(5)
    return stranger


def frame(kind: int, payload: bytes, call: int = 0) -> bytes:
    return channel._HEADER.pack(len(payload), call, kind) + payload


def hear(connection: socket.socket, num_bytes: int) -> bytes:
    """That number of bytes, or fewer where the other end hangs up."""
    heard = b""
    with suppress(ConnectionResetError, BrokenPipeError):
        while len(heard) < num_bytes and (more := connection.recv(num_bytes - len(heard))):
            heard += more
    return heard


def is_turned_away(address: str, *frames: bytes) -> bool:
    """Whether the worker hangs up on these frames, its own challenge apart, without a word."""
    with reach(address) as stranger:
        for sent in frames[:-1]:
            stranger.sendall(sent)
            assert len(hear(stranger, channel._HEADER.size + 64)) == channel._HEADER.size + 64
        stranger.sendall(frames[-1])
        return hear(stranger, 1) == b""


@in_processes
def test_a_stranger_without_the_token_is_turned_away_unread(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        address = probe._peer.address
        if channel.is_unix(address):
            assert stat.S_IMODE(os.stat(os.path.dirname(address)).st_mode) == 0o700
        hello = frame(channel.HELLO, bytes(32))
        call = frame(channel.CALL, codec.encode(["echo", [1], {}]), call=1)
        for frames in (
            [call],
            [frame(channel.PROOF, bytes(32))],
            [frame(channel.HELLO, bytes(31))],
            [channel._HEADER.pack(65, 0, channel.HELLO)],
            [hello, call],
            [hello, hello],
            [hello, frame(channel.PROOF, b"x" * 32)],
            [hello, frame(channel.PROOF, b"")],
        ):
            assert await asyncio.to_thread(is_turned_away, address, *frames), frames
        assert await probe.echo(1) == 1

    with_probe(tmp_path, test, kind)


@in_processes
def test_what_a_worker_says_to_a_stranger_lets_nobody_in(tmp_path: Path, kind: str) -> None:
    """Neither its own proof sent back to it nor another connection's proof sent again is one."""

    def proofs(address: str, token: bytes) -> list[bool]:
        nonce = os.urandom(32)
        outcomes = []
        for stolen in (None, channel.proof(token, "client", address, nonce + bytes(32))):
            with reach(address) as stranger:
                stranger.sendall(frame(channel.HELLO, nonce))
                challenge = hear(stranger, channel._HEADER.size + 64)[channel._HEADER.size :]
                assert challenge[32:] == channel.proof(token, "worker", address, nonce + challenge[:32])
                stranger.sendall(frame(channel.PROOF, stolen or challenge[32:]))
                outcomes.append(hear(stranger, 1) == b"")
        return outcomes

    async def test(runtime: Runtime, probe: Probe) -> None:
        assert await asyncio.to_thread(proofs, probe._peer.address, runtime._token) == [True, True]

    with_probe(tmp_path, test, kind)


def test_a_stranger_that_says_nothing_is_turned_away_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PROOF_S", 0.05)

    async def body() -> None:
        service = worker.Service("probe", "127.0.0.1:1/run/0", bytes(32))
        server = await asyncio.get_running_loop().create_server(lambda: worker.Connection(service), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert await asyncio.wait_for(_until_reset(reader), 5) == b""
            writer.close()

    async def _until_reset(reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""

    asyncio.run(body())


def test_half_open_connections_are_limited_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_MAX_UNVERIFIED", 3)

    async def body() -> None:
        service = worker.Service("probe", "127.0.0.1:1/run/0", bytes(32))
        server = await asyncio.get_running_loop().create_server(lambda: worker.Connection(service), "127.0.0.1", 0)
        async with server:
            pairs = [await asyncio.open_connection(*server.sockets[0].getsockname()) for _ in range(5)]
            for reader, _ in pairs[:2]:
                with suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), 5) == b""
            assert len(service.unverified) == 3
            assert sum(len(connection._buffer) for connection in service.unverified) < 4096
            for _, writer in pairs:
                writer.close()

    asyncio.run(body())


def test_a_run_without_a_token_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async def body() -> None:
        peer = handle.Peer("engine", f"{tmp_path}/headway-unknown/1", "engine.log")
        with pytest.raises(HeadwayError, match="of run headway-unknown, whose token this process lacks"):
            await peer.call("echo", (1,), {}, 5.0)

    asyncio.run(body())


class Impostor(asyncio.Protocol):
    """Took a dead worker's port; knows everything but the token, and writes down what it receives."""

    def __init__(self, heard: bytearray) -> None:
        self.heard = heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data
        self.transport.write(frame(channel.CHALLENGE, os.urandom(64)))


def test_a_client_tells_an_impostor_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        heard = bytearray()
        server = await asyncio.get_running_loop().create_server(lambda: Impostor(heard), "127.0.0.1", 0)
        handle.join_run("run", secrets.token_bytes(32))
        async with server:
            port = server.sockets[0].getsockname()[1]
            probe = handle.find_peer("probe", f"127.0.0.1:{port}/run/7", "probe.log")
            with pytest.raises(WorkerDied, match="worker probe ended while it was still needed"):
                await asyncio.wait_for(probe.call("echo", ("secret",), {}, 5.0), 10)
        handle.leave_run("run")
        assert len(heard) == channel._HEADER.size + channel.NONCE_BYTES, "a nonce and nothing else"

    asyncio.run(body())
