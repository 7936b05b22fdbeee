"""The run's append-only log: what happened, in order. Resume, replay, metrics and the viewer read it and nothing else.

One JSON object a line: `seq` (from 0, without gaps), `time` (unix seconds), `kind`, and the fields of that kind. A
number that is not finite is written as null. The controller is the only writer.

  run_started   config, hardware, num_prompts, worst_staleness (null: no bound), config_hash
  resumed       version, checkpoint_version, num_regenerated (groups begun again), lost_tokens
  admitted      group, prompt (row), eta, version; a group begun again after a resume is not admitted a second time
  finished      group, shard, offset, num_bytes, checksum (where its bytes lie), tokens (sampled, of its trajectories),
                reward (mean, or null), lengths (sampled tokens per trajectory), stops (reason to count),
                failures ([trajectory, reason, tokens] each), oldest, newest (versions, or null), seconds
  dropped       groups, reason, tokens
  taken         version (the weights being trained), groups (in id order)
  trained       version (the new one), groups, tokens (sampled), started, seconds, wait_s (the trainer's, for this
                batch), staleness_mean, staleness_max, reward, metrics (name to number), digest (of all new weights);
                a batch trained again after a resume is neither taken nor trained a second time in the log
  skipped       version (unchanged), groups (they leave here, as dropped for being non-finite), reason
  swapped       version, engine, stage_s, pause_ms, interrupted, recomputed, parity_max_abs
  stats         engine, version, running, waiting, num_generated, num_prefilled, num_recomputed, num_preempted, busy_s,
                kv_used, kv_total, inflight, ready (groups), admission_wait_s, trainer_wait_s; counters start with the
                engine's process; num_generated counts training only; each engine's last one, before `ended`, is final
  evaluated     label (before, step, after), version, version_last, accuracy, num, mean_tokens, seconds
  checkpointed  version, slot (a, b), seconds
  checkpoint_failed  version, slot, cause; the slot's older checkpoint stays, and the next occasion tries again
  worker_lost   worker, cause, groups (begun again elsewhere, under their own ids); a start that fails is a loss too
  worker_restarted  worker, life (how often it was lost), seconds (it was away); it serves again from here
  continued     engine (the one lost or left), requests (that go on elsewhere), tokens (they bring), seconds (the
                longest of them was nowhere)
  joined        engine, version (proved); it was asked for while the run went on, and serves from here
  left          engine, cause (why it serves no more and is not replaced)
  slow          engine, tokens_per_s, others_per_s (per running sequence)
  ended         status (finished, failed, stopped), cause, ledger

Invariants that live here:
 13. Non-blocking generation, logging included: an append costs microseconds, a thread does the writing.
 14. Crash safety: what an event names was made durable before the event was written, and a line torn by the
     crash is cut off when the log is opened again.
"""

import asyncio
import concurrent.futures as futures
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headway.errors import DeadlineExceeded, HeadwayError
from headway.files import fsync_directory, write_all

SCHEMA: dict[str, frozenset[str]] = {
    kind: frozenset(fields.split())
    for kind, fields in {
        "run_started": "config hardware num_prompts worst_staleness config_hash",
        "resumed": "version checkpoint_version num_regenerated lost_tokens",
        "admitted": "group prompt eta version",
        "finished": "group shard offset num_bytes checksum tokens reward lengths stops failures oldest newest seconds",
        "dropped": "groups reason tokens",
        "taken": "version groups",
        "trained": "version groups tokens started seconds wait_s staleness_mean staleness_max reward metrics digest",
        "skipped": "version groups reason",
        "swapped": "version engine stage_s pause_ms interrupted recomputed parity_max_abs",
        "stats": "engine version running waiting num_generated num_prefilled num_recomputed num_preempted busy_s "
        "kv_used kv_total inflight ready admission_wait_s trainer_wait_s",
        "evaluated": "label version version_last accuracy num mean_tokens seconds",
        "checkpointed": "version slot seconds",
        "checkpoint_failed": "version slot cause",
        "worker_lost": "worker cause groups",
        "worker_restarted": "worker life seconds",
        "continued": "engine requests tokens seconds",
        "joined": "engine version",
        "left": "engine cause",
        "slow": "engine tokens_per_s others_per_s",
        "ended": "status cause ledger",
    }.items()
}


@dataclass(frozen=True)
class Event:
    seq: int
    time: float
    kind: str
    fields: Mapping[str, Any]

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]


