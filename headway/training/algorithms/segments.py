"""The sequences of a micro-batch: sums and means over each one's trained tokens.

A sequence is never split over micro-batches, so what is reduced over one does not depend on packing.

Shape suffixes: T trained tokens of one micro-batch, N its sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Which tokens are one sequence: the first `counts_N[0]` of them, then the next `counts_N[1]`, and so on."""

    counts_N: Tensor
    num_tokens: int  # their sum, which lies on the device

    def sum(self, values_T: Tensor) -> Tensor:
        """Added up in order within each sequence; a sequence without tokens has 0."""
        # Atomic additions, as index_add has them on a GPU, would not repeat bit for bit; checked lengths, and a number
        # of repetitions left to be counted, would make the host wait for the GPU.
        return torch.segment_reduce(values_T, "sum", lengths=self.counts_N, initial=0, unsafe=True)

    def spread(self, values_N: Tensor) -> Tensor:
        """Each sequence's value at each of its tokens."""
        return values_N.repeat_interleave(self.counts_N, output_size=self.num_tokens)

    def mean(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """The mean over each sequence's tokens inside the mask, at each of its tokens; 0 where there are none."""
        inside_T = mask_T.to(values_T.dtype)
        total_N = self.sum(torch.where(mask_T.bool(), values_T, 0.0))
        return self.spread(total_N / self.sum(inside_T).clamp(min=1))
