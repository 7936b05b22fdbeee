"""The batch that decodes on a GPU, as tensors with fixed addresses: loaded by the host, advanced by the device.

Shape suffixes: B rows of the batch, G groups of rows that share a prompt, P pages of a row, S steps, E stop tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engine.embedded import kernels
from headway.engine.embedded.decode_plan import SharedPrefix
from headway.engine.embedded.paged_kv import PAGE
from headway.engine.embedded.sequence import RunningSequence
from headway.types import Floats, Ints

NUM_STOP_TOKENS = 8
"""Stop tokens that the device checks; the host cuts a request with more at the others."""
MAX_GROUP = 16
"""Rows that read a shared prompt together; larger groups are several."""


def bucket_of(num_rows: int) -> int:
    """The size of batch that a number of rows is padded to: few sizes, and little padding."""
    if num_rows <= 8:
        return 1 << max(0, num_rows - 1).bit_length()
    step = 8 if num_rows <= 64 else 16 if num_rows <= 256 else 64
    return -(-num_rows // step) * step


class DecodeBatch:
    def __init__(self, max_rows: int, max_pages: int, num_steps: int, device: torch.device):
        self.num_rows, self._num_groups = 0, 0
        size = bucket_of(max_rows)
        self._device_tensors: dict[str, Tensor] = {}
        self._host_tensors: dict[str, Tensor] = {}
        for name, shape, dtype in [
            ("tokens", (size,), torch.int64),
            ("lengths", (size,), torch.int32),
            ("limits", (size,), torch.int32),
            ("alive", (size,), torch.int32),
            ("counters", (size,), torch.int64),
            ("draws", (size,), torch.int64),
            ("inverse_temperature", (size,), torch.float32),
            ("greedy", (size,), torch.int32),
            ("stop_tokens", (size, NUM_STOP_TOKENS), torch.int64),
            ("table", (size, max_pages), torch.int32),
            ("starts", (size,), torch.int32),
            ("groups", (3, max(1, size // 2)), torch.int32),
        ]:
            self._device_tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
            self._host_tensors[name] = torch.zeros(shape, dtype=dtype).pin_memory()
        # What the device alone writes: where each row's last token goes, and how many tokens each row attends to.
        for name, dtype in (("slots", torch.int64), ("positions", torch.int64), ("visible", torch.int32)):
            self._device_tensors[name] = torch.zeros(size, dtype=dtype, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._sampled = torch.zeros(num_steps, size, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(num_steps, size, dtype=torch.float32, device=device)

    # What a step reads

    def rows(self, name: str) -> Tensor:
        """The part of a tensor that belongs to the batch as loaded; `visible` is 0 for rows that are finished."""
        return self._device_tensors[name][: self.num_rows]

    @property
    def prefix(self) -> SharedPrefix | None:
        if not self._num_groups:
            return None
        first, count, length = self._device_tensors["groups"][:, : max(1, self.num_rows // 2)]
        return SharedPrefix(first, count, length, self.rows("starts"), MAX_GROUP)

    # The host's part

    def load(self, ready: Sequence[RunningSequence], num_rows: int) -> list[int]:
        """Upload the next batch, padded to `num_rows`; returns the order in which it holds `ready`."""
        order, groups = _by_prompt(ready)
        self.num_rows, self._num_groups = num_rows, len(groups)
        host = {name: tensor.numpy() for name, tensor in self._host_tensors.items()}
        _write_rows(host, [ready[i] for i in order], num_rows)
        for number, (first, count, length) in enumerate(groups):
            host["groups"][:, number] = first, count, length
            host["starts"][first : first + count] = length
        self._lengths_before = host["lengths"][: len(order)].copy()
        for name, tensor in self._host_tensors.items():
            part = slice(None) if name == "groups" else slice(num_rows)
            self._device_tensors[name][part].copy_(tensor[part], non_blocking=True)
        self._step.zero_()
        return order

    def results(self, num_rows: int, num_steps: int) -> list[tuple[Ints, Floats]]:
        """The tokens and log-probs sampled since `load`, row by row; waits for the device."""
        lengths = self._device_tensors["lengths"][:num_rows].to("cpu", non_blocking=True)
        sampled = self._sampled[:num_steps, :num_rows].to(torch.int32).T.contiguous().to("cpu", non_blocking=True)
        logprobs = self._logprobs[:num_steps, :num_rows].T.contiguous().to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        counts = lengths.numpy() - self._lengths_before
        tokens, values = sampled.numpy(), logprobs.numpy()
        return [(tokens[row, :count], values[row, :count]) for row, count in enumerate(counts)]

    # The device's part: these run inside graphs

    def begin_step(self) -> None:
        """Compute where each row's last token is written, and how many tokens it attends to."""
        lengths_B, alive_B, table_BP = map(self.rows, ("lengths", "alive", "table"))
        positions_B, slots_B, visible_B = map(self.rows, ("positions", "slots", "visible"))
        kernels.begin_step(lengths_B, alive_B, table_BP, positions_B, slots_B, visible_B, self._step, PAGE)

    def end_step(self, sampled_B: Tensor, logprobs_B: Tensor) -> None:
        """Take the sampled tokens; rows that reached a stop token or their limit sample no more."""
        stop_tokens_BE, limits_B = map(self.rows, ("stop_tokens", "limits"))
        tokens_B, draws_B, lengths_B, alive_B = map(self.rows, ("tokens", "draws", "lengths", "alive"))
        written = tokens_B, draws_B, lengths_B, alive_B, self._sampled, self._logprobs
        kernels.end_step(sampled_B, logprobs_B, stop_tokens_BE, limits_B, self._step, *written)

    def warm_up(self, step: Callable[[], None]) -> None:
        """Run a step and restore the state, so that a capture finds everything compiled."""
        names = ("tokens", "lengths", "alive", "draws")
        before = {name: self._device_tensors[name].clone() for name in names}
        step()
        for name, tensor in before.items():
            self._device_tensors[name].copy_(tensor)
        self._step.zero_()


