"""Any supported transformers causal LM, with our attention and our fused log-probs.

The trainer runs the transformers module itself: its attention layers call the `headway` function registered here, which
hands queries, keys and values to the `PackedAttention` of the micro-batch. The engine runs the module's parameters by a
forward pass of its own (engine/embedded/decoder.py), held to this one by tests and by a probe after every swap.

On a GPU, packed attention is one flash-attention call over all sequences, logprob_kernels.py turns logits into
log-probs and gradients, and the decoder's blocks can be compiled: one compiled block serves every layer and length.

Shape suffixes: T packed tokens, N sequences, H heads, K key/value heads, D head dimension, V vocabulary, C hidden size.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface
from transformers.utils.logging import disable_progress_bar

from headway.config import InitSection
from headway.errors import ConfigError
from headway.packing import ModelShape

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU = torch.device("cpu")

# torch 2.11 takes fewer key/value heads than query heads as they come; 2.12 wants to be told.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def find_device(knob: str, name: str, dtype: torch.dtype) -> torch.device:
    """The device `knob` names; that it is not there, or cannot compute in `dtype`, is one sentence."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= there:
        raise ConfigError(f"{knob} = {name} asks for a GPU that is not there ({there} found); set cpu or another")
    device = torch.device("cuda", device.index or 0)
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(f"{knob} = {name} is a GPU without bfloat16; set model.dtype = float16, or use another GPU")
    return device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; the host goes on while a GPU still fetches it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _headway_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function transformers' attention layers call; tensors come as (1, heads, T, D)."""
    attention: PackedAttention = kwargs["attention"]
    # Not asked: which layer this is. A block that looked at its own number would be compiled anew for every layer.
    window, softcap = kwargs.get("sliding_window") or 0, kwargs.get("softcap") or 0.0
    operands = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    out_THD = attention.attend(*operands, scaling, window, softcap)
    return out_THD.unsqueeze(0), None


disable_progress_bar()  # loading is shown by whoever asked for it, not by bars of each process
# Our attention knows its own sequence boundaries. No mask function of this name is registered, and must not be: then
# transformers would look for boundaries too, reading positions back from the device in every forward pass.
AttentionInterface.register("headway", _headway_attention)


