"""Checkpoints in two alternating slots, and models as transformers directories: each written completely or not at all.

A slot holds a safetensors file per trainer rank, with the rows of every tensor that the rank holds, and a small JSON
file with a checksum of each. It is written next to the old slot, fsynced and renamed into place: a kill at any moment,
or a full disk, leaves at least one complete slot, and a damaged slot is detected, named and skipped. Any number of
ranks can read it, each its own rows. Prompts and groups are in the event log.
"""

import copy
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.codec import message
from headway.errors import CAUSE, ConfigError, HeadwayError, SaveFailed, translated
from headway.files import fsync_directory
from headway.weights.fingerprints import fingerprints

SLOTS, ADAPTER = ("a", "b"), "adapter"
_TENSORS, _DESCRIPTION = "state.safetensors", "checkpoint.json"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """The requested rows of all tensors, and the shapes of the whole tensors."""

    version: int
    tensors: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]


@message
class CheckpointPart:
    """One file of a slot: dtype, shape, checksum and place of each tensor in it."""

    version: int
    file: str
    tensors: dict[str, dict[str, Any]]


def slot_for(num_saved: int) -> str:
    return SLOTS[num_saved % 2]


@contextmanager
def _saving(directory: Path) -> Iterator[Path]:
    """The directory to write to before the rename to `directory`; a full or broken disk raises `SaveFailed`."""
    with translated(
        (OSError, SafetensorError), SaveFailed, f"cannot write {directory}: {CAUSE}; make room or repair the disk"
    ):
        yield directory.with_name(directory.name + ".unfinished")


def begin(directory: Path) -> None:
    """Create the empty unfinished directory for the parts of a slot or of a model."""
    with _saving(directory) as unfinished:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)


def discard(directory: Path) -> None:
    with _saving(directory) as unfinished:
        shutil.rmtree(unfinished, ignore_errors=True)


def save(directory: Path, version: int, tensors: Mapping[str, Tensor]) -> None:
    """Write a slot of whole tensors."""
    with discarded_if_unfinished(directory):
        begin(directory)
        finish(directory, [write_part(directory, _TENSORS, version, tensors, {})])


def write_part(
    directory: Path, file: str, version: int, tensors: Mapping[str, Tensor], pieces: Mapping[str, tuple[int, int]]
) -> CheckpointPart:
    """Write one file of a slot. For tensors split over ranks, `pieces` has the first row and the total of rows."""
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _saving(directory) as unfinished:
        save_file(plain, unfinished / file)
        _fsync(unfinished / file)
    described = {}
    for name, signature in _signatures(plain).items():
        first_row, num_rows = pieces.get(name, (0, len(plain[name]) if plain[name].ndim else 0))
        described[name] = signature | {"first_row": first_row, "num_rows": num_rows}
    return CheckpointPart(version, file, described)


def finish(directory: Path, parts: Sequence[CheckpointPart]) -> None:
    """Describe the written parts and replace the previous content of the slot."""
    description = {"version": parts[0].version, "files": {part.file: part.tensors for part in parts}}
    with _saving(directory) as unfinished:
        (unfinished / _DESCRIPTION).write_text(json.dumps(description | {"checksum": _checksum(description)}))
        replace(unfinished, directory)


def _every_row(name: str, num_rows: int) -> range:
    return range(num_rows)


def load(directory: Path, rows: Callable[[str, int], range] = _every_row) -> Checkpoint:
    """Read and check a slot; `rows` gives the wanted rows of a tensor from its name and its number of rows."""
    with translated(
        (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError),
        HeadwayError,
        f"checkpoint {directory} cannot be read ({CAUSE})",
    ):
        description = json.loads((directory / _DESCRIPTION).read_text())
        checksum = description.pop("checksum")
        if checksum != _checksum(description):
            raise HeadwayError(f"checkpoint {directory} is damaged: {_DESCRIPTION} does not match its checksum")
        reader = _SlotReader(directory, rows)
        for file, described in description["files"].items():
            reader.read(file, described)
        reader.check_complete()
    return Checkpoint(description["version"], reader.tensors, reader.shapes)


