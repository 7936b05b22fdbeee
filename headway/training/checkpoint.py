"""Checkpoints: two slots by turns, each written whole or not at all, and models as ordinary transformers directories.

A slot holds a safetensors file for each trainer rank, with the rows of every tensor that the rank holds, and a small
JSON file with a checksum of each; it is made beside the old one, brought to disk and renamed into place. A kill at any
moment, or a full disk, leaves at least one whole slot, and a damaged one is recognised, named and passed over. However
many ranks wrote it, any number can read it, each its own rows. Prompts and groups are not in here: the event log has
them.
"""

import copy
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.codec import noun
from headway.errors import ConfigError, HeadwayError, SaveFailed
from headway.files import fsync_directory
from headway.weights.fingerprints import bytes_of, fingerprints

SLOTS = ("a", "b")
_TENSORS, _DESCRIPTION = "state.safetensors", "checkpoint.json"
_WEIGHTS = "model.safetensors"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors writes them


@dataclass(frozen=True)
class Checkpoint:
    """The rows that were asked for, and the whole shapes of all tensors there are."""

    version: int
    tensors: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    extra: dict[str, Any]


@dataclass(frozen=True)
class State:
    """What one rank puts into a checkpoint: its tensors, of pieces the first row and how many rows the whole has."""

    version: int
    tensors: dict[str, Tensor]
    pieces: dict[str, tuple[int, int]]
    fingerprints: dict[str, str]  # of the weights as they are published


@noun
class Part:
    """One file of a slot: what is known of each tensor in it."""

    file: str
    tensors: dict[str, dict[str, Any]]


def slot_for(num_saved: int) -> str:
    return SLOTS[num_saved % 2]


@contextmanager
def _saving(directory: Path) -> Iterator[Path]:
    """The place beside `directory` to write to; that the disk is full or broken is one sentence."""
    try:
        yield directory.with_name(directory.name + ".unfinished")
    except (OSError, SafetensorError) as error:
        raise SaveFailed(f"cannot write {directory}: {error}; make room or repair the disk") from error


def begin(directory: Path) -> None:
    """Make an empty place beside the final one, for the parts of a slot or of a model."""
    with _saving(directory) as unfinished:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)


def discard(directory: Path) -> None:
    with _saving(directory) as unfinished:
        shutil.rmtree(unfinished, ignore_errors=True)


def save(directory: Path, version: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
    """Write a slot of whole tensors."""
    try:
        begin(directory)
        finish(directory, version, [write_part(directory, _TENSORS, tensors, {})], extra)
    except SaveFailed:
        discard(directory)
        raise


def write_part(
    directory: Path, file: str, tensors: Mapping[str, Tensor], pieces: Mapping[str, tuple[int, int]]
) -> Part:
    """Write one file of a slot; of a piece, `pieces` has the first row and how many rows the whole tensor has."""
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _saving(directory) as unfinished:
        save_file(plain, unfinished / file)
        _bring_to_disk(unfinished / file)
    described = {}
    for name, signature in _signatures(plain).items():
        first_row, num_rows = pieces.get(name, (0, len(plain[name]) if plain[name].ndim else 0))
        described[name] = signature | {"first_row": first_row, "num_rows": num_rows}
    return Part(file, described)


def finish(directory: Path, version: int, parts: Iterable[Part], extra: dict[str, Any]) -> None:
    """All parts are written: describe them, and let them take the place of what the slot held before."""
    description = {"version": version, "files": {part.file: part.tensors for part in parts}, "extra": extra}
    with _saving(directory) as unfinished:
        (unfinished / _DESCRIPTION).write_text(json.dumps(description | {"checksum": _checksum(description)}))
        replace(unfinished, directory)


def _every_row(name: str, num_rows: int) -> range:
    return range(num_rows)


def load(directory: Path, rows: Callable[[str, int], range] = _every_row) -> Checkpoint:
    """Read a slot, of each tensor the `rows` wanted, given its name and how many it has; what is read is checked."""
    try:
        description = json.loads((directory / _DESCRIPTION).read_text())
        checksum = description.pop("checksum")
        if checksum != _checksum(description):
            raise HeadwayError(f"checkpoint {directory} is damaged: {_DESCRIPTION} is not as it was saved")
        reader = _Reader(directory, rows)
        for file, described in description["files"].items():
            reader.read(file, described)
        reader.check_complete()
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise HeadwayError(f"checkpoint {directory} cannot be read ({error})") from error
    return Checkpoint(description["version"], reader.tensors, reader.shapes, description["extra"])


class _Reader:
    """Puts the wanted rows of each tensor together from the files of a slot."""

    def __init__(self, directory: Path, rows: Callable[[str, int], range]):
        self._directory, self._rows = directory, rows
        self._num_missing: Counter[str] = Counter()
        self.tensors: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def read(self, file: str, described: dict[str, dict[str, Any]]) -> None:
        with safe_open(self._directory / file, framework="pt") as opened:
            for name in sorted(described.keys() ^ set(opened.keys())):
                raise self._damaged(name)
            for name, piece in described.items():
                self._read_piece(opened, name, piece)

    def _read_piece(self, opened: Any, name: str, piece: dict[str, Any]) -> None:
        """Take what is wanted of one piece. A piece of which nothing is wanted is left to the rank that wants it."""
        shape, first = piece["shape"], piece["first_row"]
        whole = (piece["num_rows"], *shape[1:]) if shape else ()
        here = range(first, first + shape[0]) if shape else range(1)
        wanted = self._rows(name, whole[0]) if whole else here
        if name not in self.shapes:
            self.shapes[name], self._num_missing[name] = whole, len(wanted)
            if here != wanted:
                self.tensors[name] = torch.empty((len(wanted), *whole[1:]), dtype=_dtype(piece["dtype"]))
        both = range(max(here.start, wanted.start), min(here.stop, wanted.stop))
        if not both:
            return
        tensor = opened.get_tensor(name)
        if any(piece[key] != value for key, value in _signatures({name: tensor})[name].items()):
            raise self._damaged(name)
        self._num_missing[name] -= len(both)
        if here == wanted:
            self.tensors[name] = tensor
        else:
            taken = tensor[both.start - here.start : both.stop - here.start]
            self.tensors[name][both.start - wanted.start : both.stop - wanted.start] = taken

    def check_complete(self) -> None:
        for name, num_missing in self._num_missing.items():
            if num_missing:
                raise self._damaged(name)

    def _damaged(self, name: str) -> HeadwayError:
        return HeadwayError(f"checkpoint {self._directory} is damaged: {name} is not as it was saved")


def _dtype(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name.removeprefix("torch.")))


