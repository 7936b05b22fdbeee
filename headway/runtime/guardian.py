"""Keeps a program of another make: `python -m headway.runtime.guardian OWNER DIRECTORIES COMMAND…`.

The program leads a process group of its own, reads nothing, and writes where the keeper does. When it ends, or OWNER
(a process id) dies or closes the keeper's standard input, the program and everything it started are ended, first by
SIGTERM and after a few seconds by SIGKILL; then DIRECTORIES (colons between them) are removed with all they hold.

Invariant that lives here:
 15. Bounded waits: none of the program's processes outlives its owner, however the owner ends.
"""

import contextlib
import os
import shutil
import signal
import sys
from typing import NoReturn

from headway.runtime import process_tree

GRACE_S = 4.0


def main() -> NoReturn:
    owner, directories, command = int(sys.argv[1]), sys.argv[2].split(":"), sys.argv[3:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which decides
    process_tree.set_death_signal(signal.SIGTERM, owner)
    process_tree.adopt_orphans()
    keeper = os.getpid()
    program = os.fork()
    if program == 0:
        _become(command, keeper)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(program, program)  # both sides set it, so that neither can run ahead of the other
    code = process_tree.keep(program, GRACE_S)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(code)


def _become(command: list[str], keeper: int) -> NoReturn:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Should the keeper itself be killed: then at least the program hears of it, and can end those it started.
    process_tree.set_death_signal(signal.SIGTERM, keeper)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
