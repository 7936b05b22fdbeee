"""Runs a foreign program and ends it with its owner: `python -m headway.runtime.guardian OWNER DIRECTORIES COMMAND…`.

The program leads its own process group, with empty standard input and the guardian's output. When it ends, or OWNER
(a process id) dies or closes the guardian's standard input, the program and all its descendants are ended, first by
SIGTERM and after a few seconds by SIGKILL; then DIRECTORIES (separated by colons) are removed.

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
    process_tree.adopt_orphans()
    guardian = os.getpid()
    program = os.fork()
    if program == 0:
        _become(command, guardian)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(program, program)  # both sides set it, so that neither can run ahead of the other
    code = process_tree.guard(program, owner, GRACE_S)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(code)


def _become(command: list[str], guardian: int) -> NoReturn:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # If the guardian itself is killed, at least the program is signalled, and can end its own children.
    process_tree.set_death_signal(signal.SIGTERM, guardian)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
