"""Writing files so that a crash leaves them whole: every byte, and the directory entry, on disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`: `os.write` may stop half-way, and the next call then raises the cause."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def fsync_directory(directory: Path) -> None:
    """Make the names of new files durable; fsync of a file covers its bytes alone."""
    with opened(directory) as fd:
        os.fsync(fd)


def is_at(fd: int, path: str | Path) -> bool:
    """Whether the open file is still the one at this path."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """A file descriptor for reading, closed at the end."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
