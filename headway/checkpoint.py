"""Checkpoints: two slots by turns, each written whole or not at all, and models as ordinary transformers directories.

A slot holds one safetensors file and a small JSON file with a checksum of every tensor; it is made beside the old one,
brought to disk and renamed into place. A kill at any moment, or a full disk, leaves at least one whole slot, and a
damaged one is recognised, named and passed over. Prompts and groups are not in here: the event log has them.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.errors import ConfigError, HeadwayError, SaveFailed
from headway.events import fsync_directory
from headway.weights import fingerprints

SLOTS = ("a", "b")
_TENSORS, _DESCRIPTION = "state.safetensors", "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    version: int
    tensors: dict[str, Tensor]
    extra: dict[str, Any]


def slot_for(num_saved: int) -> str:
    return SLOTS[num_saved % 2]


def save(directory: Path, version: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
    """Write a slot: beside its final place first, then renamed."""
    with _replacing(directory) as unfinished:
        unfinished.mkdir(parents=True)
        plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(plain, unfinished / _TENSORS)
        description = {"version": version, "tensors": _signatures(plain), "extra": extra}
        (unfinished / _DESCRIPTION).write_text(json.dumps(description | {"checksum": _checksum(description)}))


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A place beside `directory` to write to, which takes its place when all of it is on disk; else nothing changes."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
        replace(unfinished, directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveFailed(f"cannot write {directory}: {error}; make room or repair the disk") from error


def load(directory: Path) -> Checkpoint:
    """Read a slot and check every tensor of it."""
    try:
        description = json.loads((directory / _DESCRIPTION).read_text())
        checksum = description.pop("checksum")
        tensors = load_file(directory / _TENSORS)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise HeadwayError(f"checkpoint {directory} cannot be read ({error})") from error
    if checksum != _checksum(description):
        raise HeadwayError(f"checkpoint {directory} is damaged: {_DESCRIPTION} is not as it was saved")
    expected, found = description["tensors"], _signatures(tensors)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise HeadwayError(f"checkpoint {directory} is damaged: {wrong[0]} is not as it was saved")
    return Checkpoint(description["version"], tensors, description["extra"])


def _signatures(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Type, shape and checksum of each tensor: a damaged header can turn the same bytes into other numbers."""
    prints = fingerprints(tensors)
    return {name: f"{tensor.dtype} {tuple(tensor.shape)} {prints[name]}" for name, tensor in tensors.items()}


def _checksum(description: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(description, sort_keys=True).encode())


def save_model(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """An ordinary transformers directory, complete or absent."""
    check_replaceable(directory)
    with _replacing(directory) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


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
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            fsync_directory(path)
    fsync_directory(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    fsync_directory(directory.parent)
