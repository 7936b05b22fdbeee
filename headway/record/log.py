"""The run's append-only log: events in order, one JSON object on a line. Resume, replay, metrics and the viewer read it
and nothing else. The controller is the only writer.

Invariants that live here:
 13. Non-blocking generation, logging included: an append costs microseconds, a thread does the writing.
 14. Crash safety: what an event names was made durable before the event was written, and a line torn by the
     crash is cut off when the log is opened again.
"""

import asyncio
import concurrent.futures as futures
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, Union

import msgspec

from headway.errors import CAUSE, DeadlineExceeded, HeadwayError, translated
from headway.files import fsync_directory, is_at, opened, write_all
from headway.record.events import FORMAT, KINDS, Event

EVENTS_NAME = "events.jsonl"

E = TypeVar("E", bound=Event)

_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Union[tuple(KINDS.values())])  # noqa: UP007
_ENCODER = msgspec.json.Encoder()
_BLOCK = 4 * 2**20  # bytes that are decoded at once, in half the time of line by line


def read(path: str | Path) -> list[Event]:
    """All events of a log; a torn last line, which a crash can leave, is ignored."""
    return list(scan(path))


def scan(path: str | Path) -> Iterator[Event]:
    """Yield the events of a log; a torn last line is ignored."""
    with (
        translated(OSError, HeadwayError, f"cannot read the event log {path}: {CAUSE}; is this a run directory?"),
        open(path, "rb") as file,
    ):
        for found, _ in _scan(file, path):
            yield from found


class Follower:
    """Reads a log that may still be written: each `read` returns the whole events appended since the one before."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._offset, self._num_read = Path(path), 0, 0

    def read(self) -> Iterator[Event]:
        with (
            translated(OSError, HeadwayError, f"cannot read the event log {self._path}: {CAUSE}"),
            open(self._path, "rb") as file,
        ):
            file.seek(start := self._offset)
            for found, end in _scan(file, self._path, self._num_read):
                self._offset, self._num_read = start + end, self._num_read + len(found)
                yield from found


class EventLog:
    """Appends events to one file. Appends come from one thread; a second one writes them, in order, many at a time.

    `before_write` runs on the writing thread before any events are written: what they name must be durable first.
    """

    def __init__(
        self, path: str | Path, before_write: Callable[[], None] = lambda: None, deadline_s: float = 600.0
    ) -> None:
        self.path = Path(path)
        self._before_write = before_write
        self._deadline_s = deadline_s
        self._fd = _open_locked(self.path)
        self._next_seq = self._cut_torn_tail()
        self._num_bytes = 0
        self._subscribers: list[Callable[[Event], None]] = []
        self._wake = threading.Condition()  # guards the four that follow
        self._lines: list[bytes] = []
        self._flushes: list[futures.Future[None]] = []
        self._failure: Exception | None = None
        self._closed = False
        self._writer = threading.Thread(target=self._write_loop, name=f"write {self.path.name}", daemon=True)
        self._writer.start()

    def append(self, event: E) -> E:
        """Put an event at the end of the log; it is on disk after the next `flush`, and in order in any case."""
        line = encode(msgspec.structs.replace(event, seq=self._next_seq, time=time.time()))
        # Decoded from the line: subscribers see exactly what a later reader of the file will see.
        stamped: Any = _DECODER.decode(line)
        with self._wake:
            self._check_open()
            self._lines.append(line)
            self._next_seq += 1
            self._wake.notify()
        for callback in self._subscribers:
            callback(stamped)
        written: E = stamped
        return written

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        """Call `callback` with every event from now on, inside its `append`."""
        self._subscribers.append(callback)

    async def flush(self) -> None:
        """Return once everything appended so far is on disk."""
        with self._wake:
            self._check_open()
            done = self._request_flush()
        with translated(TimeoutError, DeadlineExceeded, self._too_slow()):
            async with asyncio.timeout(self._deadline_s):  # wait_for, on Python 3.11, can lose a cancellation
                await asyncio.wrap_future(done)

    def close(self) -> None:
        """Bring everything to disk and release the log to other processes."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            last = [] if self._failure else [self._request_flush()]
        if futures.wait(last, self._deadline_s).not_done:
            raise DeadlineExceeded(self._too_slow())
        self._writer.join()
        os.close(self._fd)
        if self._failure:
            raise self._failure

    def lost_file(self) -> Path | None:
        """The file, if it was deleted, replaced or cut since it was opened."""
        num_bytes, self._num_bytes = self._num_bytes, os.fstat(self._fd).st_size
        return None if is_at(self._fd, self.path) and num_bytes <= self._num_bytes else self.path

    def _request_flush(self) -> "futures.Future[None]":
        done: futures.Future[None] = futures.Future()
        self._flushes.append(done)
        self._wake.notify()
        return done

    def _check_open(self) -> None:
        if self._failure:
            raise self._failure
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def _too_slow(self) -> str:
        return f"writing {self.path} to disk took longer than {self._deadline_s:g} s; check the disk"

    def _write_loop(self) -> None:
        """Consumes appended lines, waits for some or for a flush, produces whole lines in the file."""
        closing = False
        while not closing:
            with self._wake:
                self._wake.wait_for(lambda: self._lines or self._flushes)
                lines, self._lines = self._lines, []
                flushes, self._flushes = self._flushes, []
                closing = self._closed
            try:
                self._write(lines, durable=bool(flushes))
            except Exception as error:  # whatever it is, those who append and flush must get it
                self._fail(error, flushes)
                return
            for done in flushes:
                if done.set_running_or_notify_cancel():
                    done.set_result(None)

    def _write(self, lines: list[bytes], durable: bool) -> None:
        self._before_write()
        with writing(self.path):
            write_all(self._fd, b"".join(lines))
            if durable:
                os.fsync(self._fd)

    def _fail(self, error: Exception, flushes: list["futures.Future[None]"]) -> None:
        with self._wake:
            self._failure = error
            flushes += self._flushes
        for done in flushes:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

    def _cut_torn_tail(self) -> int:
        """Truncate the file to its last whole event and return the next `seq`."""
        next_seq, end = 0, 0
        with ExitStack() as on_error:
            on_error.callback(os.close, self._fd)
            with open(self.path, "rb") as file:
                for found, end in _scan(file, self.path):  # noqa: B007
                    next_seq = found[-1].seq + 1
            if os.fstat(self._fd).st_size > end:
                os.ftruncate(self._fd, end)
            on_error.pop_all()
        return next_seq


