"""A guardian ends its program and all its descendants, first by SIGTERM where there is time, and in any case."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

GUARDIAN = """
import os, signal, sys, time
from headway.runtime import process_tree

process_tree.adopt_orphans()
program = os.fork()
if program == 0:
    os.setpgid(0, 0)
    child = os.fork()
    if child == 0:
        os.setsid()
    {manners}
    print(os.getpid(), flush=True)
    {then}
os._exit(process_tree.guard(program, os.getppid(), {grace_s}))
"""


def kept(manners: str, then: str, grace_s: float) -> tuple["subprocess.Popen[bytes]", list[psutil.Process]]:
    """A guardian, and the two it keeps: a program and its child, which left the program's group."""
    guardian = subprocess.Popen(
        [sys.executable, "-c", GUARDIAN.format(manners=manners, then=then, grace_s=grace_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert guardian.stdout is not None
    return guardian, [psutil.Process(int(guardian.stdout.readline())) for _ in range(2)]


STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
POLITE = "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))"


@pytest.mark.parametrize(
    ("manners", "grace_s", "code"), [(STUBBORN, 0.3, 137), (POLITE, 60.0, 7), (STUBBORN, 0.0, 137), ("", 60.0, 143)]
)
def test_when_its_owner_lets_go_all_that_is_kept_ends(manners: str, grace_s: float, code: int) -> None:
    guardian, family = kept(manners, "time.sleep(600)", grace_s)
    started = time.monotonic()
    assert guardian.stdin is not None
    guardian.stdin.close()
    assert guardian.wait(20) == code
    assert not psutil.wait_procs(family, timeout=0)[1] and time.monotonic() - started < 20


def test_a_program_that_ends_takes_its_children_along() -> None:
    guardian, family = kept("", "time.sleep(0.3 if child else 600); os._exit(3)", 60.0)
    assert guardian.wait(20) == 3
    assert not psutil.wait_procs(family, timeout=0)[1]


OWNER = """
import os, subprocess, sys
guardian = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True)
print(guardian.pid, flush=True)
guardian.wait()
"""


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
def test_a_stopped_guardian_dies_with_its_owner(grace_s: float) -> None:
    guardian = GUARDIAN.format(manners="", then="time.sleep(600)", grace_s=grace_s)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, guardian],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert owner.stdout is not None
    pids = [int(owner.stdout.readline()) for _ in range(3)]
    ends = [os.pidfd_open(pid) for pid in pids]
    os.kill(pids[0], signal.SIGSTOP)
    owner.kill()
    owner.wait()
    for pid, end in zip(pids, ends, strict=True):
        if not select.select([end], [], [], 10)[0]:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("a process outlived the owner of its stopped guardian")
        os.close(end)
