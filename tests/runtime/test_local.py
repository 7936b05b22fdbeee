"""What is particular to processes of one machine: the directory of their sockets."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from headway.runtime.local import LocalRuntime

KILLED_BEFORE_ITS_FIRST_WORKER = """
import os, pathlib, signal, sys
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