def read(path: str | Path) -> list[Event]:
    """Every whole event of a log; a torn last line, which a crash can leave, is passed over."""
    try:
        with open(path, "rb") as file:
            return [event for event, _ in _scan(file, path)]
    except OSError as error:
        raise HeadwayError(f"cannot read the event log {path}: {error.strerror}; is this a run directory?") from error


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
        self._subscribers: list[Callable[[Event], None]] = []
        self._wake = threading.Condition()  # guards the four that follow
        self._lines: list[str] = []
        self._flushes: list[futures.Future[None]] = []
        self._failure: Exception | None = None
        self._closed = False
        self._writer = threading.Thread(target=self._write_loop, name=f"write {self.path.name}", daemon=True)
        self._writer.start()

    def append(self, kind: str, /, **fields: Any) -> Event:
        """Put an event at the end of the log; it is on disk after the next `flush`, and in order in any case."""
        _check_schema(kind, fields.keys())
        head = {"seq": self._next_seq, "time": time.time(), "kind": kind}
        line = _to_line(head | fields)
        # Read back from the line: subscribers see exactly what a later reader of the file will see.
        event = _to_event(json.loads(line))
        with self._wake:
            self._check_open()
            self._lines.append(line)
            self._next_seq += 1
            self._wake.notify()
        for tell in self._subscribers:
            tell(event)
        return event

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        """Have `callback` called with every event from now on, inside the `append` that makes it."""
        self._subscribers.append(callback)

    async def flush(self) -> None:
        """Return once everything appended so far is on disk."""
        with self._wake:
            self._check_open()
            done = self._request_flush()
        try:
            async with asyncio.timeout(self._deadline_s):  # wait_for, on Python 3.11, can lose a cancellation
                await asyncio.wrap_future(done)
        except TimeoutError:
            raise self._too_slow() from None

    def close(self) -> None:
        """Bring everything to disk and release the log to other processes."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            last = [] if self._failure else [self._request_flush()]
        if futures.wait(last, self._deadline_s).not_done:
            raise self._too_slow()
        self._writer.join()
        os.close(self._fd)
        if self._failure:
            raise self._failure

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

    def _too_slow(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"writing {self.path} to disk took longer than {self._deadline_s:g} s; check the disk")

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
            except Exception as error:  # whatever it is, those who append and flush must hear of it
                self._fail(error, flushes)
                return
            for done in flushes:
                if done.set_running_or_notify_cancel():
                    done.set_result(None)

    def _write(self, lines: list[str], durable: bool) -> None:
        self._before_write()
        try:
            write_all(self._fd, "".join(lines).encode())
            if durable:
                os.fsync(self._fd)
        except OSError as error:
            raise cannot_write(self.path, error) from error

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
        try:
            with open(self.path, "rb") as file:
                for event, end in _scan(file, self.path):  # noqa: B007
                    next_seq = event.seq + 1
            if os.fstat(self._fd).st_size > end:
                os.ftruncate(self._fd, end)
        except BaseException:
            os.close(self._fd)
            raise
        return next_seq


def is_being_written(path: Path) -> bool:
    """Whether some process, a run that goes on, holds the log at `path`."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def cannot_write(path: Path, error: OSError) -> HeadwayError:
    return HeadwayError(f"cannot write {path}: {error.strerror}; make room or repair the disk, then resume the run")


def _open_locked(path: Path) -> int:
    try:
        # Not inheritable (Python's default), so that no worker started later keeps the lock of a dead controller.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise HeadwayError(f"cannot open the event log {path}: {error.strerror}; check run.dir") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fsync_directory(path.parent)
    except BlockingIOError:
        os.close(fd)
        raise HeadwayError(
            f"{path} is being written by another run; wait until it ends, stop it, or choose another run.dir"
        ) from None
    except OSError as error:
        os.close(fd)
        raise HeadwayError(f"cannot lock the event log {path}: {error.strerror}; choose a local run.dir") from error
    return fd


def _scan(file: BinaryIO, path: str | Path) -> Iterator[tuple[Event, int]]:
    """Whole events, each with the offset of its end. A line that is no JSON is torn if it is the last, else damage."""
    end, damage = 0, ""
    for number, line in enumerate(file, 1):
        if damage:
            raise HeadwayError(damage)
        where = f"the event log {path} is damaged at line {number}"
        try:
            values = json.loads(line.decode()) if line.endswith(b"\n") else None
        except ValueError:
            values = None
        if values is None:
            damage = f"{where}, which is not a JSON object; restore the file from a copy"
            continue
        yield _checked_event(values, number - 1, where), (end := end + len(line))


def _checked_event(values: Any, seq: int, where: str) -> Event:
    if not isinstance(values, dict) or values.get("seq") != seq or not isinstance(values.get("time"), int | float):
        raise HeadwayError(f"{where}, which is not event {seq}; restore the file from a copy")
    event = _to_event(values)
    try:
        _check_schema(event.kind, event.fields.keys())
    except ValueError as error:
        raise HeadwayError(f"{where}: {error}; was it written by another version of Headway?") from None
    return event


def _to_event(values: dict[str, Any]) -> Event:
    return Event(values.pop("seq"), values.pop("time"), values.pop("kind", ""), values)


def _check_schema(kind: str, fields: Iterable[str]) -> None:
    if kind not in SCHEMA:
        raise ValueError(f"unknown kind of event {kind!r}")
    if SCHEMA[kind] != set(fields):
        missing, unknown = sorted(SCHEMA[kind] - set(fields)), sorted(set(fields) - SCHEMA[kind])
        raise ValueError(f"event {kind} lacks the fields {missing} and has the unknown fields {unknown}")


def _to_line(values: dict[str, Any]) -> str:
    try:
        line = json.dumps(values, allow_nan=False)
    except ValueError:
        line = json.dumps(_finite(values), allow_nan=False)
    return line + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
