"""Workers on the nodes of a Ray cluster. What all runtimes promise alike is in test_runtime.py, for this one too.

Invariant 15: bounded waits, also when a node is lost or the controller is. Invariant 4 across machines: at η = 0 a run
on Ray is the run of the local runtime, bit for bit.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import ray_cluster
from probes import Caller, Probe
from system import HeadwayProcess, check_finished, check_record, headway, make_config, write_config

from headway import codec, launch
from headway.config import Config, load
from headway.control import workers
from headway.errors import ConfigError, DeadlineExceeded, WorkerDied
from headway.plan import describe
from headway.record.events import Event
from headway.record.run import fold
from headway.record.shards import Record
from headway.runtime import local, ray
from headway.runtime.ray import RayRuntime

pytestmark = pytest.mark.timeout(900)
slow = pytest.mark.slow


@asynccontextmanager
async def on_cluster(tmp_path: Path, deadline_s: float = 30.0, **needs: dict[str, float]) -> AsyncIterator[RayRuntime]:
    address = ray_cluster.cluster().address
    runtime = RayRuntime(tmp_path / "logs", deadline_s, address, {**ray_cluster.PLACES, **needs})
    try:
        await runtime.num_machines()
        yield runtime
    finally:
        await runtime.close()


def host_of(worker: Probe | Caller) -> str:
    return str(worker._peer.address).split(":")[0]


def listening(process: psutil.Process) -> list[str]:
    return [part.laddr.ip.removeprefix("::ffff:") for part in process.net_connections() if part.status == "LISTEN"]


def wait_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not left, f"left behind: {[process.cmdline() for process in left]}"


# Without Ray


def test_without_ray_one_sentence_says_what_to_install(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = make_config(tmp_path, tiny_model, run={"runtime": "ray"})
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed; pip install 'headway-rl\[ray\]'$"):
        launch.prepare(config)
    with pytest.raises(ConfigError, match="not installed"):
        RayRuntime(tmp_path / "logs", 1.0)


def test_a_worker_that_computes_on_a_gpu_reserves_one_unless_told_otherwise(tmp_path: Path, tiny_model: str) -> None:
    run, trainer = {"runtime": "ray"}, {"device": "cuda", "ranks": 2}
    sections = {"run": run, "trainer": trainer, "engine": {"device": "cuda", "count": 2}}
    told = {"engine": {"GPU": 0.5, "CPU": 2}, "rollout": {"memory": 1e9}}
    config = make_config(tmp_path, tiny_model, ray=told, **sections)
    reserved = {"engine": {"GPU": 0.5, "CPU": 2}, "trainer": {"GPU": 1}, "rollout": {"memory": 1e9}, "reward": {}}
    assert workers.reservations(config) == reserved
    assert workers._kv_share(config, "cuda") == pytest.approx(0.4), "its part of the GPU, whatever has the rest"
    assert workers.reservations(make_config(tmp_path, tiny_model))["engine"] == {}


def test_resuming_on_ray_what_was_begun_elsewhere_is_the_same_run(tmp_path: Path, tiny_model: str) -> None:
    here = make_config(tmp_path, tiny_model, run={"runtime": "local"})
    there = make_config(tmp_path, tiny_model, run={"runtime": "ray"}, ray={"address": "auto", "engine": {"CPU": 1}})
    assert launch.identity(here) == launch.identity(there)


def test_the_plan_says_what_is_reserved(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "check_ray", lambda: None)
    config = make_config(tmp_path, tiny_model, run={"runtime": "ray"}, ray={"engine": {"CPU": 2, "fast": 1}})
    assert ("Ray", "a cluster of this machine alone; reserved: engine 2 CPU 1 fast") in describe(config).rows


# On a cluster of three nodes


@slow
def test_each_kind_of_worker_goes_where_its_resources_are_and_calls_cross_nodes(tmp_path: Path) -> None:
    async def body() -> None:
        async with on_cluster(tmp_path) as runtime:
            kinds = {"engine-0": "127.0.0.2", "engine-1": "127.0.0.2", "trainer": "127.0.0.3"}
            kinds |= {"rollout-0": "127.0.0.1", "reward": "127.0.0.1"}
            assert await runtime.num_machines() == 3
            started = await asyncio.gather(*(runtime.start(name, Probe) for name in kinds))
            assert dict(zip(kinds, map(host_of, started), strict=True)) == kinds
            for worker in started:
                process = psutil.Process(await worker.pid())
                assert listening(process) == [host_of(worker)], "on its node's own address and nowhere else"
                assert process.cwd() == os.getcwd()
            caller = await runtime.start("caller", Caller, started[0], (started[0],))
            assert host_of(caller) == "127.0.0.3"
            assert await caller.relay("echo", "between nodes") == "between nodes"
            assert [number async for number in caller.relay_count(3)] == [0, 1, 2]

    asyncio.run(body())


@slow
def test_what_workers_print_comes_home_whole_and_in_order(tmp_path: Path) -> None:
    async def body() -> None:
        async with on_cluster(tmp_path) as runtime:
            probe = await runtime.start("probe", Probe)
            lines = [f"line {number} {'x' * 500}" for number in range(5000)]
            await probe.say("\n".join(lines))
            await runtime.stop("probe")
            assert (tmp_path / "logs" / "probe.log").read_text().splitlines() == lines

    asyncio.run(body())


@slow
def test_a_lost_node_fails_its_workers_by_name_and_no_others(tmp_path: Path) -> None:
    nodes = ray_cluster.cluster()
    doomed = ray_cluster.add_node(nodes, "127.0.0.4", {"doomed": 2})

    async def body() -> None:
        async with on_cluster(tmp_path, deadline_s=90.0, doomed={"doomed": 1}) as runtime:
            probe = await runtime.start("probe", Probe)
            lost = await runtime.start("doomed-0", Probe)
            caller = await runtime.start("caller", Caller, lost)
            assert host_of(lost) == "127.0.0.4"
            processes = [psutil.Process(await lost.pid())]
            await lost.say("these came home")
            while b"home" not in (tmp_path / "logs" / "doomed-0.log").read_bytes():
                await asyncio.sleep(0.05)
            calls = asyncio.gather(lost.hang(), caller.relay("hang"), return_exceptions=True)
            await lost.wait_arrived()
            await asyncio.to_thread(nodes.remove_node, doomed, False)
            own, other = await asyncio.wait_for(calls, 60)
            sentence = (
                "worker doomed-0 ended (Ray lost its launcher or its node; ray.log says why) while it was still needed"
            )
            assert isinstance(own, WorkerDied) and str(own).startswith(f"{sentence}; last output: 'these came home'")
            assert isinstance(other, WorkerDied) and str(other).startswith("worker doomed-0 ended")
            assert (await asyncio.wait_for(runtime.failure(), 10)).worker == "doomed-0"
            await asyncio.to_thread(wait_gone, processes)
            assert await probe.echo(1) == 1
            await runtime.stop("doomed-0")
            # Whether Ray knows by now that the node is gone, or finds out when it tries to start something there.
            there = "needs 1 doomed, and no node of the Ray cluster has that|died because its node has died"
            with pytest.raises((ConfigError, WorkerDied), match=f"worker doomed-0.*({there})"):
                await runtime.start("doomed-0", Probe)

    asyncio.run(body())


@slow
@pytest.mark.parametrize("how", ["kill", "suspend"])
def test_a_lost_driver_takes_its_workers_along_and_is_replaced(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "_SILENCE_S", 10.0)
    monkeypatch.setattr(local, "CLOSE_S", 1.0)

    async def body() -> None:
        async with on_cluster(tmp_path) as runtime:
            probe, caller = await asyncio.gather(runtime.start("probe", Probe), runtime.start("caller", Probe))
            processes = [psutil.Process(await worker.pid()) for worker in (probe, caller)]
            (driver,) = [process for process in workers_here() if process.cmdline()[5] == "ray"]
            getattr(driver, how)()
            deaths = [await asyncio.wait_for(runtime.failure(), 30) for _ in processes]
            assert {death.worker for death in deaths} == {"probe", "caller"}
            assert all("worker ray " in str(death) or "ray.follow sent nothing" in str(death) for death in deaths)
            await asyncio.to_thread(wait_gone, processes)
            if how == "kill":
                with pytest.raises(WorkerDied, match=r"worker ray ended \(signal 9\)"):
                    await runtime.start("probe", Probe)
            assert await (await runtime.start("probe", Probe)).echo(1) == 1

    asyncio.run(body())


@slow
def test_a_worker_for_which_there_is_no_room_is_named_in_time(tmp_path: Path) -> None:
    async def body() -> None:
        async with on_cluster(tmp_path, deadline_s=15.0, probe={"engines": 8}, other={"engines": 1}) as runtime:
            await runtime.start("probe", Probe)
            with pytest.raises(DeadlineExceeded) as caught:
                await runtime.start("other", Probe)
            assert str(caught.value) == (
                "Ray found no place for worker other within 15 s: it needs 1 engines, and free are 0 engines"
            )

    asyncio.run(body())


@slow
def test_a_node_without_the_controllers_directory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with on_cluster(tmp_path) as runtime:
            await runtime.start("probe", Probe)
            monkeypatch.setattr(os, "getcwd", lambda: "/nowhere")
            with pytest.raises(
                WorkerDied, match=r"Ray could not start worker caller: its node .* has no directory /nowhere"
            ):
                await runtime.start("caller", Probe)

    asyncio.run(body())


@slow
def test_an_address_where_no_cluster_is_meets_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_CONNECT_S", 8.0)

    async def body(address: str) -> None:
        runtime = RayRuntime(tmp_path / "logs", 30.0, address)
        try:
            with pytest.raises(ConfigError, match=rf"^ray.address = {address} "):
                await runtime.num_machines()
        finally:
            await runtime.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(body(f"127.0.0.1:{silent.getsockname()[1]}"))
    asyncio.run(body("nonsense"))


# A cluster of its own


@slow
def test_a_local_cluster_keeps_to_loopback_and_shows_no_token(tmp_path: Path) -> None:
    async def body() -> None:
        runtime = RayRuntime(tmp_path / "logs", 60.0)
        try:
            assert await runtime.num_machines() == 1
            probe = await runtime.start("probe", Probe, threads=3)
            (driver,) = [process for process in workers_here() if process.cmdline()[5] == "ray"]
            family = [driver, *driver.children(recursive=True)]
            assert await probe.pid() in [process.pid for process in family]
            heard = {host for process in family for host in listening(process)}
            assert heard == {"127.0.0.1"}
            shown = "\n".join(" ".join(process.cmdline()) + str(process.environ()) for process in family)
            assert runtime._token.hex() not in shown and str(runtime._token) not in shown
            tokens = set(re.findall(r"'RAY_AUTH_TOKEN': '(\w+)'", shown))
            assert len(tokens) == 1, "Ray's own token is in the environment of its own processes alone"
            assert tokens.pop() not in "".join(" ".join(process.cmdline()) for process in family)
            assert "RAY_AUTH_TOKEN" not in psutil.Process(await probe.pid()).environ()
            assert await probe.setting("OMP_NUM_THREADS") == await probe.setting("MKL_NUM_THREADS") == "3"
        finally:
            await runtime.close()
        wait_gone(family)
        assert not os.path.exists(runtime._local.directory)

    asyncio.run(body())


PARENT = """
import asyncio, pathlib, sys
from probes import Probe
from headway.runtime.ray import RayRuntime

