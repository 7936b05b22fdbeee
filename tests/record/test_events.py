"""The event log: whole or cut at any byte, with one writer, quick to append to, and never silent about a failure."""

import asyncio
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic import blank

from headway.errors import DeadlineExceeded, HeadwayError
from headway.record import events, log
from headway.record.events import (
    KINDS,
    Admitted,
    Checkpointed,
    Dropped,
    Ended,
    Event,
    FailedTrajectory,
    Finished,
    RunStarted,
    Taken,
    TokenCounts,
    Warned,
)
from headway.record.log import EventLog, read
from headway.types import StopReason

ROOT = Path(__file__).parents[2]

SMALL_RUN: list[Event] = [
    RunStarted(config={"run": {"seed": 0}}, hardware={"cpus": 2}, num_prompts=9, worst_staleness=5, config_hash="c"),
    Admitted(group=0, prompt=0, eta=4, version=0),
    Admitted(group=1, prompt=1, eta=4, version=0),
    Finished(
        group=0,
        shard="groups-00000.bin",
        offset=0,
        num_bytes=321,
        checksum="00ff00ff00ff00ff",
        lengths=(3, 4),
        rewards=(0.0, 1.0),
        stops=(StopReason.STOP, None),
        failures=(FailedTrajectory(2, "verifier: „kaputt“", 5),),
        oldest=0,
        newest=1,
        seconds=0.25,
    ),
    Taken(version=0, groups=(0,)),
    Dropped(groups=(1,), reason="failed", tokens=3),
    Checkpointed(version=1, slot="a", seconds=0.125),
    Ended(status="finished", cause="", tokens=TokenCounts(generated=15)),
]


def admit(log: EventLog, group: int) -> Event:
    return log.append(Admitted(group=group, prompt=group, eta=0, version=0))


def write_small_run(path: Path) -> list[Event]:
    with closing(EventLog(path)) as log:
        return [log.append(event) for event in SMALL_RUN]


def test_every_kind_and_every_field_of_it_is_documented_where_it_is_defined() -> None:
    source = inspect.getsource(events)
    for name, kind in KINDS.items():
        assert kind.__doc__ and kind.__doc__ != Event.__doc__, f"{name} has no docstring"
        assert f"class {kind.__name__}(Event" in source


def test_subscribers_and_readers_see_the_same_events(tmp_path: Path) -> None:
    seen: list[Event] = []
    with closing(EventLog(tmp_path / "log")) as log:
        log.subscribe(seen.append)
        appended = [log.append(event) for event in SMALL_RUN]
        odd = log.append(Warned(message="a\nb\r\x00\u2028é"))
    assert seen == [*appended, odd] == read(tmp_path / "log")
    assert [event.seq for event in seen] == list(range(len(SMALL_RUN) + 1))
    assert odd.message == "a\nb\r\x00\u2028é"


def test_an_event_does_not_change_when_its_maker_changes_the_values(tmp_path: Path) -> None:
    metrics: dict[str, float | None] = {"loss": 1.0}
    with closing(EventLog(tmp_path / "log")) as log:
        event = log.append(blank("trained", metrics=metrics))
        metrics["loss"] = 2.0
    assert event.metrics == {"loss": 1.0} == read(tmp_path / "log")[0].metrics


def test_numbers_that_are_not_finite_become_null_for_everyone(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / "log")) as log:
        event = log.append(blank("trained", metrics={"a": math.nan, "b": math.inf, "c": 1.5}, reward=-math.inf))
    assert event.metrics == {"a": None, "b": None, "c": 1.5} and event.reward is None
    assert read(tmp_path / "log") == [event]
    assert "NaN" not in (tmp_path / "log").read_text()


def test_text_that_utf8_cannot_carry_is_replaced_rather_than_ending_the_run(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / "log")) as log:
        event = log.append(
            Dropped(groups=(1,), reason="a\ud800b", tokens=0, failures=(FailedTrajectory(0, "\udfff", 1),))
        )
    assert (event.reason, event.failures[0].reason) == ("a?b", "?")
    assert read(tmp_path / "log") == [event]


@pytest.mark.parametrize("event", [Taken(version="1", groups=()), Taken(version=1, groups=("x",))])
def test_an_event_of_wrong_types_is_refused_and_leaves_no_gap(tmp_path: Path, event: Event) -> None:
    with closing(EventLog(tmp_path / "log")) as log:
        with pytest.raises(msgspec.ValidationError, match="Expected `int`, got `str`"):
            log.append(event)
        assert admit(log, 0).seq == 0
    assert [event.kind for event in read(tmp_path / "log")] == ["admitted"]


