"""Weights in files: readable by everybody, there whole or not at all, and never taken for another version.

Invariant 11: verified weight sync at every load, from a file as from memory.
"""

import dataclasses
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from streams import large, unreachable
from test_weights import equal, is_untouched, mismatch, numbered, receiver
from torch import Tensor

from headway.errors import RunFailed, WeightMismatch
from headway.types import WeightUpdate
from headway.weights import receive
from headway.weights.fingerprints import fingerprints
from headway.weights.publish import Publisher
from headway.weights.receive import open_update
from headway.weights.shadow import ShadowWeights


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(["disk"], directory=str(tmp_path / "weights"))
    yield made
    made.close()


def files(tmp_path: Path) -> list[str]:
    return sorted(str(path.relative_to(tmp_path / "weights")) for path in (tmp_path / "weights").rglob("*.*"))


# Writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_read_by_safetensors_with_every_name_in_it(publisher: Publisher, dtype: torch.dtype) -> None:
    """Also the head that is tied: an engine whose head is not must not keep an old one."""
    tensors = numbered(2.5, dtype) | {"odd": torch.arange(3, dtype=torch.uint8), "wide": torch.arange(3.0).double()}
    update = publisher.publish(4, tensors)
    assert update.transport == "disk" and equal(load_file(update.location), tensors)


def test_it_opens_as_the_tensors_that_were_published(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "_BUCKET_BYTES", 1000)
    for version in range(3):
        update = publisher.publish(version, large(float(version)))
        arrived = open_update(update)
        assert equal(arrived, large(float(version))) and fingerprints(arrived) == update.fingerprints


def test_the_last_two_versions_are_kept(tmp_path: Path, publisher: Publisher) -> None:
    (tmp_path / "weights" / "version-99").mkdir(parents=True)
    (tmp_path / "weights" / "version-99" / "model.safetensors").write_text("of a run that went further")
    (tmp_path / "weights" / "notes").mkdir()
    updates = [publisher.publish(version, numbered(float(version))) for version in (0, 1, 2, 2, 5)]
    assert files(tmp_path) == ["version-2/model.safetensors", "version-5/model.safetensors"]
    assert (tmp_path / "weights" / "notes").is_dir()
    assert equal(open_update(updates[3]), numbered(2.0)) and equal(open_update(updates[4]), numbered(5.0))
    assert unreachable(updates[1]) == f"{updates[1].location} cannot be read (No such file or directory)"


def test_several_publishers_share_a_directory(tmp_path: Path) -> None:
    directory = str(tmp_path / "weights")
    ranks = [Publisher(["disk"], directory=directory, part=f"rank-{rank}") for rank in range(2)]
    for version in range(3):
        updates = [rank.publish(version, numbered(float(number))) for number, rank in enumerate(ranks)]
    assert all(equal(open_update(update), numbered(float(number))) for number, update in enumerate(updates))
    assert len(files(tmp_path)) == 4
    for rank in ranks:
        rank.close()


def test_only_this_user_can_read_it(tmp_path: Path, publisher: Publisher) -> None:
    update = publisher.publish(0, numbered(1.0))
    modes = [os.stat(path).st_mode & 0o077 for path in (update.location, Path(update.location).parent)]
    assert modes == [0, 0]


# A full disk


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: what the system then says to the writer is what a full disk says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_a_sentence_and_leaves_the_last_version_whole(tmp_path: Path, publisher: Publisher) -> None:
    before = publisher.publish(0, large(0.0))
    publisher.publish(1, large(1.0))
    with room_for(50_000), pytest.raises(RunFailed) as error:
        publisher.publish(2, large(2.0))
    assert str(error.value) == (
        f"version 2 could not be written to {tmp_path / 'weights'} (Error while serializing: I/O error: File too large "
        "(os error 27)); make room there or change weights.transport"
    )
    assert files(tmp_path) == ["version-0/model.safetensors", "version-1/model.safetensors"]
    assert equal(open_update(before), large(0.0))
    assert equal(open_update(publisher.publish(2, large(2.0))), large(2.0)), "once there is room again"


