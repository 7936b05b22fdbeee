"""What is particular to processes of one machine: the directory of their sockets."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from probes import Probe

from headway.errors import HeadwayError
from headway.runtime.local import LocalRuntime

KILLED_BEFORE_ITS_FIRST_WORKER = """
import os, pathlib, signal, sys
import pytest
from probes import Probe

from headway.errors import HeadwayError
from headway.runtime.local import LocalRuntime

print(LocalRuntime(pathlib.Path(sys.argv[1]), 15.0).directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sockets_of_a_run_killed_before_its_first_worker_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_BEFORE_ITS_FIRST_WORKER, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    left = subprocess.run(command, env=env, capture_output=True, text=True).stdout.strip()
    assert os.path.isdir(left)

    async def body() -> None:
        first = LocalRuntime(tmp_path, 15.0)
        assert not os.path.exists(left)
        second = LocalRuntime(tmp_path, 15.0)
        assert os.path.isdir(first.directory), "its owner lives"
        await second.close()
        await first.close()
        assert not os.path.exists(first.directory) and not os.path.exists(second.directory)

    asyncio.run(body())


def test_a_worker_is_restarted_although_its_logs_and_the_sockets_were_removed_meanwhile(tmp_path: Path) -> None:
    """By somebody who makes room, and by a cleaner of temporary files."""

    async def body() -> None:
        runtime = LocalRuntime(tmp_path / "logs", 15.0)
        try:
            await runtime.start("probe", Probe)
            shutil.rmtree(runtime.directory)
            shutil.rmtree(tmp_path / "logs")
            await runtime.stop("probe")
            probe = await runtime.start("probe", Probe)
            assert await probe.is_open() and (tmp_path / "logs" / "probe.log").exists()
            await runtime.stop("probe")
            shutil.rmtree(tmp_path / "logs")
            (tmp_path / "logs").write_text("no directory")
            with pytest.raises(HeadwayError, match=r"cannot write .*probe.log: File exists; make room"):
                await runtime.start("probe", Probe)
        finally:
            await runtime.close()

    asyncio.run(body())
