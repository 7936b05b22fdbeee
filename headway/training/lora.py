"""LoRA: adapters as the weights that are trained, and their directory in peft's format.

The passes run the model with every adapter merged into its matrix, in the published type: the very tensors that an
engine makes of the adapter and its own base. A matrix's gradient G becomes those of its factors as soon as it is
complete (dB = s·G·Aᵀ, dA = s·Bᵀ·G) and is freed, so that only adapters have fp32 masters and optimizer state.

Invariants that live here:
  6. Parity: trainer and engine merge by the same function (weights/lora.py), from the same factors.
 11. Verified weight sync: an adapter travels with the digest of its base, and is refused by any other.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headway.config import LoraSection
from headway.errors import ConfigError
from headway.model.loading import named_weights
from headway.model.logprobs import Policy
from headway.model.sharding import Masters
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.lora import TENSORS, in_peft, merged


class LoraMasters(Masters):
    """fp32 factors of the chosen matrices, by `NAME.lora_A` and `NAME.lora_B`; every other weight is frozen."""

    def __init__(self, policy: Policy, section: LoraSection, path: str, dtype: torch.dtype, device: torch.device):
        super().__init__(nn.Module())
        self._section, self._scale, self._path = section, section.alpha / section.rank, path
        self._peft, found = _initial(policy, section, path)
        for parameter in policy.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(device, dtype)
        policy.to(device)
        weights = named_weights(policy.model)
        prints = fingerprints(weights)
        self._description = f"{dtype} {digest(prints)}"
        self._on_device = fingerprints(weights, on_device=True) if device.type == "cuda" else prints
        self._host = prints
        self._matrices: dict[str, tuple[nn.Parameter, Tensor]] = {}  # what the passes run, and the base
        for name in dict.fromkeys(factor.rpartition(".")[0] for factor in found):
            matrix = policy.model.get_parameter(f"{name}.weight")
            matrix.requires_grad_(True)
            self._matrices[name] = matrix, matrix.detach().clone()
            matrix.register_post_accumulate_grad_hook(partial(self._hand_over_gradient, name))
        if section.adapter:
            found = self._read(Path(section.adapter), found)
        self.named = {name: nn.Parameter(factor.to(device, torch.float32)) for name, factor in found.items()}
        self.refresh()

    def base(self, on_device: bool) -> str:
        return digest(self._on_device if on_device else self._host)

    @torch.no_grad()
    def refresh(self) -> None:
        published = self.factors()
        for name, (matrix, base) in self._matrices.items():
            matrix.copy_(merged(base, published[f"{name}.lora_A"], published[f"{name}.lora_B"]))

    def factors(self) -> dict[str, Tensor]:
        """What is published: of each matrix A, and B times the scale."""
        scales = {"lora_A": 1.0, "lora_B": self._scale}
        return {name: factor.detach() * scales[name[-6:]] for name, factor in self.named.items()}

    def _hand_over_gradient(self, name: str, matrix: Tensor) -> None:
        assert matrix.grad is not None
        gradient, a, b = matrix.grad.float(), self.named[f"{name}.lora_A"], self.named[f"{name}.lora_B"]
        matrix.grad = None
        for factor, product in ((a, b.detach().T @ gradient), (b, gradient @ a.detach().T)):
            product *= self._scale
            factor.grad = product if factor.grad is None else factor.grad.add_(product)

    # In peft's format

    def adapter(self) -> dict[str, Tensor]:
        return {in_peft(name): factor.detach() for name, factor in self.named.items()}

    def write_adapter(self, tensors: Mapping[str, Tensor], directory: Path) -> None:
        """Write a directory that peft loads; the metadata names the base by its digest."""
        self._peft.save_pretrained(str(directory))
        save_file(dict(tensors), directory / TENSORS, metadata={"format": "pt", "base": self._description})

    def _read(self, directory: Path, ours: dict[str, Tensor]) -> dict[str, Tensor]:
        try:
            with safe_open(directory / TENSORS, framework="pt") as opened:
                base = (opened.metadata() or {}).get("base", "")
                theirs = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model.lora.adapter = {directory} is no adapter in peft's format: {error}") from error
        same_type = base.split()[:1] == self._description.split()[:1]
        if same_type and base != self._description:
            raise ConfigError(
                f"model.lora.adapter = {directory} was made for another base than model.path = {self._path}; "
                "name that one, or another adapter"
            )
        found = {name: theirs.pop(in_peft(name), None) for name in ours}
        wrong = [name for name, factor in found.items() if factor is None or factor.shape != ours[name].shape]
        if wrong or theirs:
            raise ConfigError(
                f"model.lora.adapter = {directory} does not fit model.path = {self._path} with rank = "
                f"{self._section.rank} and targets = {self._section.targets}: first at {[*wrong, *theirs][0]}"
            )
        return {name: factor for name, factor in found.items() if factor is not None}


def _initial(policy: Policy, section: LoraSection, path: str) -> tuple[Any, dict[str, Tensor]]:
    """peft's description of the adapter, and the factors it begins with: A drawn from a fixed seed, B zero."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(
            f"model.lora.rank = {section.rank} needs the package peft: pip install 'headway-rl[lora]', or set rank = 0"
        ) from None
    targets = section.targets if section.targets == "all-linear" else section.targets.split(",")
    config = LoraConfig(
        r=section.rank, lora_alpha=section.alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # peft reports targets that the model lacks, or that are no linear layers, by this type.
        try:
            wrapped = get_peft_model(policy.model, config)
        except ValueError as error:
            raise ConfigError(f"model.lora.targets = {section.targets} does not fit {path}: {error}") from None
    found = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter.detach().clone()
        for name, parameter in wrapped.named_parameters()
        if ".lora_" in name
    }
    wrapped.unload()
    if head := [name for name in found if name.startswith("lm_head") or not name.endswith(("lora_A", "lora_B"))]:
        raise ConfigError(f"model.lora.targets = {section.targets} names {head[0]}; adapters are for layers' matrices")
    config.base_model_name_or_path = path
    return config, found
