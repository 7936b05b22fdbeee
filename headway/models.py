"""Any supported transformers causal LM, with our attention and our fused log-probs.

One model definition serves training and generation: its attention layers call the `headway` function registered here,
which hands queries, keys and values to whatever `Attention` the caller passed in: `PackedAttention` for training,
the engine's key/value memory for prefill and decode. One definition on both sides is what makes log-prob parity a
fact rather than a hope.

Shape suffixes: T packed tokens, N sequences, H heads, K key/value heads, D head dimension, V vocabulary, C hidden size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils.logging import disable_progress_bar

from headway.config import InitSection
from headway.errors import ConfigError
from headway.packing import ModelShape

FAMILIES = ("llama", "qwen2", "qwen3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Attention(Protocol):
    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scaling: float) -> Tensor:
        """Attention output, shaped like the query."""
        ...


def _headway_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function transformers' attention layers call; tensors come as (1, heads, T, D)."""
    attention: Attention = kwargs["attention"]
    layer = cast(int, module.layer_idx)
    out_THD = attention.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling
    )
    return out_THD.unsqueeze(0), None


disable_progress_bar()  # loading is shown by whoever asked for it, not by bars of each process
AttentionInterface.register("headway", _headway_attention)
# Our attention knows its own sequence boundaries; without this line transformers would build a dense T×T mask.
AttentionMaskInterface.register("headway", lambda *args, **kwargs: None)


class PackedAttention:
    """Causal attention over sequences laid end to end, without padding and without attending across borders."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scaling: float) -> Tensor:
        pieces = zip(
            *(x.transpose(0, 1).split(self.lengths, dim=1) for x in (query_THD, key_TKD, value_TKD)), strict=True
        )
        outs_HTD = [causal_attention(query, key, value, scaling) for query, key, value in pieces]
        return torch.cat(outs_HTD, dim=1).transpose(0, 1)


def causal_attention(query_HTD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float) -> Tensor:
    """One sequence: T queries that are the last T of S positions."""
    num_queries, num_keys = query_HTD.shape[1], key_KSD.shape[1]
    mask = None
    if num_queries != num_keys:
        ahead = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query_HTD.device)
        mask = ahead.tril(diagonal=num_keys - num_queries)
    out = F.scaled_dot_product_attention(
        query_HTD.unsqueeze(0),
        key_KSD.unsqueeze(0),
        value_KSD.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query_HTD.shape[0] != key_KSD.shape[0],
    )
    return out.squeeze(0)


def hidden_states(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
    """Final hidden states (T, C) of the decoder, before the head."""
    decoder = cast(nn.Module, model.model)
    out = decoder(
        input_ids=tokens_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, attention=attention
    )
    return cast(Tensor, out.last_hidden_state[0])


def head_logits(hidden_TC: Tensor, weight_VC: Tensor) -> Tensor:
    """Logits in fp32, accumulated in fp32, from operands of any type."""
    if hidden_TC.dtype == torch.float32 and weight_VC.dtype == torch.float32:
        return hidden_TC @ weight_VC.T
    if hidden_TC.is_cuda:
        return torch.mm(hidden_TC, weight_VC.T, out_dtype=torch.float32)
    return hidden_TC.float() @ weight_VC.float().T


class _LinearLogprob(torch.autograd.Function):
    """Log-prob and entropy of chosen tokens from hidden states; logits exist for `chunk` tokens at a time only."""

    @staticmethod
    def forward(ctx: Any, hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, scale_T: Tensor, chunk: int) -> Any:
        logprobs_T = torch.empty(len(targets_T), dtype=torch.float32, device=hidden_TC.device)
        entropy_T = torch.empty_like(logprobs_T)
        normalizer_T = torch.empty_like(logprobs_T)
        for start in range(0, len(targets_T), chunk):
            part = slice(start, start + chunk)
            logits = head_logits(hidden_TC[part], weight_VC) * scale_T[part, None]
            normalizer_T[part] = logits.logsumexp(-1)
            log_softmax = logits.sub_(normalizer_T[part, None])
            logprobs_T[part] = log_softmax.gather(-1, targets_T[part, None]).squeeze(-1)
            entropy_T[part] = -(log_softmax.exp() * log_softmax).sum(-1)
        ctx.save_for_backward(hidden_TC, weight_VC, targets_T, scale_T, normalizer_T)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden_TC, weight_VC, targets_T, scale_T, normalizer_T = ctx.saved_tensors
        grad_T = grads[0]
        grad_hidden = torch.empty_like(hidden_TC)
        grad_weight = torch.zeros(weight_VC.shape, dtype=torch.float32, device=weight_VC.device)
        for start in range(0, len(targets_T), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = head_logits(hidden_TC[part], weight_VC) * scale_T[part, None]
            # d logprob / d logits = onehot(target) − softmax
            grad_logits = (logits - normalizer_T[part, None]).exp_().neg_()
            grad_logits.scatter_add_(-1, targets_T[part, None], torch.ones_like(grad_logits[:, :1]))
            grad_logits *= (grad_T[part] * scale_T[part])[:, None]
            operand = grad_logits.to(weight_VC.dtype)
            grad_hidden[part] = operand @ weight_VC
            grad_weight += (operand.T @ hidden_TC[part]).float()
        return grad_hidden, grad_weight.to(weight_VC.dtype), None, None, None


def linear_logprobs(
    hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, temperature_T: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """log-softmax(logits ÷ temperature) at the targets, and the entropy (without gradient), both fp32."""
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _LinearLogprob.apply)
    return apply(hidden_TC, weight_VC, targets_T, 1.0 / temperature_T, chunk)


class Policy(nn.Module):
    """The module the trainer trains: a causal LM whose forward gives log-probs, so that FSDP2 can wrap it whole."""

    def __init__(self, model: PreTrainedModel, logprob_chunk: int):
        super().__init__()
        self.model = model
        self.logprob_chunk = logprob_chunk

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, lengths: list[int], where_M: Tensor, temperature_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the M tokens at packed places `where_M` (never the first of a sequence)."""
        hidden_TC = hidden_states(self.model, tokens_T, positions_T, PackedAttention(lengths))
        # The state before a token predicts it.
        predicting_MC = hidden_TC.index_select(0, where_M - 1)
        weight_VC = cast(nn.Linear, self.model.lm_head).weight
        return linear_logprobs(predicting_MC, weight_VC, tokens_T[where_M], temperature_M, self.logprob_chunk)


