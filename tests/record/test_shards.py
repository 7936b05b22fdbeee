"""The record: groups come back bit for bit, damage is refused, and no event ever names bytes that are not there."""

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from headway import codec
from headway.errors import ConfigError, HeadwayError
from headway.record.events import Admitted, FailedTrajectory, Resumed
from headway.record.log import EVENTS_NAME, read
from headway.record.run import Run, fold
from headway.record.shards import RECORD_NAME, Record, RunLog, read_jsonl, write_jsonl
from headway.types import (
    NOT_SAMPLED,
    Failure,
    Group,
    Reward,
    Sequence,
    StopReason,
    Trajectory,
)

ROOT = Path(__file__).parents[2]


def make_group(id: int, size: int = 4, num_tokens: int = 24, num_failed: int = 0) -> Group:
    """The group that belongs to this id: anyone can make it again and compare."""
    random = np.random.default_rng(id)
    trajectories = []
    for index in range(size - num_failed):
        versions = np.repeat(np.array([NOT_SAMPLED, id, id + 1], np.int32), num_tokens // 3)
        sequence = Sequence(
            tokens=random.integers(0, 1000, len(versions)).astype(np.int32),
            loss_mask=(versions != NOT_SAMPLED).astype(np.float32),
            logprobs=-random.random(len(versions)).astype(np.float32),
            versions=versions,
        )
        rewards = (Reward(0, len(versions) - 1, float(index % 2)),)
        parts = {"right": float(index % 2), "short": 0.1 * index}
        trajectories.append(Trajectory(index, (sequence,), rewards, 0.7, (StopReason.STOP,), parts))
    failures = tuple(Failure(size - 1 - index, "verifier: broke", 5) for index in range(num_failed))
    return Group(id, id, 4, size, tuple(trajectories), failures)


def same(left: Group, right: Group) -> bool:
    return codec.encode(left) == codec.encode(right)


def test_groups_come_back_bit_for_bit_from_several_shards(tmp_path: Path) -> None:
    with closing(Record(tmp_path, shard_bytes=5000)) as record:
        refs = []
        for id in range(20):
            refs.append(record.append(make_group(id)))
            if id % 7 == 0:
                record.fsync()
        record.fsync()
    assert len({ref.shard for ref in refs}) > 3
    assert all(path.stat().st_size < 5000 + 3000 for path in tmp_path.iterdir())
    assert all(same(record.load(ref), make_group(id)) for id, ref in enumerate(refs))


def test_full_shards_are_closed(tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    with closing(Record(tmp_path, shard_bytes=1)) as record:
        for id in range(50):
            record.append(make_group(id))
            if id % 3 == 0:
                record.fsync()
        record.fsync()
        assert len(list(tmp_path.iterdir())) == 50
        assert len(os.listdir("/proc/self/fd")) == open_before + 1
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_later_process_leaves_the_bytes_of_an_earlier_one_alone(tmp_path: Path) -> None:
    with closing(Record(tmp_path)) as record:
        first = record.append(make_group(0))
        record.fsync()
    with open(tmp_path / first.shard, "ab") as file:
        file.write(b"bytes of a write that a crash cut short")
    before = (tmp_path / first.shard).read_bytes()
    with closing(Record(tmp_path)) as record:
        second = record.append(make_group(1))
        record.fsync()
        assert same(record.load(first), make_group(0)) and same(record.load(second), make_group(1))
    assert (tmp_path / first.shard).read_bytes() == before


def test_any_flipped_byte_is_refused_with_file_and_offset(tmp_path: Path) -> None:
    with closing(Record(tmp_path)) as record:
        record.append(make_group(0, num_tokens=3))
        ref = record.append(make_group(1, size=1, num_tokens=3))
        record.fsync()
    path = tmp_path / ref.shard
    data = path.read_bytes()
    for index in range(ref.offset, len(data)):
        path.write_bytes(data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :])
        with pytest.raises(HeadwayError, match=f"{path} is damaged at byte {ref.offset}"):
            record.load(ref)
    path.write_bytes(data[:-1])
    with pytest.raises(HeadwayError, match=f"{path} is damaged at byte {ref.offset}"):
        record.load(ref)
    path.unlink()
    with pytest.raises(HeadwayError, match=f"cannot read {path}: No such file"):
        record.load(ref)


def test_a_finished_event_says_what_its_group_holds(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path)) as log:
        event = log.finished(make_group(3, num_failed=1), seconds=1.5)
        empty = log.finished(make_group(4, size=2, num_failed=2), seconds=0.5)
    assert (event.group, event.tokens, event.lengths, event.seconds) == (3, 48, (16, 16, 16), 1.5)
    assert (event.rewards, event.reward, event.stops) == ((0.0, 1.0, 0.0), 1 / 3, (StopReason.STOP,) * 3)
    assert event.failures == (FailedTrajectory(3, "verifier: broke", 5),)
    assert (event.oldest, event.newest) == (3, 4)
    assert (empty.reward, empty.oldest, empty.newest, empty.lengths, empty.tokens) == (None, None, None, (), 0)
    assert read(tmp_path / EVENTS_NAME) == [event, empty]
    assert same(log.record.load(event.place), make_group(3, num_failed=1))


