"""Resize requests: a file in the run directory with the number of engines a running run should have.

The file holds one number. It appears whole, by a rename, and is deleted when the controller has read it; its
outcome is in the event log.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from headway.errors import HeadwayError
from headway.record.log import is_being_written

WANTED_NAME = "engines.wanted"
MOST_ENGINES = 256
_CHECK_S = 0.05


def ask(run_dir: Path, events_name: str, count: int, deadline_s: float = 60.0) -> None:
    """Request `count` engines of the run in `run_dir`; returns when the run has acknowledged it."""
    if not is_being_written(run_dir / events_name):
        raise HeadwayError(f"no run is going on in {run_dir}; start or resume it first")
    path = run_dir / WANTED_NAME
    unfinished = path.with_name(f"{WANTED_NAME}.{os.getpid()}")
    unfinished.write_text(f"{count}\n")
    os.replace(unfinished, path)
    deadline = time.monotonic() + deadline_s
    while path.exists():
        if time.monotonic() > deadline or not is_being_written(run_dir / events_name):
            path.unlink(missing_ok=True)
            raise HeadwayError(f"the run in {run_dir} did not acknowledge the resize within {deadline_s:g} s")
        time.sleep(_CHECK_S)


def take(run_dir: Path) -> int | None:
    """The number that is asked for, once; None where nobody asks, or asks for what cannot be."""
    path = run_dir / WANTED_NAME
    text = ""
    with suppress(OSError):
        text = path.read_text()
        path.unlink()
    return int(text) if text.strip().isdecimal() and 1 <= int(text) <= MOST_ENGINES else None
