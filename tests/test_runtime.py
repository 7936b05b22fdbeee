"""Starting classes in processes and calling them. Invariant 15: nothing hangs; what fails says who failed."""

import asyncio
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import ray_cluster
from probes import Broken, BrokenOpen, Caller, Probe, Stubborn

from headway import codec
from headway.errors import ConfigError, DeadlineExceeded, HeadwayError, RequestRefused, WorkerDied
from headway.runtime import (
    InlineRuntime,
    LocalRuntime,
    RayRuntime,
    RemoteError,
    Runtime,
    channel,
    handle,
    local,
    offload,
    ray,
    with_deadline,
    worker,
)

PROCESSES = ["local", "tcp", pytest.param("ray", marks=pytest.mark.slow)]
"""Over Unix-domain sockets, as on one machine; over TCP, as between nodes; on the nodes of a Ray cluster."""
everywhere = pytest.mark.parametrize("kind", ["inline", *PROCESSES])
in_processes = pytest.mark.parametrize("kind", PROCESSES)


class TcpRuntime(LocalRuntime):
    """Local processes that listen as workers on several machines do."""

    def _listen(self) -> tuple[socket.socket, str]:
        self._num_started += 1
        return channel.listen_on_host("127.0.0.1", self._run, self._num_started)


def make_runtime(kind: str, log_dir: Path, deadline_s: float) -> Runtime:
    if kind == "inline":
        return InlineRuntime()
    if kind == "ray":
        return RayRuntime(log_dir, deadline_s, ray_cluster.cluster().address, ray_cluster.PLACES)
    return {"local": LocalRuntime, "tcp": TcpRuntime}[kind](log_dir, deadline_s)


@asynccontextmanager
async def running(tmp_path: Path, kind: str = "local", deadline_s: float = 15.0) -> AsyncIterator[Runtime]:
    runtime = make_runtime(kind, tmp_path / "logs", deadline_s)
    try:
        await runtime.num_machines()  # starts Ray, where it is Ray
        yield runtime
    finally:
        await runtime.close()


def with_probe(
    tmp_path: Path, test: Callable[[Runtime, Probe], Awaitable[None]], kind: str = "local", deadline_s: float = 15.0
) -> None:
    async def body() -> None:
        async with running(tmp_path, kind, deadline_s) as runtime:
            await test(runtime, await runtime.start("probe", Probe))

    asyncio.run(body())


def wait_gone(pidfds: list[int], timeout_s: float = 10.0) -> None:
    """Return when every process has ended: a pidfd becomes readable at that moment."""
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], timeout_s)[0], "a process was left behind"
        os.close(pidfd)


@everywhere
def test_all_runtimes_call_stream_and_carry_errors_alike(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        assert await probe.is_open()
        assert await probe.echo({"a": [1, None, 2.5]}) == {"a": [1, None, 2.5]}
        assert await probe.echo("x", twice=True) == ("x", "x")
        assert [number async for number in probe.count(5)] == [0, 1, 2, 3, 4]
        assert [number async for number in probe.count(0)] == []
        with pytest.raises(RequestRefused, match=r"^the request is too long; shorten it$"):
            await probe.refuse()
        assert await with_deadline(probe, 5.0).echo(7) == 7
        caller = await runtime.start("caller", Caller, probe, (probe,))
        assert await caller.relay("echo", 3) == 3
        assert [number async for number in caller.relay_count(3)] == [0, 1, 2]
        assert await caller.relay_to(probe, "late") == "late"
        with pytest.raises(AttributeError):
            await probe.does_not_exist()

    with_probe(tmp_path, test, kind)


def test_an_inline_worker_is_the_object_itself_and_closes_in_reverse_order(tmp_path: Path) -> None:
    async def body() -> None:
        diary = tmp_path / "diary"
        runtime = InlineRuntime()
        first = await runtime.start("first", Probe, "first", str(diary))
        await runtime.start("second", Probe, "second", str(diary))
        assert type(first) is Probe and with_deadline(first, 1.0) is first
        with pytest.raises(KeyError):
            await runtime.start("broken", Broken, "bug")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.failure(), 0.01)
        await runtime.close()
        assert diary.read_text().split() == ["second", "first"]

    asyncio.run(body())


