"""The engine's executor on a GPU: decode steps as CUDA graphs over paged keys and values.

Tokens, lengths, random counters and stop flags stay on the device while several steps run; between them the host
reads what was sampled and uploads the next batch. A step is one graph per size of batch. Addresses of weights
never change, so graphs outlive swaps. Prefill runs outside graphs, packed, through the same pages.

Shape suffixes: B rows of the batch, T tokens, N chunks, P pages of a row, S steps, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headway.config import EngineSection
from headway.engine.embedded import kernels
from headway.engine.embedded.decode_batch import DecodeBatch, bucket_of
from headway.engine.embedded.decode_plan import DecodePlan, SharedPrefix, plan_decode
from headway.engine.embedded.decoder import Decoder, Layer, Norm, Rotation, activation_name
from headway.engine.embedded.live_weights import LiveWeights
from headway.engine.embedded.paged_attention import decode_attention, prefill_attention
from headway.engine.embedded.paged_kv import PAGE, PagedMemory, Pages
from headway.engine.embedded.sampler import is_truncated, sample, uniforms
from headway.engine.embedded.sequence import RunningSequence
from headway.errors import ConfigError
from headway.model.loading import model_shape
from headway.types import Floats, Ints, WeightUpdate

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SCORE_CHUNK = 1024
_MAX_STEPS = 64


class TritonOperations:
    """The decoder's `Operations` as Triton kernels."""

    def __init__(self, activation: str):
        self._activation: Any = _ACTIVATIONS[activation]

    def add_norm(self, residual_TC: Tensor, delta_TC: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        weight, eps, unit_offset = norm.weight, norm.eps, norm.unit_offset
        if delta_TC is None:
            return residual_TC, kernels.rms_norm(residual_TC, weight, eps, unit_offset=unit_offset)
        normed_TC, summed_TC = kernels.add_rms_norm(delta_TC, residual_TC, weight, eps, unit_offset=unit_offset)
        return summed_TC, normed_TC

    def gated(self, gate_up_T2F: Tensor, layer: Layer) -> Tensor:
        return kernels.gated_activation(gate_up_T2F, self._activation)


class PagedAttention:
    """Rotates queries and keys and writes to pages; its two subclasses attend."""

    def __init__(self, memory: PagedMemory, positions_T: Tensor, slots_T: Tensor):
        self._memory, self._positions_T, self._slots_T = memory, positions_T, slots_T

    def _store(self, index: int, layer: Layer, qkv_TXD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the layer's keys and values with the new ones among them."""
        query_norm, key_norm = layer.query_norm, layer.key_norm
        keys, values = self._memory.layer(index)
        query_THD = kernels.rope_and_write(
            qkv_TXD.flatten(1), self._positions_T, rotation.cos_TD, rotation.sin_TD, self._slots_T, keys, values,
            layer.num_heads, layer.num_kv_heads, None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight, 0.0 if query_norm is None else query_norm.eps,
            query_norm is not None and query_norm.unit_offset,
        )  # fmt: skip
        return query_THD, keys, values


class PagedDecodeAttention(PagedAttention):
    """One query per row of the batch; rows that are finished read and write nothing. Plans go by their window."""

    def __init__(self, memory: PagedMemory, batch: DecodeBatch, plans: Mapping[int, DecodePlan]):
        super().__init__(memory, batch.rows("positions"), batch.rows("slots"))
        self._batch, self._plans = batch, plans

    def attend(self, index: int, layer: Layer, qkv_TXD: Tensor, rotation: Rotation) -> Tensor:
        query_BHD, keys, values = self._store(index, layer, qkv_TXD, rotation)
        batch = self._batch
        return decode_attention(
            query_BHD, keys, values, batch.rows("table"), batch.rows("visible"), layer.scaling, window=layer.window,
            softcap=layer.softcap, prefix=_prefix_seen(batch, layer.window), plan=self._plans[layer.window],
        )  # fmt: skip


def _prefix_seen(batch: DecodeBatch, window: int) -> SharedPrefix | None:
    """The shared prompts, for layers without a window: only there does every row attend to all of its prompt."""
    return None if window else batch.prefix


class PagedPrefillAttention(PagedAttention):
    """Packed chunks of several sequences, each after what its pages hold already."""

    def __init__(
        self, memory: PagedMemory, rows: list[Pages], starts: list[int], lengths: list[int], device: torch.device
    ):
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        places = zip(rows, starts, lengths, strict=True)
        slots = np.concatenate([_slots(row, start, length) for row, start, length in places])
        num_pages = max(row.num_pages for row in rows)
        super().__init__(memory, _upload(positions, device), _upload(slots, device))
        self.positions_T = self._positions_T
        self._table_NP = _upload(np.stack([row.ids[:num_pages] for row in rows]), device)
        self._starts_N = _upload(np.array(starts, np.int32), device)
        self._lengths_N = _upload(np.array(lengths, np.int32), device)
        self._borders_N = _upload(np.cumsum([0, *lengths], dtype=np.int32), device)
        self._longest = max(lengths)

    def attend(self, index: int, layer: Layer, qkv_TXD: Tensor, rotation: Rotation) -> Tensor:
        query_THD, keys, values = self._store(index, layer, qkv_TXD, rotation)
        borders = self._starts_N, self._lengths_N, self._borders_N, self._longest
        places = self._table_NP, *borders
        return prefill_attention(
            query_THD, keys, values, *places, layer.scaling, window=layer.window, softcap=layer.softcap
        ).flatten(1)


def _slots(row: Pages, start: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    places = np.arange(start, start + length)
    return row.ids[places // PAGE].astype(np.int64) * PAGE + places % PAGE


def _upload(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


class CudaDecoder(Decoder):
    """The decoder with the rotations of all positions computed once."""

    def __init__(self, model: PreTrainedModel, max_context: int):
        super().__init__(model, TritonOperations(activation_name(model.config)), num_rows=0)
        for layer in self._layers:
            # A window as long as the context hides nothing; without one, prompts can be shared.
            layer.window = layer.window if layer.window < max_context else 0
        places = torch.arange(max_context, device=model.device)
        found = super()._rotations(torch.zeros(1, device=model.device, dtype=torch.float32), places)
        self._tables = {name: Rotation(r.cos_TD.contiguous(), r.sin_TD.contiguous()) for name, r in found.items()}

    def _rotations(self, like: Tensor, positions_T: Tensor) -> dict[str, Rotation]:
        return self._tables


class StreamedWeights(LiveWeights):
    """Weights that are staged on a stream of their own, and swapped on that of the decode steps."""

    def __init__(self, model: PreTrainedModel, stream: torch.cuda.Stream):
        super().__init__(model, [])
        self._stream, self._staging_stream = stream, torch.cuda.Stream(model.device)

    def stage(self, update: WeightUpdate) -> None:
        with torch.cuda.stream(self._staging_stream):
            super().stage(update)
            self._staging_stream.synchronize()

    def swap(self) -> dict[str, str]:
        with torch.cuda.stream(self._stream):
            fingerprints = super().swap()
            self._stream.synchronize()
        return fingerprints


class CudaExecutor:
    def __init__(self, model: PreTrainedModel, section: EngineSection, max_context: int, kv_share: float):
        _check_model(model)
        self._device = model.device
        self._stream = torch.cuda.Stream(self._device)
        self._decoder = CudaDecoder(model, max_context)
        self.weights = StreamedWeights(model, self._stream)
        shape = model_shape(model.config)
        num_tokens = section.kv_tokens or _free_tokens(model, max_context, kv_share)
        self.memory = PagedMemory(shape, model.dtype, num_tokens, max_context, self._device)
        self._num_kv_heads = shape.num_kv_heads
        self._batch = DecodeBatch(section.max_num_seqs, self.memory.max_pages, _MAX_STEPS, self._device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._begun, self._done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.device_s = 0.0
        torch.cuda.synchronize(self._device)

    # Prefill

    def prefill(self, chunks: Sequence[tuple[RunningSequence, int]]) -> None:
        rows = [sequence.row for sequence, _ in chunks]
        starts, lengths = [sequence.num_cached for sequence, _ in chunks], [length for _, length in chunks]
        tokens = [sequence.tokens[sequence.num_cached : sequence.num_cached + length] for sequence, length in chunks]
        with torch.cuda.stream(self._stream):
            self._forward(np.concatenate(tokens), rows, starts, lengths)

    def _forward(self, tokens: Ints, rows: list[Pages], starts: list[int], lengths: list[int]) -> Tensor:
        self.memory.flush()
        attention = PagedPrefillAttention(self.memory, rows, starts, lengths, self._device)
        return self._decoder.hidden_states(_upload(tokens, self._device).long(), attention.positions_T, attention)

    # Decode

    def num_steps(self, num_rows: int) -> int:
        """Short intervals cost host time for every row, long ones idle steps of rows that are finished."""
        return min(_MAX_STEPS, max(32, num_rows // 16))

    def decode(self, ready: Sequence[RunningSequence], num_steps: int) -> list[tuple[Ints, Floats]]:
        with torch.cuda.stream(self._stream):
            self.memory.flush()
            order, self.device_s = self._batch.load(ready, bucket_of(len(ready))), 0.0
            if any(is_truncated(sequence.request.sampling) for sequence in ready):
                found = self._truncated_step([ready[i] for i in order])
            else:
                graph = self._graph()
                self._begun.record()
                for _ in range(num_steps):
                    graph.replay()
                self._done.record()
                found = self._batch.results(len(ready), num_steps)
                self.device_s = self._begun.elapsed_time(self._done) / 1e3
        place = np.argsort(order)
        return [found[i] for i in place]

    def _graph(self) -> torch.cuda.CUDAGraph:
        """The step of the batch as it is loaded, captured when first needed."""
        key = self._batch.num_rows, self._batch.prefix is not None
        if key not in self._graphs:
            self._batch.warm_up(self._step)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                self._step()
            self._graphs[key] = graph
        return self._graphs[key]

    def _step(self) -> None:
        self._batch.begin_step()
        logits_BV = self._logits()
        inverse_temperature_B, greedy_B = map(self._batch.rows, ("inverse_temperature", "greedy"))
        counters_B, draws_B = map(self._batch.rows, ("counters", "draws"))
        self._batch.end_step(*kernels.sample(logits_BV, inverse_temperature_B, greedy_B, counters_B, draws_B))

    def _logits(self) -> Tensor:
        batch = self._batch
        lengths_B, heads = batch.rows("visible"), self._num_kv_heads
        plans = {
            window: plan_decode(lengths_B, heads, window=window, prefix=_prefix_seen(batch, window))
            for window in self._decoder.windows
        }
        attention = PagedDecodeAttention(self.memory, batch, plans)
        hidden_BC = self._decoder.hidden_states(batch.rows("tokens"), batch.rows("positions"), attention)
        return self._decoder.head.logits(hidden_BC)

    def _truncated_step(self, ordered: list[RunningSequence]) -> list[tuple[Ints, Floats]]:
        """One token each, without a graph, where top-k or top-p need the whole vocabulary sorted."""
        self._batch.begin_step()
        logits_BV = self._logits()[: len(ordered)].float()
        draws = uniforms(
            np.array([sequence.counter for sequence in ordered], np.uint64),
            np.array([sequence.num_tokens - sequence.num_prompt for sequence in ordered], np.uint64),
        )
        tokens, logprobs = (x.cpu().numpy() for x in sample(logits_BV, [s.request.sampling for s in ordered], draws))
        return [(tokens[i : i + 1].astype(np.int32), logprobs[i : i + 1]) for i in range(len(ordered))]

    # Scores

    def score(self, tokens: Ints, row: Pages, temperature: float) -> Floats:
        found = [np.zeros(1, np.float32)]
        with torch.cuda.stream(self._stream):
            for start in range(0, len(tokens), _SCORE_CHUNK):
                part = tokens[start : start + _SCORE_CHUNK]
                hidden = self._forward(part, [row], [start], [len(part)])
                targets = _upload(tokens[start + 1 : start + len(part) + 1], self._device).long()
                logprobs = (self._decoder.head.logits(hidden[: len(targets)]) / temperature).log_softmax(-1)
                found.append(logprobs.gather(-1, targets[:, None]).squeeze(-1).cpu().numpy())
        return np.concatenate(found)


def _check_model(model: PreTrainedModel) -> None:
    rope = getattr(model.config, "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layer.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            raise ConfigError(
                f"rotary embedding of type {parameters['rope_type']} depends on the length of a sequence, which the "
                "embedded engine does not follow on a GPU; use the vLLM engine"
            )
    activation = activation_name(model.config)
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"activation {activation} is not one the embedded engine runs on a GPU; use the vLLM engine")


def _free_tokens(model: PreTrainedModel, max_context: int, share: float) -> int:
    """How many tokens' keys and values fit into what the weights and their shadow leave free."""
    per_token = model_shape(model.config).kv_elements * model.dtype.itemsize
    shadow = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = torch.cuda.mem_get_info(model.device)[0] - shadow
    num_tokens = int(free * share) // per_token
    if num_tokens < 2 * max_context:
        raise ConfigError(
            f"the GPU has {free / 1e9:.1f} GB left after the weights, too little for two sequences of {max_context} "
            "tokens; lower engine.max_context, or use a smaller model or a larger GPU"
        )
    return num_tokens