def test_invariant_14_bytes_are_fsynced_before_the_event_that_names_them_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watches the system calls: whenever the log grows, every byte its events name has been through an fsync."""
    write, fsync = os.write, os.fsync
    durable: dict[str, int] = {}
    num_checked = 0

    def name_of(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    def watched_fsync(fd: int) -> None:
        size = os.fstat(fd).st_size
        fsync(fd)
        durable[name_of(fd)] = size

    def watched_write(fd: int, data: Any) -> int:
        nonlocal num_checked
        if name_of(fd) == EVENTS_NAME:
            for event in map(json.loads, bytes(data).splitlines()):
                assert durable[event["shard"]] >= event["offset"] + event["num_bytes"]
                num_checked += 1
        return write(fd, data)

    monkeypatch.setattr(os, "write", watched_write)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    with closing(RunLog(tmp_path)) as log:
        for id in range(500):
            log.finished(make_group(id), seconds=0.0)
    assert num_checked == 500
    assert RECORD_NAME in durable  # the shard's name too


def test_a_locked_run_directory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path / "run")), pytest.raises(HeadwayError, match="is being written by another run"):
        RunLog(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [EVENTS_NAME]


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(HeadwayError, match=r"cannot make the run directory .*run"):
        RunLog(tmp_path / "run")


def small_group(id: int) -> Group:
    return make_group(id, size=2, num_tokens=6, num_failed=id % 2)


def run_endlessly(directory: str) -> None:
    """An incarnation of a run, from where the last one was killed, and finishes two groups of every three."""
    log = RunLog(directory)
    state = Run.read(directory)
    log.subscribe(state.on_event)
    if state.groups:
        regenerated = state.unfinished
        log.append(Resumed(version=0, checkpoint_version=0, num_regenerated=len(regenerated), lost_tokens=0))
        for group in regenerated:
            log.finished(small_group(group), seconds=0.0)
    for num_done in itertools.count():
        if num_done == 12:  # eight of them finished and on disk, however slow the machine is
            asyncio.run(log.flush())
            os.write(1, b"ready\n")
        group = len(state.groups)
        log.append(Admitted(group=group, prompt=group, eta=0, version=0))
        if group % 3:
            log.finished(small_group(group), seconds=0.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_invariant_14_killed_at_any_moment_every_named_group_is_whole(tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    num_finished = 0
    program = (
        "import sys; sys.path[:0] = ['tests/record', 'tests/support', 'tests']\n"
        "import test_shards; test_shards.run_endlessly(sys.argv[1])"
    )
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0.0, 0.1))  # not to wait for anything: the moment is what the test varies
        process.kill()
        process.communicate()
        events = read(tmp_path / EVENTS_NAME)
        state = fold(events)  # refuses gaps among the ids and groups finished twice
        record = Record(tmp_path / RECORD_NAME)
        finished = {group.id: group.ref for group in state.groups if group.ref}
        for group, ref in finished.items():
            assert same(record.load(ref), small_group(group))
        state.check_tokens()
        assert len(finished) >= num_finished
        num_finished = len(finished)
    assert num_finished > 20
    shards = sorted((tmp_path / RECORD_NAME).iterdir())
    assert len(shards) > 1 and {path.name for path in shards} >= {ref.shard for ref in finished.values()}


FULL_DISK = """
import asyncio, resource, sys
sys.path[:0] = ["tests/record", "tests/support", "tests"]
from test_shards import make_group
from headway.errors import HeadwayError
from headway.record.shards import RunLog

resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
log = RunLog(sys.argv[1])
try:
    for group in range(100):
        log.finished(make_group(group), seconds=0.0)
    asyncio.run(log.flush())
except HeadwayError as error:
    print(error)
try:
    log.close()
except HeadwayError as error:
    print(error)
"""


def test_a_disk_that_fills_up_under_the_record_is_reported_and_names_only_whole_groups(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    shard = tmp_path / RECORD_NAME / "groups-00000.bin"
    assert (
        told.stdout.splitlines()
        == [f"cannot write {shard}: File too large; make room or repair the disk, then resume the run"] * 2
    ), told.stderr
    assert told.stderr == ""
    record = Record(tmp_path / RECORD_NAME)
    for event in read(tmp_path / EVENTS_NAME):
        assert same(record.load(event.place), make_group(event.group))


def test_ten_thousand_groups_cost_the_caller_well_under_a_millisecond_each(tmp_path: Path) -> None:
    groups = [make_group(id) for id in range(100)]
    with closing(RunLog(tmp_path)) as log:
        started = time.thread_time()
        for index in range(10_000):
            log.finished(groups[index % 100], seconds=0.0)
        caller_s = time.thread_time() - started
        asyncio.run(log.flush())
    events = read(tmp_path / EVENTS_NAME)
    assert len(events) == 10_000
    assert same(log.record.load(events[-1].place), groups[99])
    assert caller_s / 10_000 < 1e-3


ints = st.integers(-(2**31), 2**31 - 1)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
doubles = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    length = draw(st.integers(1, 5))
    whole, real = stn.arrays(np.int32, length, elements=ints), stn.arrays(np.float32, length, elements=float32s)
    versions, bits = draw(whole), draw(stn.arrays(np.bool_, length))
    trained = bits & (versions != NOT_SAMPLED) & (np.arange(length) > 0)
    return Sequence(draw(whole), trained.astype(np.float32), draw(real), versions)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    made = draw(st.lists(sequences(), min_size=1, max_size=2))
    place = st.integers(0, len(made) - 1).flatmap(
        lambda number: st.builds(Reward, st.just(number), st.integers(0, len(made[number].tokens) - 1), doubles)
    )
    rewards, stops = draw(st.lists(place, max_size=2)), draw(st.lists(st.sampled_from(StopReason), max_size=2))
    return Trajectory(draw(st.integers(0, 99)), tuple(made), tuple(rewards), draw(doubles), tuple(stops))


@st.composite
def grouped(draw: st.DrawFn) -> list[Group]:
    ids = draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=3, unique=True))
    failure = st.builds(Failure, st.integers(0, 99), st.text(), st.integers(0, 10**6))
    groups = []
    for id in ids:
        made, failures = draw(st.lists(trajectories(), max_size=2)), draw(st.lists(failure, max_size=2))
        size = len(made) + len(failures)
        groups.append(Group(id, draw(st.integers(0, 99)), draw(st.integers(0, 9)), size, tuple(made), tuple(failures)))
    return groups


@settings(max_examples=60, deadline=None)
@given(groups=grouped())
def test_jsonl_brings_every_bit_back(tmp_path_factory: pytest.TempPathFactory, groups: list[Group]) -> None:
    path = tmp_path_factory.getbasetemp() / "groups.jsonl"
    assert write_jsonl(path, groups) == len(groups)
    for before, after in zip(groups, read_jsonl(path), strict=True):
        assert codec.encode(before) == codec.encode(after)


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("id",), "7", "id is not a whole number"),
        (("id",), True, "id is not a whole number"),
        (("id",), 2**70, "id is not a whole number"),
        (("id",), 0, "id 0 was on an earlier line"),
        (("size",), 5, "the group cannot be: group 1: 4 trajectories and 0 failures, not 5"),
        (("colour",), 1, "unknown field colour; known are id, prompt_index"),
        (("trajectories",), {}, "trajectories is not a list"),
        (("trajectories", 1), [], r"trajectories\[1\] is not an object"),
        (("trajectories", 1, "temperature"), float("nan"), r"trajectories\[1\].temperature is not a finite number"),
        (("trajectories", 1, "temperature"), 10**400, r"trajectories\[1\].temperature is not a finite number"),
        (("trajectories", 1, "stops", 0), "tired", r"stops\[0\] is not one of stop, length, context, aborted"),
        (("trajectories", 1, "stops", 0), [], r"stops\[0\] is not one of stop, length, context, aborted"),
        (("trajectories", 1, "rewards", 0, "position"), 99, r"trajectories\[1\] cannot be: reward at position 99"),
        (("trajectories", 1, "rewards", 0, "value"), None, r"rewards\[0\].value is not a finite number"),
        (("trajectories", 1, "sequences", 0, "tokens"), "abc", r"sequences\[0\].tokens is not a list of numbers"),
        (("trajectories", 1, "sequences", 0, "tokens"), [], r"sequences\[0\] cannot be: Sequence: lengths differ"),
        (("trajectories", 1, "sequences", 0, "tokens", 3), 1.5, r"tokens\[3\] is not a 32-bit whole number"),
        (("trajectories", 1, "sequences", 0, "tokens", 3), 2**31, r"tokens\[3\] is not a 32-bit whole number"),
        (("trajectories", 1, "sequences", 0, "logprobs", 3), None, r"logprobs\[3\] is not a finite 32-bit number"),
        (("trajectories", 1, "sequences", 0, "logprobs", 3), float("-inf"), r"logprobs\[3\] is not a finite 32-bit"),
        (("trajectories", 1, "sequences", 0, "logprobs", 3), 1e39, r"logprobs\[3\] is not a finite 32-bit number"),
        (("trajectories", 1, "sequences", 0, "loss_mask", 3), [1], r"loss_mask\[3\] is not a finite 32-bit number"),
    ],
)
def test_a_line_that_cannot_be_a_group_is_refused_by_line_and_field(
    tmp_path: Path, place: tuple[str | int, ...], value: Any, sentence: str
) -> None:
    path = tmp_path / "groups.jsonl"
    write_jsonl(path, [make_group(0), make_group(1)])
    first, second = map(json.loads, path.read_text().splitlines())
    inner = second
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    with pytest.raises(ConfigError, match=f"{path} line 2: .*{sentence}"):
        read_jsonl(path)


def test_a_missing_field_a_torn_line_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    write_jsonl(path, [make_group(0)])
    line = path.read_text()
    path.write_text(line.replace('"versions"', '"ages"', 1))
    with pytest.raises(ConfigError, match=rf"{path} line 1: trajectories\[0\].sequences\[0\].versions is missing"):
        read_jsonl(path)
    path.write_text(line[:-20])
    with pytest.raises(ConfigError, match=f"{path} line 1 is not a JSON object"):
        read_jsonl(path)
    path.write_text("")
    with pytest.raises(ConfigError, match=f"{path} holds no groups"):
        read_jsonl(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"cannot read groups from {path}"):
        read_jsonl(path)
    with pytest.raises(ConfigError, match=r"cannot read groups from .*nowhere"):
        read_jsonl(tmp_path / "nowhere")


def test_a_jsonl_that_could_not_be_completed_does_not_appear(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    sequence = make_group(1, size=1).trajectories[0].sequences[0]
    sequence.logprobs[0] = np.nan
    not_finite = Group(1, 1, 0, 1, (Trajectory(0, (sequence,), (), 1.0, ()),))
    with pytest.raises(HeadwayError, match="group 1 holds a number that is not finite"):
        write_jsonl(path, [make_group(0), not_finite])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HeadwayError, match=r"cannot write .*groups.jsonl: No such file"):
        write_jsonl(tmp_path / "nowhere" / "groups.jsonl", [])
