"""A process and those it started: how to hear of a parent's death, and how to leave no descendant behind.

A keeper is a process that starts one child and runs none of its code, so that it always answers: when the child ends,
or the keeper's standard input is closed, or its own parent dies, it ends the child's process group and then every
descendant that left the group. On systems other than Linux only the closing of pipes tells, and only groups are ended.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform == "linux"
_LOOK_S = 0.02


def set_death_signal(number: int, parent: int) -> None:
    """Get this signal when the parent dies, and end at once if it is gone already."""
    if _LINUX:  # which means the thread that made this process: the parent's event loop must run in a lasting one
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of any descendant whose own parent ends, so that none gets out of reach."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def keep(child: int, grace_s: float = 0.0) -> int:
    """Wait for the end of `child`, which leads a process group, or for a reason to end it; its exit code, 128 + N for
    signal N. What is to end may clean up for `grace_s` before it is killed."""

    def end(*_: Any) -> None:
        _signal_group(child, signal.SIGTERM if grace_s else signal.SIGKILL)
        if grace_s:
            killer = threading.Timer(grace_s, _signal_group, (child, signal.SIGKILL))
            killer.daemon = True
            killer.start()

    def wait_for_owner() -> None:
        while os.read(0, 1):
            pass
        end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=wait_for_owner, daemon=True).start()
    _, status = os.waitpid(child, 0)
    if grace_s:
        _signal_group(child, signal.SIGTERM)
        _end_children(grace_s)
    _signal_group(child, signal.SIGKILL)
    kill_children()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _end_children(seconds: float) -> None:
    """Ask whatever is left to end, and wait for it."""
    deadline, asked = time.monotonic() + seconds, set[int]()
    while (left := children()) and time.monotonic() < deadline:
        for pid in left - asked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        asked |= left
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(_LOOK_S)


SPARED: set[int] = set()  # children `kill_children` leaves alone: they serve more than the call that started them


def kill_children(spare: frozenset[int] = frozenset()) -> None:
    """Kill and reap all child processes but `spare`; theirs become ours by death, and go the same way."""
    while leftover := children() - spare - SPARED:
        for pid in leftover:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in leftover:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children() -> frozenset[int]:
    """Our child processes, those that ended and are not reaped among them."""
    if not _LINUX:
        return frozenset()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()  # the usual case, for the price of one system call
    me = os.getpid()
    return frozenset(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == me)


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