class PackedAttention:
    """Causal attention over sequences laid end to end, without padding and without attending across borders.

    On a GPU, 16-bit tensors go through one flash-attention call; its list of borders is made once for all layers. That
    call has no soft cap: capped attention goes sequence by sequence there too.
    """

    def __init__(self, lengths: list[int], device: torch.device = CPU):
        self.lengths = lengths
        self.longest = max(lengths, default=0)
        self.borders_N: Tensor | None = None
        if device.type == "cuda":
            self.borders_N = to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)

    def attend(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        scaling: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attention output, shaped like the query.

        A query sees the last `window` positions, its own among them; 0 is all. Scores go through
        softcap · tanh(score ÷ softcap); 0 leaves them as they are.
        """
        if self.borders_N is not None and query_THD.dtype != torch.float32 and not softcap:
            borders_N, longest = self.borders_N, self.longest
            operands = (query_THD, key_TKD, value_TKD, borders_N, borders_N, longest, longest)
            # So many keys behind and none ahead; all behind, which is -1, is how this function is told to be causal.
            seen = window - 1, 0
            return cast(Tensor, varlen_attn(*operands, scale=scaling, window_size=seen, **_GROUPED_HEADS))
        pieces = zip(
            *(x.transpose(0, 1).split(self.lengths, dim=1) for x in (query_THD, key_TKD, value_TKD)), strict=True
        )
        outs_HTD = [causal_attention(query, key, value, scaling, window, softcap) for query, key, value in pieces]
        return torch.cat(outs_HTD, dim=1).transpose(0, 1)


def causal_attention(
    query_HTD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """One sequence: T queries that are the last T of S positions."""
    num_queries, num_keys = query_HTD.shape[1], key_KSD.shape[1]
    mask = None
    if num_queries != num_keys or 0 < window < num_keys or softcap:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query_HTD.device)
        mask = mask.tril(diagonal=num_keys - num_queries)
        if window:
            mask = mask.triu(diagonal=num_keys - num_queries - window + 1)
    if mask is not None and softcap:
        query_KGTD = query_HTD.unflatten(0, (len(key_KSD), -1))
        key, value = key_KSD.unsqueeze(1), value_KSD.unsqueeze(1)
        return capped_attention(query_KGTD, key, value, mask, scaling, softcap).flatten(0, 1)
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


def capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attention through a soft cap, in fp32 until its end; the mask is true where a query sees a key."""
    scores = softcap * torch.tanh(query.float() @ key.float().transpose(-1, -2) * scaling / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


def hidden_states(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, attention: PackedAttention) -> Tensor:
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


def cap_logits(logits_TV: Tensor, softcap: float) -> Tensor:
    """softcap · tanh(logits ÷ softcap), in place; 0 leaves them as they are."""
    return logits_TV.div_(softcap).tanh_().mul_(softcap) if softcap else logits_TV


def _logprobs_of_chunk(logits_TV: Tensor, targets_T: Tensor, scale_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, and log of the normalising sum, of each row; the logits may be overwritten."""
    if logits_TV.is_cuda:
        from headway import logprob_kernels

        return logprob_kernels.logprobs_of(logits_TV, targets_T, scale_T)
    logits_TV = logits_TV * scale_T[:, None]
    normalizer_T = logits_TV.logsumexp(-1)
    log_softmax = logits_TV.sub_(normalizer_T[:, None])
    logprobs_T = log_softmax.gather(-1, targets_T[:, None]).squeeze(-1)
    return logprobs_T, -(log_softmax.exp() * log_softmax).sum(-1), normalizer_T


def _gradient_of_chunk(
    logits_TV: Tensor, targets_T: Tensor, scale_T: Tensor, normalizer_T: Tensor, grad_T: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits in `dtype`: d logprob / d logits = onehot(target) − softmax."""
    if logits_TV.is_cuda:
        from headway import logprob_kernels

        return logprob_kernels.gradient_of(logits_TV, targets_T, scale_T, normalizer_T, grad_T, dtype)
    logits_TV = logits_TV * scale_T[:, None]
    grad_logits = (logits_TV - normalizer_T[:, None]).exp_().neg_()
    grad_logits.scatter_add_(-1, targets_T[:, None], torch.ones_like(grad_logits[:, :1]))
    grad_logits *= (grad_T * scale_T)[:, None]
    return grad_logits.to(dtype)


class _LinearLogprob(torch.autograd.Function):
    """Log-prob and entropy of chosen tokens from hidden states; logits exist for `chunk` tokens at a time only."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, scale_T: Tensor, chunk: int, softcap: float
    ) -> Any:
        logprobs_T = torch.empty(len(targets_T), dtype=torch.float32, device=hidden_TC.device)
        entropy_T = torch.empty_like(logprobs_T)
        normalizer_T = torch.empty_like(logprobs_T)
        for start in range(0, len(targets_T), chunk):
            part = slice(start, start + chunk)
            logits = cap_logits(head_logits(hidden_TC[part], weight_VC), softcap)
            found = _logprobs_of_chunk(logits, targets_T[part], scale_T[part])
            logprobs_T[part], entropy_T[part], normalizer_T[part] = found
        ctx.save_for_backward(hidden_TC, weight_VC, targets_T, scale_T, normalizer_T)
        ctx.chunk, ctx.softcap = chunk, softcap
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
            logits = cap_logits(head_logits(hidden_TC[part], weight_VC), ctx.softcap)
            places = targets_T[part], scale_T[part], normalizer_T[part], grad_T[part]
            operand = _gradient_of_chunk(logits, *places, torch.float32 if ctx.softcap else weight_VC.dtype)
            if ctx.softcap:  # d capped / d logits = 1 − (capped ÷ softcap)²
                operand = operand.mul_(1 - logits.div_(ctx.softcap).square_()).to(weight_VC.dtype)
            del logits  # before the products below take memory of their own
            grad_hidden[part] = operand @ weight_VC
            grad_weight += _product(operand.T, hidden_TC[part])
        return grad_hidden, grad_weight.to(weight_VC.dtype), None, None, None, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in fp32; on a GPU it is never rounded to the operands' type on the way."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def linear_logprobs(
    hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, temperature_T: Tensor, chunk: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """log-softmax(logits ÷ temperature) at the targets, and the entropy (without gradient), both fp32.

    A soft cap bends the logits before the temperature divides them.
    """
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _LinearLogprob.apply)
    return apply(hidden_TC, weight_VC, targets_T, 1.0 / temperature_T, chunk, softcap)


class Policy(nn.Module):
    """The module the trainer trains: a causal LM whose forward gives log-probs, so that FSDP2 can wrap it whole."""

    def __init__(self, model: PreTrainedModel, logprob_chunk: int):
        super().__init__()
        self.model = model
        self.logprob_chunk = logprob_chunk
        self.softcap = logit_softcap(model.config)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, lengths: list[int], where_M: Tensor, temperature_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the M tokens at packed places `where_M` (never the first of a sequence)."""
        hidden_TC = hidden_states(self.model, tokens_T, positions_T, PackedAttention(lengths, tokens_T.device))
        # The state before a token predicts it.
        predicting_MC = hidden_TC.index_select(0, where_M - 1)
        weight_VC = cast(nn.Linear, self.model.lm_head).weight
        places = tokens_T[where_M], temperature_M
        return linear_logprobs(predicting_MC, weight_VC, *places, self.logprob_chunk, self.softcap)


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile the decoder's blocks in place: one piece of code for all layers of a kind and any number of tokens."""
    # Capped attention is a loop over sequences, which would be compiled anew for every micro-batch.
    capped = attention_softcap(model.config) > 0
    for layer in cast(nn.ModuleList, cast(nn.Module, model.model).layers):
        (cast(nn.Module, layer.mlp) if capped else layer).compile(dynamic=True)


def attention_softcap(config: PreTrainedConfig) -> float:
    """Gemma 3's configuration has the number too, but its attention never looks at it."""
    return float(config.attn_logit_softcapping or 0.0) if config.model_type == "gemma2" else 0.0


def logit_softcap(config: PreTrainedConfig) -> float:
    return float(config.final_logit_softcapping or 0.0) if config.model_type in ("gemma2", "gemma3_text") else 0.0


def check_supported(config: PreTrainedConfig, where: str) -> None:
    """Refuse, by name, what the trainer cannot run: another engine would not help, for it must train it anyway."""
    if config.model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError(
            f"{where} is a {config.model_type} model, which the trainer does not run, whatever the engine; "
            f"use one of the families {supported}"
        )
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    for present, what in (
        (getattr(config, "use_sliding_window", False), f"{config.model_type}'s sliding-window attention"),
        (getattr(config, "use_bidirectional_attention", False), "attention to what follows a token"),
        (unknown, f"layers of {min(unknown, default='')}"),
    ):
        if present:
            raise ConfigError(f"{where} has {what}, which the trainer does not run, whatever the engine; use another")


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


class Masters:
    """The fp32 weights that the optimizer moves, by parameter name.

    Where they are not what the module computes with, they lie beside it: the module holds them cast to `dtype`, which
    is what its passes use and what is published; each gradient is added to its master's, in fp32, as soon as it is
    whole; and `refresh` casts anew after the masters moved.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype | None = None):
        self.named: dict[str, Tensor] = dict(policy.named_parameters())
        self._cast: list[tuple[Tensor, Tensor]] = []
        if dtype is None:
            return
        for name, parameter in list(self.named.items()):
            master = self.named[name] = nn.Parameter(parameter.data)
            parameter.data = master.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(partial(_hand_over_gradient, master))
            self._cast.append((parameter, master))

    @torch.no_grad()
    def refresh(self) -> None:
        for parameter, master in self._cast:
            parameter.copy_(master)

    def put_back(self) -> None:
        """End the arrangement: the module has the masters themselves."""
        for parameter, master in self._cast:
            parameter.data = master.data
        self._cast.clear()


def _hand_over_gradient(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


def shard(policy: Policy, dtype: torch.dtype, device: torch.device = CPU) -> Masters:
    """Make the policy compute on `device` in `dtype` from fp32 masters: over several ranks by FSDP2, on one without it.

    FSDP2 keeps the parameters fp32 and casts them where they are gathered. One rank has nothing to gather, and casting
    once a step is cheaper than once a pass. Either way the forward pass uses exactly what is published, and nothing
    else in the trainer knows the difference.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        return Masters(policy.to(device), None if dtype == torch.float32 else dtype)
    # Not moved there whole: a layer goes to the device as it is cut up, and only a rank's own rows of it stay.
    wrap(policy, init_device_mesh(device.type, (num_ranks,)), dtype)
    return Masters(policy)


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


def shard_like(parameter: Tensor, rows: Tensor) -> Tensor:
    """This rank's `rows` as part of a tensor laid out as `parameter` is; a scalar, or beside a whole one, as it is."""
    if isinstance(parameter, DTensor) and rows.ndim:
        mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())
    return rows


def local_rows(tensor: Tensor) -> Tensor:
    """The rows this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded: every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