class _SlotReader:
    """Assembles the wanted rows of each tensor from the files of a slot."""

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
        """Copy the wanted rows of one piece; a piece without any is neither read nor checked."""
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
        return HeadwayError(f"checkpoint {self._directory} is damaged: {name} does not match its checksum")


def _dtype(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name.removeprefix("torch.")))


def _signatures(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Type, shape and checksum of each tensor; a damaged header could turn the same bytes into other numbers."""
    prints = fingerprints(tensors)
    return {
        name: {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "fingerprint": prints[name]}
        for name, tensor in tensors.items()
    }


def _checksum(description: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(description, sort_keys=True).encode())


def save_model(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a transformers directory."""
    check_replaceable(directory)
    with discarded_if_unfinished(directory):
        begin(directory)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        write_model_part(directory, weights, 0, 1)
        describe_model(directory, model, model.dtype, tokenizer, 1)
        finish_model(directory)


def model_owners(model: PreTrainedModel, num_ranks: int) -> dict[str, int]:
    """The rank that writes each tensor of a model: consecutive tensors, about as many numbers each."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    starts = accumulate(sizes.values(), initial=0)
    return {name: start * num_ranks // sum(sizes.values()) for name, start in zip(sizes, starts, strict=False)}


def write_model_part(directory: Path, tensors: Mapping[str, Tensor], rank: int, num_ranks: int) -> None:
    """Write the tensors that a rank owns as a file of a transformers directory."""
    with _saving(directory) as unfinished:
        if tensors:
            plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(plain, unfinished / _model_file(rank, num_ranks), metadata={"format": "pt"})


def write_adapter(directory: Path, write: Callable[[Path], None]) -> None:
    """Have an adapter written into the directory `adapter` of a model."""
    with _saving(directory) as unfinished:
        (unfinished / ADAPTER).mkdir()
        write(unfinished / ADAPTER)


def describe_model(
    directory: Path, model: PreTrainedModel, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase, num_ranks: int
) -> None:
    """Write everything in a transformers directory but the tensors."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = dtype, [type(model).__name__]
    with _saving(directory) as unfinished:
        config.save_pretrained(unfinished)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if num_ranks > 1:
            files = {name: _model_file(rank, num_ranks) for name, rank in model_owners(model, num_ranks).items()}
            total_size = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
            index = {"metadata": {"total_size": total_size}, "weight_map": files}
            (unfinished / _INDEX).write_text(json.dumps(index, indent=2))


def _model_file(rank: int, num_ranks: int) -> str:
    return f"model-{rank + 1:05}-of-{num_ranks:05}.safetensors" if num_ranks > 1 else "model.safetensors"


def finish_model(directory: Path) -> None:
    """Replace the previous model by the written one."""
    with _saving(directory) as unfinished:
        replace(unfinished, directory)


@contextmanager
def discarded_if_unfinished(directory: Path) -> Iterator[None]:
    """On a failed save, delete what was written: a full disk needs the room."""
    try:
        yield
    except SaveFailed:
        discard(directory)
        raise


def check_replaceable(directory: Path) -> None:
    """Refuse to save a model over a directory that holds anything else, which would be deleted."""
    is_model = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    is_model = is_model or (directory / ADAPTER / "adapter_config.json").is_file()
    is_empty = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not (is_model or is_empty):
        raise ConfigError(
            f"{directory} holds something other than a model, which saving one would delete; name another"
        )


def replace(unfinished: Path, directory: Path) -> None:
    """fsync every file of `unfinished`, then rename it to `directory`, which is whole at every moment or absent."""
    for path in unfinished.rglob("*"):
        if path.is_file():
            _fsync(path)
        else:
            fsync_directory(path)
    fsync_directory(unfinished)
    replaced = directory.with_name(directory.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    unfinished.rename(directory)
    fsync_directory(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
