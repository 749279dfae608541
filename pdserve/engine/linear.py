"""y = x W^T without bias, with the weight laid out once for the device it runs on.

On x86 CPUs oneDNN with a prepacked weight is 1.4 to 3 times faster than `F.linear` at up to 32 rows, in bfloat16 and
float32 alike (SmolLM2's head, one row, bf16: 1.8 ms against 3.3). Its two operators are private to torch, so they
are tried once and `F.linear` takes over when they are missing.

A row's bits depend on how many rows are multiplied together, never on where it stands among them or on the
others: batch invariance is the caller's choice of a fixed row count (see `rows.py`), not another kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""x [rows, in_features] -> [rows, out_features], same dtype and device; x is contiguous."""


def make_linear(weight: Tensor) -> Linear:
    """The fastest way to multiply by `weight` [out_features, in_features]. It may keep another copy than `weight`."""
    if weight.device.type == "cpu" and _packing_works(weight.dtype):
        return _packed(weight)
    return _plain(weight)


def _plain(weight: Tensor) -> Linear:
    def apply(x: Tensor) -> Tensor:
        return F.linear(x, weight)

    return apply


def _packed(weight: Tensor) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise

    def apply(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, packed, None, "none", [], "")
        return result

    return apply


def _packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this CPU have the private operators for `dtype`, and they multiply right."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x = torch.eye(32, dtype=dtype)
    weight = torch.arange(32 * 32, dtype=torch.float32).remainder(7).to(dtype).view(32, 32)
    try:
        y = _packed(weight)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(y, weight.t())