def _write_rows(host: dict[str, NDArray[np.generic]], sequences: Sequence[RunningSequence], num_rows: int) -> None:
    """Fill the host tensors, field by field because this runs at every synchronisation; padding is not alive."""
    n = len(sequences)
    temperatures = np.array([sequence.request.sampling.temperature for sequence in sequences], np.float32)
    lengths = np.array([sequence.num_tokens for sequence in sequences], np.int32)
    host["tokens"][:n] = [sequence.tokens[sequence.num_tokens - 1] for sequence in sequences]
    host["lengths"][:n] = lengths
    host["limits"][:n] = [sequence.limit for sequence in sequences]
    host["alive"][:n], host["alive"][n:num_rows] = 1, 0
    host["counters"][:n] = np.array([sequence.counter for sequence in sequences], np.uint64).view(np.int64)
    host["draws"][:n] = lengths - np.array([sequence.num_prompt for sequence in sequences], np.int32)
    host["inverse_temperature"][:n] = np.where(temperatures > 0, 1 / np.where(temperatures > 0, temperatures, 1), 1)
    host["greedy"][:n] = temperatures == 0
    host["starts"][:num_rows], host["groups"][:], host["stop_tokens"][:num_rows] = 0, 0, -1
    stop_tokens, table = host["stop_tokens"], host["table"]
    for row, sequence in enumerate(sequences):
        stops, pages = sequence.request.sampling.stop_tokens, sequence.row
        if stops:
            stop_tokens[row, : len(stops[:NUM_STOP_TOKENS])] = stops[:NUM_STOP_TOKENS]
        table[row, : pages.num_pages] = pages.held


def _by_prompt(ready: Sequence[RunningSequence]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """An order with rows of the same prompt adjacent, and (first row, count, shared tokens) of each such group."""
    holders: dict[int, list[int]] = {}
    for index, sequence in enumerate(ready):
        # Whole pages of the prompt are shared or not as one; without any, the row shares nothing.
        shares = (sequence.num_prompt - 1) // PAGE > 0
        holders.setdefault(int(sequence.row.ids[0]) if shares else -1 - index, []).append(index)
    order: list[int] = []
    groups: list[tuple[int, int, int]] = []
    for members in holders.values():
        for start in range(0, len(members), MAX_GROUP):
            part = members[start : start + MAX_GROUP]
            if len(part) > 1:
                groups.append((len(order), len(part), (ready[part[0]].num_prompt - 1) // PAGE * PAGE))
            order.extend(part)
    return order, groups