def test_inline_offload_runs_in_the_calling_thread(tmp_path: Path) -> None:
    assert asyncio.run(offload(threading.get_ident)) == threading.get_ident()


@in_processes
def test_a_thousand_calls_are_in_flight_together(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        assert await asyncio.gather(*[probe.meet(1000) for _ in range(1000)]) == [1000] * 1000

    with_probe(tmp_path, test, kind)


@in_processes
def test_large_and_small_messages_share_a_connection(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        sizes = [0, 1, 65_000, 262_131, 262_144, 3_000_000, 7]
        arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
        for sent, received in zip(arrays, await asyncio.gather(*map(probe.echo, arrays)), strict=True):
            np.testing.assert_array_equal(sent, received)

    with_probe(tmp_path, test, kind)


class Recorder(channel.Channel):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[int, int, bytes]] = []
        self.verified()

    def prove(self, kind: int, payload: bytes) -> bool:
        raise AssertionError("the other end is verified")

    def frame_received(self, kind: int, call: int, payload: memoryview) -> None:
        self.frames.append((kind, call, bytes(payload)))


@pytest.mark.parametrize("piece", [1, 7, 13, 4096, 262_144])
def test_frames_are_found_however_the_socket_cuts_them(piece: int) -> None:
    sizes = [0, 1, 5000, 262_131, 262_132, 300_000, 3, 0, 40] if piece > 13 else [0, 1, 5000, 13, 0]
    sent = [(channel.ITEM, call, os.urandom(size)) for call, size in enumerate(sizes)]
    wire = b"".join(channel._HEADER.pack(len(payload), call, kind) + payload for kind, call, payload in sent)

    async def receive() -> list[tuple[int, int, bytes]]:
        ours, theirs = socket.socketpair()
        with theirs:
            transport, recorder = await asyncio.get_running_loop().create_connection(Recorder, sock=ours)
            rest = memoryview(wire)
            while rest:
                buffer = recorder.get_buffer(piece)
                num_bytes = min(piece, len(buffer), len(rest))
                buffer[:num_bytes], rest = rest[:num_bytes], rest[num_bytes:]
                recorder.buffer_updated(num_bytes)
            transport.close()
            return recorder.frames

    assert asyncio.run(receive()) == sent


def test_a_message_over_the_limit_is_refused_and_the_connection_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 1000)
        with pytest.raises(HeadwayError, match="over the limit of 1000"):
            await probe.echo("x" * 2000)
        assert await probe.echo("x") == "x"

    with_probe(tmp_path, test)


