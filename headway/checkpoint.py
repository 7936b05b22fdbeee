"""Checkpoints: two slots by turns, each written whole or not at all, and models as ordinary transformers directories.

A slot holds one safetensors file and a small JSON file with a checksum of every tensor; it is made beside the old one,
brought to disk and renamed into place. A kill at any moment leaves at least one whole slot, and a damaged one is
recognised, named and passed over. Prompts and groups are not in here: the event log has them.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.errors import HeadwayError
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
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(plain, unfinished / _TENSORS)
    description = {"version": version, "fingerprints": fingerprints(plain), "extra": extra}
    (unfinished / _DESCRIPTION).write_text(json.dumps(description))
    replace(unfinished, directory)


def load(directory: Path) -> Checkpoint:
    """Read a slot and check every tensor of it."""
    try:
        description = json.loads((directory / _DESCRIPTION).read_text())
        tensors = load_file(directory / _TENSORS)
        expected, version, extra = (description[key] for key in ("fingerprints", "version", "extra"))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise HeadwayError(f"checkpoint {directory} cannot be read ({error})") from error
    found = fingerprints(tensors)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise HeadwayError(f"checkpoint {directory} is damaged: {wrong[0]} has another checksum than when it was saved")
    return Checkpoint(version, tensors, extra)


def save_model(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """An ordinary transformers directory, complete or absent."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    implementation = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"  # ours is registered in Headway only
    model.save_pretrained(unfinished)
    model.config._attn_implementation = implementation
    tokenizer.save_pretrained(unfinished)
    replace(unfinished, directory)


def replace(unfinished: Path, directory: Path) -> None:
    """Bring every file of `unfinished` to disk, then let it take the place of `directory`."""
    for path in unfinished.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    fsync_directory(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    fsync_directory(directory.parent)