def _signatures(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Type, shape and checksum of each tensor: a damaged header can turn the same bytes into other numbers."""
    prints = fingerprints(tensors)
    return {
        name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "fingerprint": prints[name]}
        for name, tensor in tensors.items()
    }


def _checksum(description: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(description, sort_keys=True).encode())


def save_model(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """An ordinary transformers directory, complete or absent."""
    check_replaceable(directory)
    try:
        begin(directory)
        with _saving(directory) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        finish_model(directory)
    except SaveFailed:
        discard(directory)
        raise


def describe_model(
    directory: Path, model: PreTrainedModel, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write all of a transformers directory but the numbers: those, its ranks write with `write_rows`."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = dtype, [type(model).__name__]
    header, _, num_bytes = _layout(model, dtype)
    with _saving(directory) as unfinished:
        config.save_pretrained(unfinished)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        with open(unfinished / _WEIGHTS, "wb") as file:
            file.write(header)
            file.truncate(num_bytes)


def write_rows(
    directory: Path, model: PreTrainedModel, dtype: torch.dtype, rows: Mapping[str, tuple[int, Tensor]]
) -> None:
    """Write rows of tensors, each from its first one on, into the weights that `describe_model` made room for.

    Rows of dimension 0 lie one after the other in the file, so that no rank ever needs another's.
    """
    _, starts, _ = _layout(model, dtype)
    with _saving(directory) as unfinished, open(unfinished / _WEIGHTS, "r+b") as file:
        for name in starts.keys() & rows.keys():
            first_row, tensor = rows[name]
            file.seek(starts[name] + first_row * tensor[0].numel() * dtype.itemsize)
            file.write(bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())


def finish_model(directory: Path) -> None:
    """All of a model is written: let it take the place of the one before."""
    with _saving(directory) as unfinished:
        replace(unfinished, directory)


def _layout(model: PreTrainedModel, dtype: torch.dtype) -> tuple[bytes, dict[str, int], int]:
    """The header of a safetensors file of the whole model, where each tensor begins, and how long the file is."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, parameter in model.named_parameters():
        starts[name] = end
        end += parameter.shape.numel() * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(parameter.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end


def check_replaceable(directory: Path) -> None:
    """A model may take the place of a model or of nothing: whatever else lay there would be deleted."""
    is_model = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    is_empty = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not (is_model or is_empty):
        raise ConfigError(
            f"{directory} holds something other than a model, which saving one would delete; name another"
        )


def replace(unfinished: Path, directory: Path) -> None:
    """Bring every file of `unfinished` to disk, then let it take the place of `directory`."""
    for path in unfinished.rglob("*"):
        if path.is_file():
            _bring_to_disk(path)
        else:
            fsync_directory(path)
    fsync_directory(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    fsync_directory(directory.parent)


def _bring_to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