@in_processes
def test_leaving_a_stream_early_cancels_its_remote_side(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        async with aclosing(probe.endless()) as numbers:
            async for _ in numbers:
                break
        await probe.wait_cancelled()

    with_probe(tmp_path, test, kind)


@in_processes
def test_cancelling_a_call_cancels_its_remote_side(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        call = asyncio.create_task(probe.hang())
        await probe.wait_arrived()
        call.cancel()
        await probe.wait_cancelled()

    with_probe(tmp_path, test, kind)


@in_processes
def test_a_caller_that_dies_no_longer_burdens_the_worker_it_called(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        caller = await runtime.start("caller", Caller, probe)
        call = asyncio.create_task(caller.relay("hang"))
        await probe.wait_arrived()
        os.kill(await caller.pid(), signal.SIGKILL)
        await probe.wait_cancelled()
        with pytest.raises(WorkerDied, match="worker caller ended"):
            await call

    with_probe(tmp_path, test, kind)


@in_processes
def test_a_bug_crosses_two_processes_with_its_origin_and_its_trace(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        caller = await runtime.start("caller", Caller, probe)
        with pytest.raises(RemoteError, match=r"probe\.break_down failed") as caught:
            await caller.relay("break_down")
        assert str(caught.value) == "probe.break_down failed with ValueError: no such thing"
        assert any("in break_down" in note for note in caught.value.__notes__)
        with pytest.raises(RequestRefused, match=r"^the request is too long"):
            await caller.relay("refuse")
        with pytest.raises(RemoteError, match="object cannot travel"):
            await probe.give_unknown()
        with pytest.raises(TypeError, match="object cannot travel"):
            await probe.echo(object())
        assert await probe.echo(1) == 1

    with_probe(tmp_path, test, kind)


@in_processes
def test_a_worker_that_cannot_start_says_why(tmp_path: Path, kind: str) -> None:
    async def body() -> None:
        async with running(tmp_path, kind) as runtime:
            outcomes = await asyncio.gather(
                runtime.start("config", Broken, "config"),
                runtime.start("bug", Broken, "bug"),
                runtime.start("exit", Broken, "exit"),
                runtime.start("port", BrokenOpen),
                return_exceptions=True,
            )
        config, bug, left, port = outcomes
        assert (type(config), str(config)) == (ConfigError, "model.path = 'x' is not a directory; name one")
        assert (type(bug), str(bug)) == (RemoteError, "bug.open failed with KeyError: 'weights'")
        assert isinstance(left, WorkerDied) and "worker exit ended (exit code 3)" in str(left)
        assert (type(port), str(port)) == (ConfigError, "port 80 is in use; choose another")

    asyncio.run(body())


def test_a_class_no_other_process_can_import_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    class Hidden:
        pass

    async def body() -> None:
        async with running(tmp_path) as runtime:
            with pytest.raises(TypeError, match="Hidden must be defined at the top of a module"):
                await runtime.start("hidden", Hidden)

    asyncio.run(body())


@in_processes
def test_a_killed_worker_fails_every_pending_call_with_its_name(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        caller, late = await asyncio.gather(
            runtime.start("caller", Caller, probe), runtime.start("late", Caller, probe)
        )
        stream = aiter(probe.endless())
        await anext(stream)
        heir = os.pidfd_open(await probe.breed())
        await probe.say("about to break\n\n")
        pending = [probe.hang(), probe.hang(), anext(stream)]
        calls = asyncio.gather(*pending, caller.relay("hang"), return_exceptions=True)
        await probe.wait_arrived()
        os.kill(await probe.pid(), signal.SIGKILL)
        *own, other = await asyncio.wait_for(calls, 5)
        log = tmp_path / "logs" / "probe.log"
        sentence = "worker probe ended (signal 9) while it was still needed; last words: 'about to break'; see "
        assert [(type(error), str(error)) for error in own] == [(WorkerDied, f"{sentence}{log}")] * 3
        assert isinstance(other, WorkerDied) and str(other).startswith("worker probe ended")
        assert str(await asyncio.wait_for(runtime.failure(), 5)) == f"{sentence}{log}"
        for call in (probe.echo(1), caller.relay("echo", 1), late.relay("echo", 1)):
            with pytest.raises(WorkerDied, match="worker probe ended"):
                await call
        wait_gone([heir])

    with_probe(tmp_path, test, kind)


@in_processes
def test_a_worker_that_leaves_by_itself_is_a_failure_with_its_exit_code(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        with pytest.raises(WorkerDied, match=r"worker probe ended \(exit code 7\).*it left no last words"):
            await probe.leave(7)
        assert "exit code 7" in str(await asyncio.wait_for(runtime.failure(), 5))

    with_probe(tmp_path, test, kind)


def test_each_death_is_told_once_and_by_name(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path) as runtime:
            probes = {name: await runtime.start(name, Probe) for name in ("one", "two", "three")}
            for name in ("two", "one"):
                os.kill(await probes[name].pid(), signal.SIGKILL)
                death = await asyncio.wait_for(runtime.failure(), 5)
                assert death.worker == name and f"worker {name} ended (signal 9)" in str(death)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(runtime.failure(), 0.1)
            assert await probes["three"].echo(1) == 1

    asyncio.run(body())


def test_a_worker_that_dies_while_it_starts_is_its_starters_error_and_no_failure(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path) as runtime:
            with pytest.raises(WorkerDied, match="worker exit ended"):
                await runtime.start("exit", Broken, "exit")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(runtime.failure(), 0.1)

    asyncio.run(body())


@everywhere
def test_a_name_is_started_again_after_its_stop(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        await runtime.start("other", Probe, "other", str(tmp_path / "diary"))
        await runtime.stop("other")
        assert (tmp_path / "diary").read_text() == "other\n", "a stop closes it"
        again = await runtime.start("other", Probe)
        assert await again.echo(2) == 2 and await probe.echo(1) == 1
        await runtime.stop("nobody")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.failure(), 0.1)

    with_probe(tmp_path, test, kind)


def test_a_name_is_started_again_after_its_death_and_old_handles_stay_dead(tmp_path: Path) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        os.kill(await probe.pid(), signal.SIGKILL)
        assert (await asyncio.wait_for(runtime.failure(), 5)).worker == "probe"
        await runtime.stop("probe")
        again = await runtime.start("probe", Probe)
        assert await again.echo(1) == 1
        with pytest.raises(WorkerDied, match="worker probe ended"):
            await probe.echo(1)
        await runtime.stop("probe")
        with pytest.raises(WorkerDied, match="worker probe was closed"):
            await again.echo(1)

    with_probe(tmp_path, test)


def test_a_worker_that_hangs_is_killed_by_its_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "CLOSE_S", 0.3)

    async def test(runtime: Runtime, probe: Probe) -> None:
        pid = await probe.pid()
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGSTOP)
        await runtime.stop("probe")
        wait_gone([pidfd])

    with_probe(tmp_path, test)


@in_processes
def test_a_hung_method_meets_its_deadline_and_the_next_call_works(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        hasty = with_deadline(probe, 0.1)
        with pytest.raises(DeadlineExceeded, match=r"^probe\.hang did not answer within 0\.1 s"):
            await hasty.hang()
        await probe.wait_cancelled()
        stream = aiter(hasty.endless())
        assert await anext(stream) == 0
        with pytest.raises(DeadlineExceeded, match=r"^probe\.endless sent nothing within 0\.1 s"):
            await anext(stream)
        assert await probe.echo(1) == 1

    with_probe(tmp_path, test, kind)


@in_processes
def test_offload_keeps_a_workers_event_loop_responsive_on_one_compute_thread(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        blocked = [asyncio.create_task(probe.pass_gate()) for _ in range(3)]
        assert await probe.open_gate() == "MainThread"
        assert set(await asyncio.gather(*blocked)) == {"compute_0"}

    with_probe(tmp_path, test, kind)


@in_processes
def test_a_worker_ignores_ctrl_c_and_gets_its_threads(tmp_path: Path, kind: str) -> None:
    async def body() -> None:
        async with running(tmp_path, kind) as runtime:
            probe = await runtime.start("probe", Probe, threads=3)
            os.kill(await probe.pid(), signal.SIGINT)
            assert await probe.setting("OMP_NUM_THREADS") == await probe.setting("MKL_NUM_THREADS") == "3"
            assert os.getsid(await probe.pid()) == await probe.pid()

    asyncio.run(body())


@in_processes
def test_a_worker_imports_what_its_parent_could(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_module.py").write_text("class Users:\n    async def answer(self):\n        return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import users_module

    async def body() -> None:
        async with running(tmp_path, kind) as runtime:
            assert await (await runtime.start("users", users_module.Users)).answer() == 42

    asyncio.run(body())


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
    """So many bytes, or fewer where the other end hangs up."""
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


class Impostor(asyncio.Protocol):
    """Took a dead worker's port; knows everything but the token, and writes down what it is told."""

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


@in_processes
def test_a_worker_is_known_by_its_whole_address(tmp_path: Path, kind: str) -> None:
    """A handle of a worker that ended does not become one of the worker that got its port."""

    async def test(runtime: Runtime, probe: Probe) -> None:
        address = probe._peer.address
        old = f"{address[: -len(address.rsplit('/', 1)[1])]}999"
        stale = handle.Peer("probe", old, "probe.log")
        if kind == "local":
            os.symlink(address, old)
        with pytest.raises(WorkerDied):
            await stale.call("echo", (1,), {}, 5.0)
        assert await probe.echo(1) == 1

    with_probe(tmp_path, test, kind)


@in_processes
def test_close_runs_in_reverse_order_and_leaves_no_process_and_no_socket(tmp_path: Path, kind: str) -> None:
    async def body() -> tuple[str, list[int]]:
        async with running(tmp_path, kind) as runtime:
            names = ["first", "second", "third"]
            probes = [await runtime.start(name, Probe, name, str(tmp_path / "diary")) for name in names]
            pids = [await probe.pid() for probe in probes] + [await probes[0].breed()]
            pidfds = [os.pidfd_open(pid) for pid in pids]
            pending = asyncio.create_task(probes[0].hang())
            await probes[0].wait_arrived()
            await runtime.close()
            with pytest.raises(WorkerDied, match=r"^worker first was closed$"):
                await pending
            with pytest.raises(WorkerDied, match=r"^worker second was closed$"):
                await probes[1].echo(1)
            return os.path.dirname(probes[0]._peer.address), pidfds

    directory, pidfds = asyncio.run(body())
    wait_gone(pidfds)
    assert (tmp_path / "diary").read_text().split() == ["third", "second", "first"]
    assert not os.path.exists(directory)


@in_processes
def test_a_worker_that_does_not_close_is_killed(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "CLOSE_S", 0.3)
    monkeypatch.setattr(ray, "CLOSE_S", 0.3)

    async def body() -> int:
        async with running(tmp_path, kind) as runtime:
            stubborn = await runtime.start("stubborn", Stubborn)
            return os.pidfd_open(await stubborn.pid())

    wait_gone([asyncio.run(body())])


@everywhere
def test_a_worker_can_be_stopped_and_its_name_started_again(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        other = await runtime.start("other", Probe, "other", str(tmp_path / "diary"))
        await runtime.stop("other")
        assert (tmp_path / "diary").read_text() == "other\n"
        if kind != "inline":
            with pytest.raises(WorkerDied, match=r"^worker other was closed$"):
                await other.echo(1)
        await runtime.stop("other")
        await runtime.stop("nobody")
        again = await runtime.start("other", Probe, "again", str(tmp_path / "diary"))
        assert await again.echo(2) == await probe.echo(2) == 2
        await runtime.close()
        assert (tmp_path / "diary").read_text().split() == ["other", "again"]

    with_probe(tmp_path, test, kind)


@in_processes
def test_a_worker_that_does_not_even_run_can_be_stopped(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "CLOSE_S", 0.3)
    monkeypatch.setattr(ray, "CLOSE_S", 0.3)

    async def test(runtime: Runtime, probe: Probe) -> None:
        pid = await probe.pid()
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.wait_for(runtime.stop("probe"), 10)
        wait_gone([pidfd])

    with_probe(tmp_path, test, kind)


@in_processes
def test_every_unexpected_death_is_told_once_in_turn_with_the_name(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        names = ["first", "second"]
        probes = [await runtime.start(name, Probe) for name in names]
        for one, name in zip(probes, names, strict=True):
            os.kill(await one.pid(), signal.SIGKILL)
            death = await asyncio.wait_for(runtime.failure(), 10)
            assert death.worker == name and f"worker {name} ended (signal 9)" in str(death)
        again = await runtime.start("first", Probe)
        assert await again.echo(1) == 1
        with pytest.raises(WorkerDied, match="worker first ended"):
            await probes[0].echo(1)
        await runtime.stop("first")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.failure(), 0.2)
        os.kill(await probe.pid(), signal.SIGKILL)
        assert (await asyncio.wait_for(runtime.failure(), 10)).worker == "probe"

    with_probe(tmp_path, test, kind)


PARENT = """
import asyncio, pathlib, sys
from probes import Probe
from headway.runtime import LocalRuntime

async def main():
    runtime = LocalRuntime(pathlib.Path(sys.argv[1]), 15.0)
    probes = [await runtime.start(name, Probe) for name in ("one", "two")]
    blocked = asyncio.create_task(probes[0].pass_gate())
    print(*[await probe.pid() for probe in probes], await probes[1].breed(), flush=True)
    await blocked

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_parent_leaves_no_child_behind(tmp_path: Path, stopped: bool) -> None:
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pidfds) == 3
    wait_gone(pidfds)
