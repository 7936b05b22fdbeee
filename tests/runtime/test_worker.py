"""A worker that starts, and what it prints."""

import asyncio
from pathlib import Path

import pytest
from probes import Probe, SlowToOpen, StopsItself
from runtimes import with_probe

from headway.errors import DeadlineExceeded
from headway.runtime import local, ray
from headway.runtime.protocol import Runtime

LOCAL_AND_RAY = pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.slow)])


def set_silence(runtime: Runtime, seconds: float) -> None:
    assert isinstance(runtime, local.LocalRuntime | ray.RayRuntime)
    runtime._silence_s = seconds


def test_23_what_user_code_prints_does_not_fill_the_disk(tmp_path: Path) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        log = tmp_path / "logs" / "probe.log"
        await probe.write_to_output(65 << 20)
        assert log.stat().st_size >= 65 << 20
        async with asyncio.timeout(60):
            while not 0 < log.stat().st_size < 1000:
                await asyncio.sleep(0.05)
        assert log.read_text() == "more than 64 MiB of output were removed here\n"
        await probe.write_to_output(3)
        assert log.read_text().endswith("here\nxxx")

    with_probe(tmp_path, test)


@LOCAL_AND_RAY
def test_23_a_worker_that_stops_while_it_starts_is_found_long_before_its_deadline(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        set_silence(runtime, 1.0)
        with pytest.raises(
            DeadlineExceeded, match=r"^worker late answered no health check for 1 s while it started; see "
        ):
            await asyncio.wait_for(runtime.start("late", StopsItself), 30)
        set_silence(runtime, 30.0)
        again = await runtime.start("late", Probe)
        assert await again.echo(1) == await probe.echo(1)

    with_probe(tmp_path, test, kind, deadline_s=120.0)


@pytest.mark.slow
@LOCAL_AND_RAY
def test_23_a_worker_that_computes_while_it_starts_answers_health_checks(tmp_path: Path, kind: str) -> None:
    async def test(runtime: Runtime, probe: Probe) -> None:
        set_silence(runtime, 8.0)
        slow = await runtime.start("slow", SlowToOpen, 10.0)
        assert await slow.echo(1) == await probe.echo(1)

    with_probe(tmp_path, test, kind, deadline_s=120.0)