def test_a_full_disk_costs_only_the_file_where_there_is_another_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(["stream", "disk"], directory=str(tmp_path / "weights"))
    publisher.publish(0, large())
    with room_for(50_000), caplog.at_level(logging.WARNING):
        update = publisher.publish(1, large(1.0))
    assert [place.transport for place in update.places] == ["stream"]
    assert f"version 1 could not be written to {tmp_path / 'weights'} (Error while" in caplog.text
    assert equal(open_update(update), large(1.0))
    publisher.close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    publisher = Publisher(["disk"], directory=str(tmp_path / "weights"))
    with pytest.raises(RunFailed, match=r"could not be written to .*/weights \(Not a directory\)"):
        publisher.publish(0, numbered(0.0))
    publisher.close()


# The fallback


def test_the_file_is_read_when_the_server_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.weights.stream._PAUSE_S", 0.001)
    publisher = Publisher(["shared_memory", "stream", "disk"], directory=str(tmp_path / "weights"))
    update = dataclasses.replace(publisher.publish(0, large()), host="another machine")
    publisher.close()
    assert equal(open_update(update), large())
    os.unlink(update.elsewhere[1].location)
    said = unreachable(update)
    assert [part.partition(" ")[2] for part in said.split("; ")] == [
        "memory is on another machine",
        "could not be read in 4 connections (Connection refused)",
        "cannot be read (No such file or directory)",
    ]


# Damage


def flip_in_header(data: bytes) -> bytes:
    return data.replace(b'"norm"', b'"norn"')


def flip_shape(data: bytes) -> bytes:
    return data.replace(b"[7,3]", b"[3,7]")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-10], "it ends early"),
        (lambda data: data[:30], "its header cannot be read: JSONDecodeError"),
        (lambda data: b"", "its header cannot be read: JSONDecodeError"),
        (lambda data: b"\xff" * 8 + data[8:], "its header cannot be read"),
        (lambda data: b"\x02" + bytes(7) + b"[]" + data, "its header cannot be read: TypeError"),
        (flip_in_header, "its header cannot be read: KeyError 'norm'"),
        (flip_shape, "embed is there as F32 (3, 7)"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_of_it_is_used(
    publisher: Publisher, damage: Callable[[bytes], bytes], said: str
) -> None:
    live, update = receiver(), publisher.publish(1, numbered(1.0))
    path = Path(update.location)
    path.write_bytes(damage(path.read_bytes()))
    assert mismatch(ShadowWeights(live), update).startswith(f"version 1: {path} is damaged, {said}")
    assert is_untouched(live)


def test_invariant_11_a_flipped_bit_in_the_file_stops_the_load(publisher: Publisher) -> None:
    live, update = receiver(), publisher.publish(1, numbered(1.0))
    data = bytearray(Path(update.location).read_bytes())
    data[-3] ^= 4
    Path(update.location).write_bytes(data)
    assert mismatch(ShadowWeights(live), update) == "version 1: norm arrived with another checksum than published"
    assert is_untouched(live)


def test_a_file_of_another_version_is_not_taken_for_this_one(publisher: Publisher) -> None:
    first, second = (publisher.publish(version, numbered(float(version))) for version in (0, 1))
    Path(second.location).replace(first.location)
    assert unreachable(first) == f"{first.location} holds version 1"


def test_a_good_file_after_a_damaged_one_is_loaded(publisher: Publisher) -> None:
    live: dict[str, Tensor] = {**receiver()}
    shadow = ShadowWeights(live)
    bad: WeightUpdate = publisher.publish(0, numbered(0.0))
    Path(bad.location).write_bytes(b"")
    with pytest.raises(WeightMismatch):
        shadow.stage(bad)
    good = publisher.publish(1, numbered(1.0))
    shadow.stage(good)
    assert shadow.swap() == good.fingerprints and equal(live, numbered(1.0))
