"""The record: finished groups in binary shards for resume and replay, and as JSONL for interchange.

A shard is a sequence of entries, each a length and that many codec bytes. Only the process that created a shard appends
to it; a later process starts a new one, so bytes that a crash left without an event are never read.

Invariants that live here:
 14. Crash safety: a finished group's bytes are fsynced before the event that names them is written.
 16. Replay: what was trained is read back bit for bit, or refused with the place of the damage.
"""

import dataclasses
import functools
import json
import os
import struct
import sys
import typing
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import xxhash

from headway import codec
from headway.errors import CAUSE, ConfigError, HeadwayError, translated
from headway.files import fsync_directory, is_at, write_all
from headway.record.events import FailedTrajectory, Finished, Place
from headway.record.log import EVENTS_NAME, EventLog, writing
from headway.trained_tokens import TrainedTokens
from headway.types import NOT_SAMPLED, Batch, Floats, Group, Ints

SHARD_BYTES = 64 * 2**20
RECORD_NAME = "record"

_LENGTH = struct.Struct("<Q")
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(eq=False)
class _Shard:
    path: Path
    fd: int
    num_bytes: int = 0
    named: bool = False  # its directory entry is durable


class Record:
    """The shards of one run. `append` returns a group's position at once; `fsync` writes it there durably.

    One thread appends; another may fsync. Call `fsync` before naming a group anywhere that outlives the process.
    """

    def __init__(self, directory: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory = Path(directory)
        self._shard_bytes = shard_bytes
        self._shard: _Shard | None = None
        self._pending: deque[tuple[_Shard, bytes | None]] = deque()  # None: the shard is full

    def append(self, entry: Group | TrainedTokens | Batch) -> Place:
        data = codec.encode(entry)
        if self._shard is None or self._shard.num_bytes >= self._shard_bytes:
            self._start_shard()
        shard = self._shard
        assert shard is not None
        place = Place(shard.path.name, shard.num_bytes, len(data), xxhash.xxh3_64_hexdigest(data))
        shard.num_bytes += _LENGTH.size + len(data)
        self._pending.append((shard, data))
        return place

    def fsync(self) -> None:
        """Write everything appended so far, with one fsync for each shard written to (nearly always one)."""
        parts: dict[_Shard, list[bytes]] = {}
        full: list[_Shard] = []
        while self._pending:
            shard, data = self._pending.popleft()
            if data is None:
                full.append(shard)
            else:
                parts.setdefault(shard, []).extend((_LENGTH.pack(len(data)), data))
        for shard in parts:
            self._write(shard, b"".join(parts[shard]))
        for shard in full:
            os.close(shard.fd)

    def _write(self, shard: _Shard, data: bytes) -> None:
        with writing(shard.path):
            write_all(shard.fd, data)
            os.fsync(shard.fd)
            if not shard.named:
                fsync_directory(self.directory)
                fsync_directory(self.directory.parent)
                shard.named = True

    def load(self, place: Place) -> Group:
        """Read a group, after `fsync`; damaged bytes raise."""
        group = self._load(place)
        assert isinstance(group, Group)
        return group

    def load_tokens(self, place: Place) -> TrainedTokens:
        """Read the per-token values of a training step."""
        tokens = self._load(place)
        assert isinstance(tokens, TrainedTokens)
        return tokens

    def load_batch(self, place: Place) -> Batch:
        """Read the groups of an evaluation."""
        batch = self._load(place)
        assert isinstance(batch, Batch)
        return batch

    def _load(self, place: Place) -> Any:
        path = self.directory / place.shard
        if path.parent != self.directory:
            raise HeadwayError(f"the event log names {place.shard!r} as a shard, which is outside {self.directory}")
        with (
            translated(OSError, HeadwayError, f"cannot read {path}: {CAUSE}; restore it from a copy of the run"),
            open(path, "rb") as file,
        ):
            file.seek(place.offset)
            entry = file.read(_LENGTH.size + place.num_bytes)
        data = entry[_LENGTH.size :]
        whole = entry[: _LENGTH.size] == _LENGTH.pack(place.num_bytes) and len(data) == place.num_bytes
        if not whole or xxhash.xxh3_64_hexdigest(data) != place.checksum:
            raise HeadwayError(f"{path} is damaged at byte {place.offset}; restore it from a copy of the run")
        return codec.decode(data)

    def lost_file(self) -> Path | None:
        """The shard that is written, if it was deleted or replaced meanwhile."""
        shard = self._shard
        return shard.path if shard is not None and not is_at(shard.fd, shard.path) else None

    def close(self) -> None:
        """Close the files; entries without an `fsync` are lost."""
        shards = {shard for shard, _ in self._pending} | ({self._shard} if self._shard else set())
        self._pending.clear()
        self._shard = None
        for shard in shards:
            os.close(shard.fd)

    def _start_shard(self) -> None:
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            numbers = [int(path.stem.removeprefix("groups-")) for path in self.directory.glob("groups-*.bin")]
            path = self.directory / f"groups-{max(numbers, default=-1) + 1:05}.bin"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        if self._shard is not None:
            self._pending.append((self._shard, None))
        self._shard = _Shard(path, fd)


class RunLog(EventLog):
    """The event log and the record of one run directory, under one writing thread."""

    def __init__(self, directory: str | Path, deadline_s: float = 600.0) -> None:
        directory = Path(directory)
        with translated(OSError, HeadwayError, f"cannot make the run directory {directory}: {CAUSE}; check run.dir"):
            directory.mkdir(parents=True, exist_ok=True)
        self.record = Record(directory / RECORD_NAME)
        # The writer takes the waiting events first and the waiting bytes second: no event overtakes bytes it names.
        super().__init__(directory / EVENTS_NAME, before_write=self.record.fsync, deadline_s=deadline_s)

    def finished(self, group: Group, seconds: float) -> Finished:
        """Record a finished group, `seconds` after its admission."""
        place = self.record.append(group)
        sampled = [[s.versions[s.versions != NOT_SAMPLED] for s in t.sequences] for t in group.trajectories]
        spans = [(int(versions.min()), int(versions.max())) for t in sampled for versions in t if len(versions)]
        return self.append(
            Finished(
                group=group.id,
                **msgspec.structs.asdict(place),
                lengths=tuple(sum(map(len, sequences)) for sequences in sampled),
                rewards=tuple(float(trajectory.reward) for trajectory in group.trajectories),
                stops=tuple(trajectory.stops[-1] if trajectory.stops else None for trajectory in group.trajectories),
                failures=FailedTrajectory.of(group),
                oldest=min((oldest for oldest, _ in spans), default=None),
                newest=max((newest for _, newest in spans), default=None),
                seconds=seconds,
            )
        )

    def lost_file(self) -> Path | None:
        return super().lost_file() or self.record.lost_file()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if not self._writer.is_alive():  # a writer that hangs may yet use the files
                self.record.close()


def write_jsonl(path: str | Path, groups: Iterable[Group]) -> int:
    """Write one group a line and return how many; the file appears when it is whole."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    num_groups = 0
    try:
        with open(partial, "w", encoding="utf-8") as file:
            for group in groups:
                file.write(_to_line(group))
                num_groups += 1
        os.replace(partial, path)
    except OSError as error:
        raise HeadwayError(f"cannot write {path}: {error.strerror}; choose another place for it") from error
    finally:
        partial.unlink(missing_ok=True)
    return num_groups


def read_jsonl(path: str | Path) -> list[Group]:
    """Every group of a file, each checked before any is used; an error names the line and the field."""
    groups: dict[int, Group] = {}
    with (
        translated((OSError, UnicodeDecodeError), ConfigError, f"cannot read groups from {path}: {CAUSE}"),
        open(path, encoding="utf-8") as file,
    ):
        for number, line in enumerate(file, 1):
            where = f"{path} line {number}"
            group = _build(Group, _parse(line, where), where, "")
            if group.id in groups:
                raise ConfigError(f"{where}: id {group.id} was on an earlier line; give every group its own id")
            groups[group.id] = group
    if not groups:
        raise ConfigError(f"{path} holds no groups; make some with `headway rollout`")
    return list(groups.values())


def _to_line(group: Group) -> str:
    with translated(
        ValueError, HeadwayError, f"group {group.id} holds a number that is not finite, which JSON cannot carry"
    ):
        return json.dumps(_plain(group), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """A message as dictionaries and lists. A float32 becomes the equal double, so it is read back exactly."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _parse(line: str, where: str) -> Any:
    with translated(ValueError, ConfigError, f"{where} is not a JSON object: {CAUSE}"):
        return json.loads(line)


def _refuse(where: str, field: str, expected: str) -> NoReturn:
    raise ConfigError(f"{where}: {field or 'the group'} is not {expected}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(hint: Any, plain: Any, where: str, field: str) -> Any:
    """The inverse of `_plain`: a value of type `hint`; `field` is its path inside the line."""
    if hint in (Ints, Floats):
        return _build_array(np.int32 if hint == Ints else np.float32, plain, where, field)
    if typing.get_origin(hint) is tuple:
        if not isinstance(plain, list):
            _refuse(where, field, "a list")
        (item,) = {*typing.get_args(hint)} - {...}
        return tuple(_build(item, value, where, f"{field}[{index}]") for index, value in enumerate(plain))
    if typing.get_origin(hint) is dict:
        if not isinstance(plain, dict):
            _refuse(where, field, "an object")
        return {key: _build(typing.get_args(hint)[1], value, where, f"{field}.{key}") for key, value in plain.items()}
    if dataclasses.is_dataclass(hint):
        return _build_noun(typing.cast(type, hint), plain, where, field)
    if issubclass(hint, StrEnum):
        if plain not in list(hint):
            _refuse(where, field, f"one of {', '.join(hint)}")
        return hint(plain)
    if hint is float:
        if type(plain) not in (int, float) or not abs(plain) <= sys.float_info.max:
            _refuse(where, field, "a finite number")
        return float(plain)
    if type(plain) is not hint or (hint is int and not -(2**63) <= plain < 2**63):
        _refuse(where, field, {int: "a whole number", str: "a text"}[hint])
    return plain


def _build_noun(cls: type, plain: Any, where: str, field: str) -> Any:
    if not isinstance(plain, dict):
        _refuse(where, field, "an object")
    inside = f"{field}." if field else ""
    absent = dataclasses.MISSING
    optional = {f.name for f in dataclasses.fields(cls) if (f.default, f.default_factory) != (absent, absent)}
    if missing := [name for name in _hints(cls) if name not in plain and name not in optional]:
        raise ConfigError(f"{where}: {inside}{missing[0]} is missing")
    if unknown := [name for name in plain if name not in _hints(cls)]:
        raise ConfigError(f"{where}: unknown field {inside}{unknown[0]}; known are {', '.join(_hints(cls))}")
    known = {name: hint for name, hint in _hints(cls).items() if name in plain}
    values = {name: _build(hint, plain[name], where, inside + name) for name, hint in known.items()}
    with translated(ValueError, ConfigError, f"{where}: {field or 'the group'} cannot be: {CAUSE}"):
        return cls(**values)


def _build_array(dtype: type[np.generic], plain: Any, where: str, field: str) -> Any:
    if not isinstance(plain, list):
        _refuse(where, field, "a list of numbers")
    whole = dtype is np.int32
    kinds = (int,) if whole else (int, float)
    low, high = (-(2**31), 2**31 - 1) if whole else (-_MAX_FLOAT32, _MAX_FLOAT32)
    for index, value in enumerate(plain):
        if type(value) not in kinds or not low <= value <= high:  # so written that a NaN does not pass
            _refuse(where, f"{field}[{index}]", "a 32-bit whole number" if whole else "a finite 32-bit number")
    return np.array(plain, dtype)
