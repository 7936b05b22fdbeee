"""A reward pool to talk to, and verifiers that do everything a verifier should not."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from headway.config import RewardSection
from headway.rollout.reward_pool import RewardPool

T = TypeVar("T")

VERIFIERS = """
import os, subprocess, sys, threading, time
import numpy as np

def echo(task, text): return task["score"]
def sleep(task, text):
    if "path" in task: open(task["path"], "w").close()
    time.sleep(task["sleep"])
    return task["sleep"]
def compare(task, text): return text.encode("utf-8", "surrogatepass") == task["text"]
def pid(task, text): return os.getpid()
def give(task, text): return VALUES[task["value"]]()
def act(task, text): return ACTIONS[task["action"]](task) or 1.0

def fail(): raise ZeroDivisionError("by\\nzero \\ud800")
class Rude(Exception):
    def __str__(self): raise RuntimeError
def be_rude(): raise Rude
def recurse(): return recurse()

VALUES = {
    "true": lambda: True, "one": lambda: 1, "half": lambda: 0.5, "numpy half": lambda: np.float32(0.5),
    "numpy one": lambda: np.int64(1), "numpy true": lambda: np.bool_(True),
    "nan": lambda: float("nan"), "numpy nan": lambda: np.float32("nan"), "infinity": lambda: float("inf"),
    "text": lambda: "1.0", "none": lambda: None, "complex": lambda: 1j, "array": lambda: np.ones(2),
    "list": lambda: [1.0], "huge": lambda: 10**400, "bytes": lambda: b"1",
    "raise": fail, "rude": be_rude, "recurse": recurse, "sys.exit": lambda: sys.exit(0),
}

def hang(task):
    while True: time.sleep(1)

def hang_deaf(task):
    import re
    re.fullmatch("(a+)+b", "a" * 64)  # inside one C call, holding the interpreter lock

def hang_with_family(task):
    note_pid(task, subprocess.Popen(["sleep", "600"]))
    note_pid(task, subprocess.Popen(["sleep", "600"], start_new_session=True))
    while True: time.sleep(1)

def note_pid(task, process):
    with open(task["pids"], "a") as file: file.write(f"{process.pid}\\n")

def leave_family(task):
    note_pid(task, subprocess.Popen(["sleep", "600"]))
    note_pid(task, subprocess.Popen(["sleep", "600"], start_new_session=True))
    subprocess.run([sys.executable, "-c", "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); "
                    "open(sys.argv[1], 'a').write(f'{p.pid}\\\\n')", task["pids"]])

def fork_and_return(task):
    if os.fork() == 0: return 0.25
    time.sleep(0.05)  # the copy comes back first
    return 0.75

def fork_and_exit(task):
    if os.fork(): os._exit(0)
    time.sleep(600)

def print_much(task):
    print("x" * 100_000)
    os.write(1, b"raw")
    sys.stderr.write("y" * 100_000)

def read_input(task):
    return 1.0 if sys.stdin.read() == "" and os.read(0, 1) == b"" else 0.0

def write_to_every_descriptor(task):
    for descriptor in range(3, 1024):
        try: os.write(descriptor, b"\\xff" * 64)
        except OSError: pass

def close_every_descriptor(task): os.closerange(3, 1024)
def kill_keeper(task):
    os.kill(os.getppid(), 9)
    time.sleep(30)

def leave_a_thread_and_crash(task):
    threading.Thread(target=time.sleep, args=(600,)).start()
    os.closerange(3, 1024)

def break_the_source(task):
    with open(__file__, "w") as file: file.write("raise RuntimeError('gone bad')")
    os._exit(3)

ACTIONS = {
    "hang": hang, "hang_deaf": hang_deaf, "hang_with_family": hang_with_family, "leave_family": leave_family,
    "fork_and_return": fork_and_return, "fork_and_exit": fork_and_exit, "print": print_much, "read": read_input,
    "exit": lambda task: os._exit(3), "segfault": lambda task: os.kill(os.getpid(), 11),
    "out of memory": lambda task: os.kill(os.getpid(), 9), "kill guardian": kill_keeper,
    "write": write_to_every_descriptor, "close": close_every_descriptor, "thread": leave_a_thread_and_crash,
    "break": break_the_source, "nothing": lambda task: None,
}
"""


def run(
    folder: Path, name: str, conversation: Callable[[RewardPool], Awaitable[T]], **settings: Any
) -> tuple[T, dict[str, int]]:
    """Talk to an open pool whose verifier is `name`; also its stats at the end, when no child is left."""
    source = folder / "verifiers.py"
    if not source.exists():
        source.write_text(VERIFIERS)
    section = RewardSection(**{"workers": 1, "deadline_s": 20.0, "retries": 0, **settings})

    async def main() -> tuple[T, dict[str, int]]:
        pool = RewardPool(f"{source}:{name}", section)
        before = set(psutil.Process().children(recursive=True))
        await pool.open()
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 2 * section.workers
        try:
            result = await conversation(pool)
        finally:
            await pool.close()
        assert set(psutil.Process().children(recursive=True)) <= before
        return result, await pool.stats()

    return asyncio.run(asyncio.wait_for(main(), 30))


def errors_of(stats: dict[str, int]) -> dict[str, int]:
    """The kinds of errors that happened, without their common prefix."""
    prefix = "num_errors_"
    return {name.removeprefix(prefix): n for name, n in stats.items() if name.startswith(prefix) and n}


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{alive} of {pids} live on"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]
