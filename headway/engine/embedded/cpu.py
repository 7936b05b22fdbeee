"""The engine's executor on a CPU: one decode step at a time over slabs of keys and values.

Invariant that lives here:
  5. Interruption is transparent when the weights did not change: in deterministic mode a sequence's arithmetic does not
     depend on the rest of its batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headway.config import DEFAULT_KV_TOKENS, EngineSection
from headway.engine.embedded import native
from headway.engine.embedded.decoder import (
    CachedAttention,
    Decoder,
    RotatingOperations,
    TorchOperations,
    activation_name,
)
from headway.engine.embedded.live_weights import LiveWeights
from headway.engine.embedded.sampler import sample, uniforms
from headway.engine.embedded.sequence import RunningSequence
from headway.engine.embedded.slab_kv import DecodeAttention, KvMemory, PrefillAttention, Row, decode_order, least_tokens
from headway.model.loading import model_shape
from headway.types import Floats, Ints


class CpuExecutor:
    device_s = 0.0

    def __init__(self, model: PreTrainedModel, section: EngineSection, max_context: int, deterministic: bool):
        self._section, self._deterministic = section, deterministic
        num_tokens = section.kv_tokens or max(DEFAULT_KV_TOKENS, least_tokens(max_context))
        self.memory = KvMemory(model_shape(model.config), model.dtype, num_tokens, max_context)
        self.operations: RotatingOperations = TorchOperations()
        activation = activation_name(model.config)
        if native.supports(self.memory, activation):
            self.operations = native.NativeOperations(model.dtype, activation)
        # Many tokens at once spend little between products, and the trainer's roundings keep fp32 parity near 1e-6.
        self._prefill_operations = TorchOperations() if model.dtype == torch.float32 else self.operations
        self._decoder = Decoder(model, self.operations, section.max_num_seqs)
        self.weights = LiveWeights(model, [*self._decoder.matrices, self._decoder.head])

    def prefill(self, chunks: Sequence[tuple[RunningSequence, int]]) -> None:
        # Alone, a chunk's arithmetic depends on nothing but itself; packed, it is faster.
        for batch in [[chunk] for chunk in chunks] if self._deterministic else [chunks]:
            rows = [sequence.row for sequence, _ in batch]
            starts, lengths = [sequence.num_cached for sequence, _ in batch], [length for _, length in batch]
            tokens = [sequence.tokens[sequence.num_cached : sequence.num_cached + length] for sequence, length in batch]
            self._forward(np.concatenate(tokens), rows, starts, lengths)

    def _forward(self, tokens: Ints, rows: list[Row], starts: list[int], lengths: list[int]) -> Tensor:
        positions = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        operations = self._prefill_operations
        attention = PrefillAttention(self.memory, rows, starts, lengths, operations)
        places = torch.cat(positions)
        return self._decoder.hidden_states(torch.from_numpy(tokens).long(), places, attention, operations)

    def num_steps(self, num_rows: int) -> int:
        return 1

    def decode(self, ready: Sequence[RunningSequence], num_steps: int) -> list[tuple[Ints, Floats]]:
        order = decode_order([sequence.row for sequence in ready])
        ordered = [ready[i] for i in order]
        positions = [sequence.num_cached for sequence in ordered]
        # Padded to a fixed number of rows, matrix products give a row the same result whatever else is in the batch.
        num_rows = self._section.max_num_seqs if self._deterministic else len(ordered)
        padding = [0] * (num_rows - len(ordered))
        attention = self._decode_attention([sequence.row for sequence in ordered], positions)
        last = [int(sequence.tokens[position]) for sequence, position in zip(ordered, positions, strict=True)]
        hidden = self._decoder.hidden_states(torch.tensor(last + padding), torch.tensor(positions + padding), attention)
        logits = self._decoder.head.logits(hidden)[: len(ordered)]
        draws = uniforms(
            np.array([sequence.counter for sequence in ordered], np.uint64),
            np.array([sequence.num_tokens - sequence.num_prompt for sequence in ordered], np.uint64),
        )
        tokens, logprobs = (found.numpy() for found in sample(logits, [s.request.sampling for s in ordered], draws))
        place = np.argsort(order)
        return [(tokens[i : i + 1].astype(np.int32), logprobs[i : i + 1]) for i in place]

    def _decode_attention(self, rows: list[Row], positions: list[int]) -> CachedAttention:
        if isinstance(self.operations, native.NativeOperations):
            return native.NativeDecodeAttention(self.memory, rows, positions, self.operations)
        return DecodeAttention(self.memory, rows, positions, self.operations, fixed_shapes=self._deterministic)

    def score(self, tokens: Ints, row: Row, temperature: float) -> Floats:
        size = self._section.prefill_chunk
        found = [np.zeros(1, np.float32)]
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            hidden = self._forward(part, [row], [start], [len(part)])
            targets = torch.from_numpy(tokens[start + 1 : start + len(part) + 1]).long()
            logprobs = (self._decoder.head.logits(hidden[: len(targets)]) / temperature).log_softmax(-1)
            found.append(logprobs.gather(-1, targets[:, None]).squeeze(-1).numpy())
        return np.concatenate(found)
