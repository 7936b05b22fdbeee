"""A keeper ends what it keeps and everything that started: politely first where it may, and in any case."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

KEEPER = """
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
os._exit(process_tree.keep(program, {grace_s}))
"""


def kept(manners: str, then: str, grace_s: float) -> tuple["subprocess.Popen[bytes]", list[psutil.Process]]:
    """A keeper, and the two it keeps: a program and its child, which left the program's group."""
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER.format(manners=manners, then=then, grace_s=grace_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert keeper.stdout is not None
    return keeper, [psutil.Process(int(keeper.stdout.readline())) for _ in range(2)]


STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
POLITE = "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))"


@pytest.mark.parametrize(
    ("manners", "grace_s", "code"), [(STUBBORN, 0.3, 137), (POLITE, 60.0, 7), (STUBBORN, 0.0, 137), ("", 60.0, 143)]
)
def test_when_its_owner_lets_go_all_that_is_kept_ends(manners: str, grace_s: float, code: int) -> None:
    keeper, family = kept(manners, "time.sleep(600)", grace_s)
    started = time.monotonic()
    assert keeper.stdin is not None
    keeper.stdin.close()
    assert keeper.wait(20) == code
    assert not psutil.wait_procs(family, timeout=0)[1] and time.monotonic() - started < 20


def test_a_program_that_ends_takes_its_children_along() -> None:
    keeper, family = kept("", "time.sleep(0.3 if child else 600); os._exit(3)", 60.0)
    assert keeper.wait(20) == 3
    assert not psutil.wait_procs(family, timeout=0)[1]