def check_supported(config: PreTrainedConfig, where: str) -> None:
    """Refuse, by name, what the embedded engine and the trainer cannot run."""
    if config.model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError(
            f"{where} is a {config.model_type} model, which the embedded engine does not run; "
            f"use one of the families {supported}, or a vLLM engine"
        )
    if getattr(config, "use_sliding_window", False):
        raise ConfigError(f"{where} uses sliding-window attention, which the embedded engine does not run")


def load_config(path: str) -> PreTrainedConfig:
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} is not a model directory: it has no config.json")
    looks_local = path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).parent.is_dir()
    if looks_local and not Path(path).exists():
        raise ConfigError(f"model directory {path} does not exist; make it (`headway sft CONFIG`) or set model.path")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path} cannot be read: {_first_line(error)}") from error
    check_supported(config, path)
    return config


def load_model(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a transformers directory or hub name, with our attention."""
    load_config(path)
    # transformers reports weights it cannot read by several unrelated exception types.
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="headway", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"the weights of {path} cannot be loaded: {_first_line(error)}") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(f"the weights of {path} are incomplete: {missing[0]} is missing; fetch the model again")
    for parameter in model.parameters():
        # A mapped file's tensors start at odd addresses; some products differ by that, in their last bits.
        parameter.data = parameter.data.clone()
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def build_model(init: InitSection, vocab_size: int, pad: int, eos: int, max_context: int, seed: int) -> PreTrainedModel:
    """A small Llama from nothing, its weights drawn from `seed`."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_hidden_layers=init.num_layers,
        num_attention_heads=init.num_heads,
        num_key_value_heads=init.num_kv_heads,
        max_position_embeddings=max_context,
        pad_token_id=pad,
        eos_token_id=eos,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=init.hidden_size**-0.5,  # the usual 0.02 is for wide models; a narrow one would start slowly
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="headway")
    return model


def model_shape(config: PreTrainedConfig) -> ModelShape:
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
    )


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters under the names `save_pretrained` writes, `lm_head.weight` always among them, tied or not."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors.setdefault("lm_head.weight", cast(nn.Linear, model.lm_head).weight)
    return tensors


def shard(policy: Policy, dtype: torch.dtype) -> None:
    """Wrap the policy in FSDP2 where there is something for it to do: several ranks, or weights cast to `dtype`.

    The parameters stay fp32 and are cast where they are gathered, so the forward pass uses exactly what is published.
    One fp32 rank needs neither, and runs the module as it is; nothing else in the trainer knows the difference.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1 and dtype == torch.float32:
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    wrap(policy, init_device_mesh("cpu", (num_ranks,)), dtype)


def wrap(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2 around each layer and the whole; gradients add up over the ranks, as denominators are global."""
    # The one floating-point input is the temperature, and 0.7 is another number in bf16. A root left gathered after a
    # forward pass without a backward would show its cast parameters to whoever saves or copies the master weights.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    decoder = cast(nn.Module, policy.model.model)
    for module in (*cast(nn.ModuleList, decoder.layers), policy):
        wrapped = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` laid out over the ranks as `parameter` is; a scalar, or beside an unsharded parameter, as it is."""
    if isinstance(parameter, DTensor) and value.ndim:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
