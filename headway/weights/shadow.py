"""Shadow weights: a second set of tensors that is received and verified, then swapped with a module's live ones.

Invariant that lives here:
 11. Verified weight sync at every load by fingerprint: each tensor's checksum is taken over its bytes as published,
     and again over the bytes that are about to be live; a mismatch stops the run.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headway.errors import InvariantBroken, WeightMismatch
from headway.types import TensorInfo, WeightUpdate
from headway.weights import lora
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.ipc import release_other_publishers
from headway.weights.receive import open_whole, receive


class ShadowWeights:
    """The receiving side: a second set of tensors next to a module's live ones."""

    def __init__(self, live: Mapping[str, Tensor], in_place: bool = False):
        """With `in_place`, a swap copies the shadow set over the live one instead of exchanging the two."""
        self._in_place = in_place
        self._live = {name: parameter for name, parameter in live.items() if isinstance(parameter, nn.Parameter)}
        self._shadow: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor] = {}
        self._staged_prints: dict[str, str] = {}
        self.staged_version: int | None = None
        # With low-rank adapters, the base of each matrix that they change, and the digest of the whole base.
        self._base: dict[str, Tensor] = {}
        self._base_digest: dict[bool, str] = {}

    def stage(self, update: WeightUpdate) -> None:
        """Copy the update into the shadow set and check every byte of it; the live set is untouched."""
        self.staged_version, self._staged = None, {}
        parts = update.parts or (update,)
        on_device = parts[0].transport == "cuda"
        if update.kind == "adapter":
            self._stage_factors(update, on_device)
            return
        self._check_kinds(update)
        release_other_publishers(update)
        # Check what will be live: names that are tied here share one tensor, though two may have been published.
        arrived: dict[str, Tensor] = {}
        for part in parts:
            into = self._into(part)
            receive(part, into)
            arrived |= {info.key: into[info.name] for info in part.tensors}
        found = fingerprints(arrived, on_device)
        wrong = [name for name, value in update.fingerprints.items() if found[name] != value]
        if wrong:
            raise WeightMismatch(f"version {update.version}: {wrong[0]} arrived with another checksum than published")
        self._staged, self._staged_prints = dict(self._shadow), found
        self.staged_version = update.version
        self._base, self._base_digest = {}, {}

    def _stage_factors(self, update: WeightUpdate, on_device: bool) -> None:
        """Merge a low-rank adapter into its base: the weights that were live when the first adapter came."""
        if on_device not in self._base_digest and not self._base:
            self._base_digest[on_device] = digest(fingerprints(self._live, on_device))
        if (ours := self._base_digest.get(on_device)) != update.base:
            found = f"made for the base {update.base}, and the base here is {ours}"
            raise WeightMismatch(f"version {update.version}: its adapter was {found}; load that one first")
        factors = open_whole(update)
        names = lora.targets(list(factors))
        for name in names or factors:
            live, stem = self._live.get(name), name.removesuffix(".weight")
            pair = [factors.get(stem + side) for side in (lora.A, lora.B)]
            shape = tuple(live.shape) if live is not None else None
            if pair[0] is None or pair[1] is None or (len(pair[1]), pair[0].shape[-1]) != shape:
                raise WeightMismatch(f"version {update.version}: its adapter has {stem}, which does not fit the base")
            assert live is not None
            if name not in self._base:
                self._base[name] = live.detach().clone()
            sides = [side.to(live.device) for side in pair if side is not None]
            self._shadow_of(live).copy_(lora.merged(self._base[name], *sides))
        self._staged = {id(self._live[name]): self._shadow[id(self._live[name])] for name in names}
        self._staged_prints = update.fingerprints
        self.staged_version = update.version

    def _into(self, part: WeightUpdate) -> dict[str, Tensor]:
        """The tensors, or rows, of the shadow set that a part is received into; tied ones are one tensor."""
        placed: dict[tuple[int, int], Tensor] = {}
        for info in part.tensors:
            parameter = self._live[info.name]
            whole = self._shadow_of(parameter)
            rows = whole if info.num_rows is None else whole[info.rows.start : info.rows.stop]
            placed.setdefault((id(parameter), info.first_row), rows)
        return {info.name: placed[id(self._live[info.name]), info.first_row] for info in part.tensors}

    def _shadow_of(self, parameter: Tensor) -> Tensor:
        if id(parameter) not in self._shadow:
            self._shadow[id(parameter)] = torch.empty_like(parameter.data)
        return self._shadow[id(parameter)]

    def _check_kinds(self, update: WeightUpdate) -> None:
        """Raise unless names, types and shapes match the live set, and every row comes exactly once."""
        published: dict[str, list[TensorInfo]] = {}
        for info in update.pieces:
            published.setdefault(info.name, []).append(info)
        differing = sorted(self._live.keys() ^ published.keys())
        if differing:
            raise WeightMismatch(
                f"version {update.version}: published and loaded tensors differ by name, first {differing[0]}"
            )
        for name, pieces in published.items():
            ours = f"{self._live[name].dtype} {tuple(self._live[name].shape)}"
            for info in pieces:
                theirs = f"torch.{info.dtype} {info.whole_shape}"
                if theirs != ours:
                    raise WeightMismatch(
                        f"version {update.version}: {name} was published as {theirs}, loaded as {ours}"
                    )
            if not _cover_all_rows(pieces):
                raise WeightMismatch(f"version {update.version}: the pieces of {name} do not hold every row once")

    def staged(self, parameter: Tensor) -> Tensor:
        """The tensor that a parameter will have after the swap; itself if no update to it is staged."""
        return self._staged.get(id(parameter), parameter)

    def swap(self) -> dict[str, str]:
        """Exchange live and shadow tensors; returns the fingerprints of the new live set."""
        if self.staged_version is None:
            raise InvariantBroken("a swap needs staged weights, and none are staged")
        parameters = {id(parameter): parameter for parameter in self._live.values() if id(parameter) in self._staged}
        if self._in_place:
            torch._foreach_copy_([p.data for p in parameters.values()], [self._shadow[key] for key in parameters])
        else:
            for key, parameter in parameters.items():
                parameter.data, self._shadow[key] = self._shadow[key], parameter.data
        self.staged_version, self._staged = None, {}
        return dict(self._staged_prints)


def _cover_all_rows(pieces: Sequence[TensorInfo]) -> bool:
    """Whether every row of a tensor is in exactly one of its pieces."""
    if len(pieces) == 1 and pieces[0].num_rows is None:
        return True
    end = 0
    for info in sorted(pieces, key=lambda info: info.first_row):
        end = info.rows.stop if info.first_row == end else -1
    return end == pieces[0].num_rows
