"""What tests of kernels share: where they run, how exact they are, and Triton's interpreter where there is no GPU.

Imported before anything that defines a kernel.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, Triton's own too: before Triton is imported
pytest.importorskip("triton")


DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
if not ON_GPU:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: type, scope: Any) -> None:
        # Triton 3.6: a loop's bound is an array of one element, which NumPy 2.4 no longer takes for an integer.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def ints(values: list[int] | np.ndarray, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(np.asarray(values), device=DEVICE).to(dtype)
