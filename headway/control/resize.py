"""How many engines a person wants of a run that goes on: a file in its directory, written by one, taken up by the run.

The file holds one number. It appears whole, by a rename, and vanishes when the controller has taken it up; what becomes
of it is in the event log.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from headway.errors import HeadwayError
from headway.record.log import is_being_written

WANTED_NAME = "engines.wanted"
MOST_ENGINES = 256
_LOOK_S = 0.05


def ask(run_dir: Path, events_name: str, count: int, deadline_s: float = 60.0) -> None:
    """Ask the run in `run_dir` for so many engines; returns when it has taken that up."""
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
            raise HeadwayError(f"the run in {run_dir} did not take up the wish within {deadline_s:g} s")
        time.sleep(_LOOK_S)


def take(run_dir: Path) -> int | None:
    """The number that is asked for, once; None where nobody asks, or asks for what cannot be."""
    path = run_dir / WANTED_NAME
    text = ""
    with suppress(OSError):
        text = path.read_text()
        path.unlink()
    return int(text) if text.strip().isdecimal() and 1 <= int(text) <= MOST_ENGINES else None