def test_the_log_is_private_to_its_owner(tmp_path: Path) -> None:
    write_small_run(tmp_path / "log")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_invariant_14_a_log_cut_at_any_byte_keeps_its_whole_events_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    written = write_small_run(whole)
    data = whole.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of them; durability is not what this test is about
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        num_whole = data[:size].count(b"\n")
        assert read(cut) == written[:num_whole]
        with closing(EventLog(cut)) as log:
            after = admit(log, 7)
        assert after.seq == num_whole
        assert read(cut) == [*written[:num_whole], after]


@pytest.mark.parametrize("tail", [b"\x00" * 40, b'{"seq": 8, "ti\n', b"\xff\xfe\n", b"\n"])
def test_garbage_at_the_very_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    written = write_small_run(tmp_path / "log")
    with open(tmp_path / "log", "ab") as file:
        file.write(tail)
    assert read(tmp_path / "log") == written
    with closing(EventLog(tmp_path / "log")) as log:
        after = admit(log, 7)
    assert read(tmp_path / "log") == [*written, after]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda lines: lines[2][:9] + b"\n", id="torn in the middle"),
        pytest.param(lambda lines: b"\xff" * len(lines[2]), id="overwritten, its newline too"),
        pytest.param(lambda lines: lines[1], id="a line twice"),
        pytest.param(lambda lines: b"", id="a line lost"),
        pytest.param(lambda lines: b"[]\n", id="not an object"),
        pytest.param(lambda lines: lines[2].replace(b'"eta"', b'"ate"'), id="another version's fields"),
        pytest.param(lambda lines: lines[2].replace(b"admitted", b"adopted"), id="another version's kind"),
        pytest.param(lambda lines: lines[2].replace(b'"eta":4', b'"eta":"four"'), id="a wrongly typed field"),
        pytest.param(lambda lines: lines[2].replace(b',"eta":4', b""), id="a missing field"),
        pytest.param(lambda lines: lines[2].replace(b'"eta"', b'"et\xff"'), id="a name that is no text"),
        pytest.param(lambda lines: b"[" * 100_000 + b"\n", id="deeper than can be read"),
    ],
)
@pytest.mark.parametrize("block", [1, log._BLOCK])
def test_damage_in_the_middle_is_named_and_never_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, block: int
) -> None:
    monkeypatch.setattr(log, "_BLOCK", block)  # whatever lies before the damage in a block of lines, or nothing
    path = tmp_path / "log"
    write_small_run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = damage(lines)
    path.write_bytes(b"".join(lines))
    with pytest.raises(HeadwayError, match=f"{path} is damaged at line 3"):
        read(path)
    with pytest.raises(HeadwayError, match=f"{path} is damaged at line 3"):
        EventLog(path)
    assert path.read_bytes() == b"".join(lines)
    path.write_bytes(lines[0])
    EventLog(path).close()  # the refused opening kept no lock


def test_a_log_that_is_being_written_is_refused_to_a_second_writer_but_not_to_readers(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with closing(EventLog(path)) as log:
        admit(log, 0)
        with pytest.raises(HeadwayError, match="is being written by another run"):
            EventLog(path)
        asyncio.run(log.flush())
        assert len(read(path)) == 1
        with pytest.raises(HeadwayError, match="is being written by another run"):
            EventLog(path)  # reading it in the same process has not dropped the lock
    EventLog(path).close()


def test_a_log_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"cannot open the event log .*No such file or directory"):
        EventLog(tmp_path / "nowhere" / "log")
    with pytest.raises(HeadwayError, match=r"cannot read the event log .*No such file or directory"):
        read(tmp_path / "nowhere")


