"""Log-probs of a causal LM's tokens: the forward pass of the trainer, without ever holding the full logits.

On a GPU, logprob_kernels.py turns logits into log-probs and gradients.

Shape suffixes: T packed tokens, M sampled tokens, V vocabulary, C hidden size.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headway.model.attention import PackedAttention


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
        from headway.model import logprob_kernels

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
        from headway.model import logprob_kernels

        return logprob_kernels.gradient_of(logits_TV, targets_T, scale_T, normalizer_T, grad_T, dtype)
    logits_TV = logits_TV * scale_T[:, None]
    grad_logits = (logits_TV - normalizer_T[:, None]).exp_().neg_()
    grad_logits.scatter_add_(-1, targets_T[:, None], torch.ones_like(grad_logits[:, :1]))
    grad_logits *= (grad_T * scale_T)[:, None]
    return grad_logits.to(dtype)


def _entropy_gradient(
    logits_TV: Tensor, scale_T: Tensor, normalizer_T: Tensor, entropy_T: Tensor, grad_T: Tensor
) -> Tensor:
    """d entropy / d logits = −p · (log p + entropy), times the temperature's scale; fp32."""
    log_TV = logits_TV * scale_T[:, None] - normalizer_T[:, None]
    return log_TV.exp() * (log_TV + entropy_T[:, None]) * (-grad_T * scale_T)[:, None]


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
        ctx.save_for_backward(hidden_TC, weight_VC, targets_T, scale_T, normalizer_T, entropy_T)
        ctx.chunk, ctx.softcap = chunk, softcap
        ctx.set_materialize_grads(False)  # few losses need the entropy's gradient
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden_TC, weight_VC, targets_T, scale_T, normalizer_T, entropy_T = ctx.saved_tensors
        grad_T = grads[0] if grads[0] is not None else torch.zeros_like(normalizer_T)
        grad_hidden = torch.empty_like(hidden_TC)
        grad_weight: Tensor | None = None  # a frozen head, as with adapters, needs none
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight_VC.shape, dtype=torch.float32, device=weight_VC.device)
        for start in range(0, len(targets_T), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = cap_logits(head_logits(hidden_TC[part], weight_VC), ctx.softcap)
            places = targets_T[part], scale_T[part], normalizer_T[part], grad_T[part]
            wide = bool(ctx.softcap) or grads[1] is not None
            extra = None
            if grads[1] is not None:
                extra = _entropy_gradient(logits, scale_T[part], normalizer_T[part], entropy_T[part], grads[1][part])
            operand = _gradient_of_chunk(logits, *places, torch.float32 if wide else weight_VC.dtype)
            if extra is not None:
                operand += extra
            if ctx.softcap:  # d capped / d logits = 1 − (capped ÷ softcap)²
                operand = operand.mul_(1 - logits.div_(ctx.softcap).square_())
            del logits  # before the products below take memory of their own
            operand = operand.to(weight_VC.dtype)
            grad_hidden[part] = operand @ weight_VC
            if grad_weight is not None:
                grad_weight += _product(operand.T, hidden_TC[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VC.dtype), None, None, None, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in fp32; on a GPU it is never rounded to the operands' type on the way."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def linear_logprobs(
    hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, temperature_T: Tensor, chunk: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """log-softmax(logits ÷ temperature) at the targets, and the entropy, both fp32.

    The soft cap is applied before the temperature.
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


def logit_softcap(config: PreTrainedConfig) -> float:
    return float(config.final_logit_softcapping or 0.0) if config.model_type in ("gemma2", "gemma3_text") else 0.0