async def main():
    runtime = RayRuntime(pathlib.Path(sys.argv[1]), 60.0, sys.argv[2])
    await runtime.num_machines()
    probes = await asyncio.gather(*(runtime.start(name, Probe) for name in ("one", "two")))
    blocked = asyncio.create_task(probes[0].pass_gate())
    print(*[await probe.pid() for probe in probes], await probes[1].breed(), flush=True)
    await blocked

asyncio.run(main())
"""


@slow
@pytest.mark.parametrize("own_cluster", [True, False])
def test_a_killed_controller_leaves_nothing_on_the_cluster(tmp_path: Path, own_cluster: bool) -> None:
    address = "" if own_cluster else ray_cluster.cluster().address
    python_path = os.pathsep.join(sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "logs"), address],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path},
    )
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    launchers = [worker.parent() for worker in workers[:2]]
    assert len(workers) == 3 and all("Launcher" in str(launcher.cmdline()) for launcher in launchers)
    started = psutil.Process(parent.pid).children(recursive=True)
    workers[0].suspend()  # which cannot even notice
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_gone([*workers, *launchers, *started])


# Whole runs


def ray_sections(**run: object) -> dict[str, dict[str, object]]:
    places = {kind: ray_cluster.PLACES[kind] for kind in ("engine", "trainer", "rollout", "reward")}
    return {
        "run": {"runtime": "ray", **run},
        "ray": {"address": ray_cluster.cluster().address, **places},
        "staleness": {"max_staleness": 0},
        "rollout": {"workers": 2},
        "engine": {"count": 2},
    }


def outcome(config: Config, events: list[Event]) -> tuple[list[str], bytes]:
    """Every version's weights, and every finished group by id: tokens, log-probs, versions and rewards."""
    state, record = fold(events), Record(Path(config.run.dir) / "record")
    groups = [record.load(group.ref) for group in state.groups if group.ref]
    return [event.digest for event in events if event.kind == "trained"], codec.encode(groups)