class SlowDisk:
    """A `before_write` that says when the writer has come to it and holds it there until released."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.released.wait(30)


def test_invariant_14_no_event_is_written_before_what_it_names_is_durable(tmp_path: Path) -> None:
    disk = SlowDisk()
    with closing(EventLog(tmp_path / "log", before_write=disk)) as log:
        admit(log, 0)
        assert disk.reached.wait(30)
        assert (tmp_path / "log").read_bytes() == b""
        disk.released.set()
        asyncio.run(log.flush())
        assert len(read(tmp_path / "log")) == 1


def test_invariant_13_appending_does_not_wait_for_a_disk_that_stands_still(tmp_path: Path) -> None:
    disk = SlowDisk()
    with closing(EventLog(tmp_path / "log", before_write=disk)) as log:
        for group in range(1000):
            admit(log, group)
        assert (tmp_path / "log").read_bytes() == b""
        disk.released.set()
    assert [event.group for event in read(tmp_path / "log")] == list(range(1000))


def test_flush_returns_after_an_fsync_of_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    synced: list[int] = []
    fsync = os.fsync

    def spy(fd: int) -> None:
        fsync(fd)
        synced.append(os.fstat(fd).st_size)

    with closing(EventLog(path)) as log:
        monkeypatch.setattr(os, "fsync", spy)
        for group in range(3):
            admit(log, group)
            asyncio.run(log.flush())
            assert synced[-1] == path.stat().st_size
            assert len(read(path)) == group + 1


def test_invariant_15_flush_gives_up_at_its_deadline_and_names_the_file(tmp_path: Path) -> None:
    disk = SlowDisk()
    log = EventLog(tmp_path / "log", before_write=disk, deadline_s=0.05)
    admit(log, 0)
    with pytest.raises(DeadlineExceeded, match=f"{tmp_path / 'log'} to disk took longer than 0.05 s"):
        asyncio.run(log.flush())
    with pytest.raises(DeadlineExceeded, match="took longer"):
        log.close()
    disk.released.set()


def test_a_cancelled_flush_does_not_stop_the_writer(tmp_path: Path) -> None:
    disk = SlowDisk()

    async def cancel_one() -> None:
        flush = asyncio.create_task(log.flush())
        await asyncio.to_thread(disk.reached.wait, 30)
        flush.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flush
        disk.released.set()
        await log.flush()

    with closing(EventLog(tmp_path / "log", before_write=disk)) as log:
        admit(log, 0)
        asyncio.run(cancel_one())
        assert len(read(tmp_path / "log")) == 1


def test_a_failure_of_the_writer_reaches_flush_append_and_close(tmp_path: Path) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    log = EventLog(tmp_path / "log", before_write=broken)
    admit(log, 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(log.flush())
    with pytest.raises(ZeroDivisionError):
        admit(log, 1)
    with pytest.raises(ZeroDivisionError):
        log.close()
    log.close()
    assert read(tmp_path / "log") == []
    EventLog(tmp_path / "log").close()  # the lock was released


FULL_DISK = """
import asyncio, resource, sys
from headway.errors import HeadwayError
from headway.record.events import Admitted
from headway.record.log import EventLog

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
log = EventLog(sys.argv[1])
for attempt in range(2):
    try:
        for group in range(100):
            log.append(Admitted(group=group, prompt=group, eta=0, version=0))
        asyncio.run(log.flush())
    except HeadwayError as error:
        print(error)
"""


def test_a_full_disk_is_reported_with_its_path_and_cause_and_the_log_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "log"
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (
        told.stdout.splitlines()
        == [f"cannot write {path}: File too large; make room or repair the disk, then resume the run"] * 2
    ), told.stderr
    assert path.stat().st_size == 1000
    kept = read(path)
    assert [event.group for event in kept] == list(range(path.read_bytes().count(b"\n")))
    with closing(EventLog(path)) as log:
        assert admit(log, 0).seq == len(kept)


def test_a_closed_log_takes_nothing_more(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        admit(log, 0)
    with pytest.raises(ValueError, match="closed"):
        asyncio.run(log.flush())


def test_appending_an_event_costs_its_caller_microseconds(tmp_path: Path) -> None:
    durations = []
    with closing(EventLog(tmp_path / "log")) as log:
        for _ in range(5000):
            started = time.perf_counter()
            log.append(SMALL_RUN[3])
            durations.append(time.perf_counter() - started)
    assert statistics.median(durations) < 200e-6
    assert len(read(tmp_path / "log")) == 5000


def test_every_line_is_plain_json_with_its_head_first(tmp_path: Path) -> None:
    write_small_run(tmp_path / "log")
    for seq, line in enumerate((tmp_path / "log").read_text().splitlines()):
        values = json.loads(line)
        assert list(values)[:3] == ["kind", "seq", "time"] and values["seq"] == seq
