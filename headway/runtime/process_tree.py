"""Process trees: signals on the parent's death, and ending a process with all its descendants.

A guardian is a process that starts one child and runs none of its code, so that it always responds: when the child
ends, the guardian's standard input is closed or its parent dies, it ends the child's process group and then every
descendant that left the group. Linux only.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.02


def set_death_signal(number: int, parent: int) -> None:
    """Receive this signal when the parent dies; exit now if it has died already.

    To the kernel the parent is the thread that forked: a parent's event loop must run in a thread that lasts. A stopped
    process receives only SIGKILL and SIGCONT.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def on_parent_death(parent: int, end: Callable[[], Any]) -> None:
    """Call `end` when the parent dies, also in a process that is stopped: SIGCONT wakes it."""
    signal.signal(signal.SIGCONT, lambda *_: end() if os.getppid() != parent else None)
    set_death_signal(signal.SIGCONT, parent)


def adopt_orphans() -> None:
    """Become the parent of any descendant whose own parent ends, so that it stays in the process tree."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def guard(child: int, owner: int, grace_s: float = 0.0) -> int:
    """Wait until `child`, the leader of a process group, ends, and end it when `owner`, this process's parent, dies.

    Returns its exit code, 128 + N for signal N. Processes have `grace_s` to clean up before they are killed.
    """

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
    on_parent_death(owner, end)
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
    """Terminate all remaining descendants and wait for them."""
    deadline, asked = time.monotonic() + seconds, set[int]()
    while (left := children()) and time.monotonic() < deadline:
        for pid in left - asked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        asked |= left
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(_POLL_S)


def processor_s(pid: int) -> float:
    """Processor time of a process and its descendants, reaped ones included; 0 once it has exited."""
    total = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        total += sum(processor_s(int(child)) for child in children)
    return total


SPARED: set[int] = set()  # children `kill_children` leaves alone: they serve more than the call that started them


def kill_children(spare: frozenset[int] = frozenset()) -> None:
    """Kill and reap all child processes but `spare`; orphaned grandchildren become children and are killed too."""
    while leftover := children() - spare - SPARED:
        for pid in leftover:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in leftover:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children() -> frozenset[int]:
    """Our child processes, those that ended and are not reaped among them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()  # the usual case, for the price of one system call
    import psutil  # 12 ms, and a process that forks a user's code seldom needs it

    return frozenset(child.pid for child in psutil.Process().children())
