"""Weights as files for vLLM: the model directory a server is started on, and each update as one safetensors file.

vLLM 0.32 does not reload a head that is tied to the embeddings and not in the file: the old one silently stays. So
the served model is a copy with a head of its own, and every update has that head, tied in the trainer or not.

By hand, for a server named in `engine.urls`: `python -m headway.engine.vllm.model_copy MODEL DTYPE DIRECTORY`.
"""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.errors import CAUSE, ConfigError, WeightMismatch, translated
from headway.types import Floats, Ints, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_HEAD = "lm_head.weight"
_HEADLESS = ("gemma2",)
"""Families whose vLLM module has no head: it multiplies by the embeddings themselves, so there is none to go stale."""
_PROBE_TOKENS = 16


@dataclass(frozen=True)
class ServedModel:
    """A written model copy: its sizes, and the log-probs that transformers gives a short probe."""

    has_head: bool
    vocab_size: int
    context: int
    kv_bytes: int  # of one token
    probe: Ints
    reference: Floats
    digest: str  # of its weights, as an adapter names its base


def write_model(path: str, dtype: str, directory: Path) -> ServedModel:
    """Write the copy of the model that vLLM serves, with an untied head."""
    from headway.model.device import DTYPES
    from headway.model.loading import load_model, model_shape, named_weights
    from headway.model.tokenizer import load_tokenizer
    from headway.weights.fingerprints import digest, fingerprints

    model = load_model(path, DTYPES[dtype]).eval().requires_grad_(False)
    has_head = model.config.model_type not in _HEADLESS
    weights = named_weights(model)
    base = digest(fingerprints(weights))
    if not has_head:
        del weights[_HEAD]
    _write(directory, weights)
    shape, context = model_shape(model.config), model.config.max_position_embeddings
    probe = np.random.default_rng(0).integers(0, shape.vocab_size, min(_PROBE_TOKENS, context - 1)).astype(np.int32)
    reference = score(model, probe)
    model.config.tie_word_embeddings = not has_head
    model.config.save_pretrained(directory)
    load_tokenizer(path).save_pretrained(directory)
    kv_bytes = shape.kv_elements * DTYPES[dtype].itemsize
    return ServedModel(has_head, shape.vocab_size, context, kv_bytes, probe, reference, base)


def score(model: "PreTrainedModel", tokens: Ints) -> Floats:
    """Log-probs as the trainer computes them; 0 for the first token."""
    import torch

    from headway.model.logprobs import Policy

    tokens_T = torch.from_numpy(tokens).long()
    where = torch.arange(1, len(tokens))
    with torch.inference_mode():
        policy = Policy(model, len(tokens))
        logprobs, _ = policy(tokens_T, torch.arange(len(tokens)), [len(tokens)], where, torch.ones(len(where)))
    return np.concatenate([np.zeros(1, np.float32), logprobs.numpy()])


def _write(directory: Path, tensors: "dict[str, Tensor]") -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    # Two names of one tensor become two tensors: the format has no ties.
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        plain[name] = tensor.contiguous() if tensor.data_ptr() not in seen else tensor.clone()
        seen.add(tensor.data_ptr())
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})


class ModelCopyFiles:
    """The directory that this process writes and a server reads: the model copy, and one file for each update."""

    def __init__(self, parent: str):
        with translated(OSError, ConfigError, f"engine.weights_dir = {parent} cannot be written to: {CAUSE}"):
            self.root = Path(tempfile.mkdtemp(prefix="headway-vllm-", dir=parent or None))
        if parent:
            os.umask(0o022)  # the servers that read it may be another user's
            self.root.chmod(0o755)
        self.served = self.root / "served"
        self.staged_version: int | None = None
        self._has_head, self._base = True, ""
        self._loaded: Path | None = None

    def write_model(self, path: str, dtype: str) -> ServedModel:
        model = write_model(path, dtype, self.served)
        self._has_head, self._base = model.has_head, model.digest
        return model

    def stage(self, update: WeightUpdate) -> None:
        """Write an update next to the loaded one, after checking its fingerprints; an adapter in peft's format."""
        from headway.weights import lora
        from headway.weights.receive import open_whole

        self.staged_version, path = None, self.path_of(update.version)
        shutil.rmtree(path, ignore_errors=True)  # a restarted trainer publishes a version again
        tensors = {name: tensor.cpu() for name, tensor in open_whole(update).items()}
        if update.kind == "full":
            if not self._has_head:
                del tensors[_HEAD]
            _write(path, tensors)
        elif update.base != self._base:
            found = f"made for the base {update.base}, and the base here is {self._base}"
            raise WeightMismatch(f"version {update.version}: its adapter was {found}; load that one first")
        else:
            lora.write(path, tensors)
        self.staged_version = update.version

    def path_of(self, version: int) -> Path:
        return self.root / f"version-{version}"

    def loaded(self, version: int) -> None:
        """The server has loaded the staged version: delete the files of the one before."""
        path = self.path_of(version)
        if self._loaded is not None and self._loaded != path:
            shutil.rmtree(self._loaded, ignore_errors=True)
        self._loaded, self.staged_version = path, None

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


if __name__ == "__main__":
    write_model(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
