"""The sbatch script in examples/slurm, without Slurm: two nodes with addresses of their own on this machine.

What stands in for Slurm is three commands: scontrol names the nodes, srun runs its command here, and hostname gives the
address of the node srun was told.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from system import DEADLINE_S, check_finished, write_config

from headway.config import load
from headway.events import read
from headway.ledger import fold

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples/slurm/train.sbatch"

STAND_INS = {
    "scontrol": '[[ "$*" == "show hostnames node-[1-2]" ]] && printf "node-1\\nnode-2\\n"',
    "srun": """
        while [[ "$1" == --* ]]; do
            [[ "$1" == --nodelist=* ]] && export NODE="${1#--nodelist=}"
            shift
        done
        exec "$@"
    """,
    "hostname": '[[ "$*" == --all-ip-addresses ]] && echo "127.0.1.${NODE#node-} 10.9.8.7"',
}


def slurm(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, body in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node-[1-2]"}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        cwd=ROOT,
        env={**os.environ, **job, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(job: "subprocess.Popen[str]", family: set[psutil.Process]) -> str:
    """Wait for its end, with nothing left of it; what it printed."""
    try:
        output, _ = job.communicate(timeout=2 * DEADLINE_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left, f"left behind: {[process.cmdline() for process in left]}"
    assert not os.path.exists(f"/tmp/headway-{os.getpid()}")
    return output


def test_the_script_is_bash_and_says_how_it_is_used(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)
    job = slurm(tmp_path)
    assert end(job, set()) == "usage: sbatch examples/slurm/train.sbatch CONFIG [--section.key=value ...]\n"
    assert job.returncode == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_spread_over_the_nodes_of_an_allocation(tmp_path: Path, tiny_model: str) -> None:
    path = write_config(tmp_path, tiny_model, run={"steps": 2})
    config = load(path)
    job = slurm(tmp_path, str(path), '--ray.engine={"node:127.0.1.2" = 0.1}', '--ray.trainer={"node:127.0.1.1" = 0.1}')
    output = end(job, set())
    assert job.returncode == 0, output
    check_finished(config, read(Path(config.run.dir) / "events.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_ends_in_order_when_its_time_is_up(tmp_path: Path, tiny_model: str) -> None:
    path = write_config(tmp_path, tiny_model, run={"steps": 100_000})
    events = Path(load(path).run.dir) / "events.jsonl"
    job = slurm(tmp_path, str(path), '--ray.engine={"node:127.0.1.2" = 0.1}')
    deadline = time.monotonic() + 2 * DEADLINE_S
    while not events.exists() or not fold(read(events)).num_trained:
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0]
        time.sleep(0.1)
    family = set(psutil.Process(job.pid).children(recursive=True))
    engine = next(process for process in family if "headway.runtime.worker engine " in " ".join(process.cmdline()))
    assert {connection.laddr.ip for connection in engine.net_connections() if connection.status == "LISTEN"} == {
        "127.0.1.2"
    }
    job.send_signal(signal.SIGTERM)  # to the batch shell alone, as --signal=B:TERM does
    assert "stopped; `--resume` goes on" in end(job, family)
    assert job.returncode == 1
    assert fold(read(events)).status == "stopped"