def workers_here() -> list[psutil.Process]:
    """Every worker below this process: on the nodes of its cluster, or on its own."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "headway.runtime.worker" in process.cmdline()]


@slow
def test_invariant_4_a_run_on_ray_is_the_run_on_one_machine_bit_for_bit(tmp_path: Path, tiny_model: str) -> None:
    outcomes = []
    for runtime in ("ray", "local"):
        (tmp_path / runtime).mkdir()
        path = write_config(tmp_path / runtime, tiny_model, **ray_sections(runtime=runtime))
        config = load(path)
        with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
            assert run.wait() == 0, run.output
            assert not run.descendants()
        events = run.events()
        check_finished(config, events)
        outcomes.append(outcome(config, events))
        logs = {log.name for log in (Path(config.run.dir) / "logs").iterdir()}
        names = {"engine-0.log", "engine-1.log", "trainer.log", "reward.log", "rollout-0.log", "rollout-1.log"}
        assert logs == names | ({"ray.log"} if runtime == "ray" else set())
    assert outcomes[0] == outcomes[1]
    replayed = headway("replay", tmp_path / "ray" / "run")
    assert "every version's weights are identical" in replayed.stdout, replayed.stderr
    assert not (tmp_path / "ray" / "run" / "replay" / "logs" / "ray.log").exists(), "one machine is enough for that"


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_order_and_leaves_no_worker(
    tmp_path: Path, tiny_model: str, number: signal.Signals
) -> None:
    path = write_config(tmp_path, tiny_model, **ray_sections(steps=100_000))
    config = load(path)
    with HeadwayProcess("train", path, run=Path(config.run.dir)) as run:
        run.wait_until(lambda events: any(event.kind == "trained" for event in events), "a training step")
        workers = workers_here()
        names = {"engine-0", "engine-1", "trainer", "rollout-0", "rollout-1", "reward", "ray"}
        assert {worker.cmdline()[5] for worker in workers} == names
        os.kill(run.process.pid, number)
        assert run.wait() == 1
        assert re.search(r"stopped after \d+ steps; `--resume` goes on", run.output) and "Traceback" not in run.output
    wait_gone(workers)
    state = check_record(config, run.events())
    assert state.status == "stopped"


@slow
def test_a_worker_that_cannot_start_leaves_no_other(tmp_path: Path, tiny_model: str) -> None:
    sections = ray_sections()
    sections["ray"]["trainer"] = {"nowhere": 1}
    path = write_config(tmp_path, tiny_model, **sections)
    with HeadwayProcess("train", path, run=Path(load(path).run.dir)) as run:
        assert run.wait() == 1
        assert "error: worker trainer needs 1 nowhere, and no node of the Ray cluster has that" in run.output
        assert not run.descendants()
    assert not workers_here()