def encode(event: Event) -> bytes:
    """An event as its line of JSON."""
    try:
        return _ENCODER.encode(event) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, from a path or from text that user code cut in half
        plain = msgspec.to_builtins(event)
        return _ENCODER.encode(_without_surrogates(plain)) + b"\n"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


def is_being_written(path: Path) -> bool:
    """Whether a live run holds the log at `path`."""
    with suppress(OSError), opened(path) as fd:
        return not _locks(fd)
    return False


def writing(path: Path) -> AbstractContextManager[None]:
    """Raise a failed write to `path` as HeadwayError."""
    sentence = f"cannot write {path}: {CAUSE}; make room or repair the disk, then resume the run"
    return translated(OSError, HeadwayError, sentence)


def _open_locked(path: Path) -> int:
    with translated(OSError, HeadwayError, f"cannot open the event log {path}: {CAUSE}; check run.dir"):
        # Not inheritable (Python's default), so that no worker started later retains the lock of a dead controller.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with ExitStack() as on_error:
        on_error.callback(os.close, fd)
        with translated(OSError, HeadwayError, f"cannot lock the event log {path}: {CAUSE}; choose a local run.dir"):
            if not _locks(fd):
                raise HeadwayError(
                    f"{path} is being written by another run; wait until it ends, stop it, or choose another run.dir"
                )
            fsync_directory(path.parent)
        on_error.pop_all()
    return fd


def _locks(fd: int) -> bool:
    """Lock a log file; False if another process has the lock."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _scan(file: BinaryIO, path: str | Path, num_before: int = 0) -> Iterator[tuple[list[Event], int]]:
    """Yield events, many at a time, with the offset of their end from where the file is read, after `num_before`."""
    start, end, number, lines, data = file.tell(), 0, num_before, b"", b""
    while lines == data and (data := file.read(_BLOCK) + file.readline()):
        lines, found = data[: data.rfind(b"\n") + 1], []  # a last line may be torn, or still being written
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            found = _DECODER.decode_lines(lines)
        if lines.count(b"\n") != len(found) or any(event.seq != at for at, event in enumerate(found, number)):
            file.seek(start + end)
            yield from (([event], end + at) for event, at in _scan_lines(file, path, number))
            return
        end, number = end + len(lines), number + len(found)
        if found:
            yield found, end


def _scan_lines(file: BinaryIO, path: str | Path, num_before: int) -> Iterator[tuple[Event, int]]:
    """Yield events one at a time. A last line that is no JSON is torn; any other one is damage."""
    end = 0
    torn: tuple[int, bytes] | None = None
    for number, line in enumerate(file, num_before + 1):
        if torn is not None:
            raise HeadwayError(_damage(path, *torn))
        if not line.endswith(b"\n"):
            return  # torn by a crash, or still being written
        try:
            event = _DECODER.decode(line)
        except msgspec.ValidationError as error:
            raise HeadwayError(_unknown(path, number, line, error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            torn = number, line
            continue
        if event.seq != number - 1:
            raise HeadwayError(
                f"the event log {path} is damaged at line {number}, which is not event {number - 1}; "
                "restore the file from a copy"
            )
        yield event, (end := end + len(line))


def _damage(path: str | Path, number: int, line: bytes) -> str:
    return f"the event log {path} is damaged at line {number}, which is not a JSON object; restore the file from a copy"


def _unknown(path: str | Path, number: int, line: bytes, error: Exception) -> str:
    """Error sentence for JSON that is no event: written by another version of Headway, or edited."""
    values: Any = None
    with suppress(UnicodeDecodeError, RecursionError):  # what is wrong is then said anyway
        values = msgspec.json.decode(line)
    if number == 1 and isinstance(values, dict) and values.get("format") != FORMAT:
        found = values.get("format", 1)
        return (
            f"the event log {path} has format {found}, and this version of Headway reads format {FORMAT}; "
            "open it with the version that wrote it, or choose another run.dir"
        )
    return f"the event log {path} is damaged at line {number}: {error}; restore the file from a copy"
