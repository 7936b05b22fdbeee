"""The sbatch script in examples/slurm, without Slurm: two nodes with addresses of their own on this machine.

What stands in for Slurm is three commands: scontrol names the nodes, srun runs its command here, and hostname gives the
address of the node named to srun. The first time that Ray shall join the cluster srun fails, as Ray does on a busy one.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
import pytest
from system import DEADLINE_S, check_finished, write_config

from headway.config import load
from headway.record.log import read
from headway.record.run import fold

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/slurm/train.sbatch"

STAND_INS = {
    "scontrol": '[[ "$*" == "show hostnames node-[1-2]" ]] && printf "node-1\\nnode-2\\n"',
    "srun": """
        while [[ "$1" == --* ]]; do
            [[ "$1" == --nodelist=* ]] && export NODE="${1#--nodelist=}"
            shift
        done
        if [[ "$*" == "ray start"*" --address="* && ! -e "$0.stumbled" ]]; then
            touch "$0.stumbled"
            exit 1
        fi
        exec "$@"
    """,
    "hostname": '[[ "$*" == --all-ip-addresses ]] && echo "127.0.1.${NODE#node-} 10.9.8.7"',
}


class Job:
    """The script as a batch job, in a session of its own; on leaving, nothing of it may be left."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        commands = tmp_path / "commands"
        commands.mkdir()
        for name, body in STAND_INS.items():
            (commands / name).write_text(f"#!/bin/bash\n{body}\n")
            (commands / name).chmod(0o755)
        path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
        here = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node-[1-2]", "PATH": path}
        self._output = open(tmp_path / "job.out", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            cwd=ROOT,
            env={**here, **job},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._family: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        left = self.descendants()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._output.close()
        shutil.rmtree(f"/tmp/headway-{os.getpid()}", ignore_errors=True)

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def descendants(self) -> set[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            self._family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return {process for process in self._family if process.is_running()}

    def wait(self) -> int:
        """Its exit code, once it has ended by itself and left neither processes nor files."""
        deadline = time.monotonic() + 2 * DEADLINE_S
        while self.process.poll() is None:
            self.descendants()
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)
        _, left = psutil.wait_procs(self._family, timeout=60)
        assert not left, f"left behind: {[process.cmdline() for process in left]}"
        assert not os.path.exists(f"/tmp/headway-{os.getpid()}")
        return self.process.returncode


def test_the_script_is_bash_and_says_how_it_is_used(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)
    with Job(tmp_path) as job:
        assert job.wait() == 2
        assert job.output == "usage: sbatch examples/slurm/train.sbatch CONFIG [--section.key=value ...]\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_spread_over_the_nodes_of_an_allocation(tmp_path: Path, tiny_model: str) -> None:
    path = write_config(tmp_path, tiny_model, run={"steps": 2})
    config = load(path)
    places = ['--ray.engine={"node:127.0.1.2" = 0.1}', '--ray.trainer={"node:127.0.1.1" = 0.1}']
    with Job(tmp_path, str(path), *places) as job:
        assert job.wait() == 0, job.output
        assert (tmp_path / "commands/srun.stumbled").exists(), "and another attempt was made"
    check_finished(config, read(Path(config.run.dir) / "events.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_ends_in_order_when_its_time_is_up(tmp_path: Path, tiny_model: str) -> None:
    path = write_config(tmp_path, tiny_model, run={"steps": 100_000})
    events = Path(load(path).run.dir) / "events.jsonl"
    with Job(tmp_path, str(path), '--ray.engine={"node:127.0.1.2" = 0.1}') as job:
        deadline = time.monotonic() + 2 * DEADLINE_S
        while not events.exists() or not fold(read(events)).num_trained:
            assert job.process.poll() is None and time.monotonic() < deadline, job.output
            time.sleep(0.1)
        engine = [process for process in job.descendants() if "headway.runtime.worker engine " in line(process)]
        sockets = [socket for process in engine for socket in process.net_connections() if socket.status == "LISTEN"]
        assert {socket.laddr.ip for socket in sockets} == {"127.0.1.2"}
        job.process.send_signal(signal.SIGTERM)  # to the batch shell alone, as --signal=B:TERM does
        assert job.wait() == 1
        assert re.search(r"stopped after \d+ steps; `--resume` goes on", job.output)
    assert fold(read(events)).status == "stopped"


def line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
