"""Logits to log-probs, entropies and gradients on a GPU, each in one reading of the logits.

Written in Triton, which comes with torch's CUDA builds; imported only where there is a GPU.
Shape suffixes: T tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_WARPS = 8


def logprobs_of(logits_TV: Tensor, targets_T: Tensor, scale_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For log-softmax(logits · scale): the value at the target, the entropy, and the log of the normalising sum."""
    num_tokens, vocabulary = logits_TV.shape
    logprobs_T, entropy_T, normalizer_T = torch.empty(
        3, num_tokens, dtype=torch.float32, device=logits_TV.device
    ).unbind()
    with torch.cuda.device_of(logits_TV):
        _logprobs_kernel[num_tokens,](
            logits_TV, targets_T, scale_T, logprobs_T, entropy_T, normalizer_T, logits_TV.stride(0), vocabulary,
            BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return logprobs_T, entropy_T, normalizer_T


def gradient_of(
    logits_TV: Tensor, targets_T: Tensor, scale_T: Tensor, normalizer_T: Tensor, grad_T: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits, given that of the log-probs: (onehot(target) − softmax) · scale · grad."""
    num_tokens, vocabulary = logits_TV.shape
    out_TV = torch.empty(num_tokens, vocabulary, dtype=dtype, device=logits_TV.device)
    with torch.cuda.device_of(logits_TV):
        _gradient_kernel[num_tokens, triton.cdiv(vocabulary, _BLOCK)](
            logits_TV, targets_T, scale_T, normalizer_T, grad_T.contiguous(), out_TV, logits_TV.stride(0),
            vocabulary, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out_TV


def _logprobs_of_row(
    logits: tl.tensor,
    targets: tl.tensor,
    scale: tl.tensor,
    logprobs: tl.tensor,
    entropy: tl.tensor,
    normalizer: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    factor = tl.load(scale + row)
    # Sums of e^(z − largest) and of (z − largest)·e^(z − largest), both corrected whenever a larger z appears. The
    # stand-in for minus infinity is finite, because 0 times infinity is NaN.
    largest = tl.full((), -1e30, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < vocabulary, other=-1e30) * factor
        new = tl.maximum(largest, tl.max(z, 0))
        carried = tl.exp(largest - new)
        weighted = (weighted + (largest - new) * total) * carried
        total = total * carried
        power = tl.exp(z - new)
        total += tl.sum(power, 0)
        weighted += tl.sum(power * (z - new), 0)
        largest = new
    log_total = tl.log(total)
    chosen = tl.load(logits + tl.load(targets + row)) * factor
    tl.store(logprobs + row, (chosen - largest) - log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(normalizer + row, largest + log_total)


def _gradient_of_row(
    logits: tl.tensor,
    targets: tl.tensor,
    scale: tl.tensor,
    normalizer: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    factor = tl.load(scale + row)
    z = tl.load(logits + row * row_stride + columns, mask=inside, other=0.0) * factor
    probability = tl.exp(z - tl.load(normalizer + row))
    chosen = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    value = (chosen - probability) * (factor * tl.load(grad + row))
    tl.store(out + row * vocabulary + columns, value.to(out.dtype.element_ty), mask=inside)


_logprobs_kernel = triton.jit(_logprobs_of_row)
_gradient_kernel = triton.jit(_gradient_of_row)
