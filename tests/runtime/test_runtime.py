"""Starting classes in processes and calling them. Invariant 15: bounded waits; what fails says who failed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from probes import Broken, BrokenOpen, Caller, Probe, Stubborn
from runtimes import everywhere, in_processes, running, wait_gone, with_probe

from headway.errors import ConfigError, DeadlineExceeded, HeadwayError, RequestRefused, WorkerDied
from headway.runtime import channel, handle, local, ray
from headway.runtime.channel import RemoteError
from headway.runtime.compute import offload
from headway.runtime.handle import with_deadline
from headway.runtime.inline import InlineRuntime
from headway.runtime.protocol import Runtime


@everywhere
def test_all_runtimes_call_stream_and_carry_errors_alike(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        assert await probe.is_open()
        assert await probe.echo({"a": [1, None, 2.5]}) == {"a": [1, None, 2.5]}
        assert await probe.echo("x", twice=True) in (["x", "x"], ("x", "x"))
        assert [number async for number in probe.count(5)] == [0, 1, 2, 3, 4]
        assert [number async for number in probe.count(0)] == []
        with pytest.raises(RequestRefused, match=r"^the request is too long; shorten it$"):
            await probe.refuse()
        assert await with_deadline(probe, 5.0).echo(7) == 7
        assert await cast(Any, probe).repeat("x", twice=True) in (["x", "x"], ("x", "x"))
        with pytest.raises(RequestRefused, match=r"^the request is too long; shorten it$"):
            await cast(Any, probe).refuse_synchronously()
        caller = await runtime.start("caller", Caller, probe, (probe,))
        assert await caller.relay("echo", 3) == 3
        assert [number async for number in caller.relay_count(3)] == [0, 1, 2]
        assert await caller.relay_to(probe, "late") == "late"
        with pytest.raises(AttributeError):
            await probe.does_not_exist()

    with_probe(tmp_path, test, kind)


def test_an_inline_worker_without_synchronous_methods_is_the_object_and_all_close_in_reverse(tmp_path: Path) -> None:
    async def body() -> None:
        diary = tmp_path / "diary"
        runtime = InlineRuntime()
        first = await runtime.start("first", Probe, "first", str(diary))
        await runtime.start("second", Probe, "second", str(diary))
        assert first.name == "first" and with_deadline(first, 1.0) is first
        caller = await runtime.start("caller", Caller, first)
        assert type(caller) is Caller
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
        with pytest.raises(RemoteError, match="object cannot be sent"):
            await probe.give_unknown()
        with pytest.raises(TypeError, match="object cannot be sent"):
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
        sentence = "worker probe ended (signal 9) while it was still needed; last output: 'about to break'; see "
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
        with pytest.raises(WorkerDied, match=r"worker probe ended \(exit code 7\).*no log output"):
            await probe.leave(7)
        assert "exit code 7" in str(await asyncio.wait_for(runtime.failure(), 5))

    with_probe(tmp_path, test, kind)


def test_a_worker_that_dies_while_it_starts_is_its_starters_error_and_no_failure(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path) as runtime:
            with pytest.raises(WorkerDied, match="worker exit ended"):
                await runtime.start("exit", Broken, "exit")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(runtime.failure(), 0.1)

    asyncio.run(body())


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
def test_synchronous_methods_run_one_at_a_time_on_the_compute_thread(tmp_path: Path, kind: str) -> None:
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
def test_every_unexpected_death_is_reported_once_in_turn_with_the_name(tmp_path: Path, kind: str) -> None:
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
from headway.runtime.local import LocalRuntime

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
    path = os.pathsep.join(sys.path)
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
