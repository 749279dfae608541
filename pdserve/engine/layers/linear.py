"""y = x W^T without bias, with the weight laid out once for the device it runs on.

On x86 CPUs oneDNN with a prepacked weight is 1.3 to 3 times faster than `F.linear`. Its two operators are private to
torch, so they are tried once and `F.linear` takes over when they are missing. In float32 it sums all products of an
output one after the other, which takes the logits of SmolLM2 up to 1.2e-4 from the reference. So there the inputs are cut
into parts of PART_WIDTH, summed one by one: 0.5e-4, against 0.7e-4 by `F.linear`, whose step takes 1.2 to 1.6 times as
long (one thread: decode B=1 41 ms against 34, B=32 171 against 121, a prompt of 512 tokens 1,366 against 906).

A row's bits depend on how many rows are multiplied together, never on where it stands among them or on the
others: batch invariance is the caller's choice of a fixed row count (see `rows.py`), not another kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

PART_WIDTH: Final = 288
"""Of 96, 144, 192, 288 and all of the width the fastest but for the last, and the nearest to the reference."""

Linear = Callable[[Tensor], Tensor]
"""x [rows, in_features] -> [rows, out_features], same dtype and device; x is contiguous."""


def make_linear(weight: Tensor) -> Linear:
    """The fastest way to multiply by `weight` [out_features, in_features]. It may keep another copy than `weight`."""
    if weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32) and _packing_works(weight.dtype):
        return _in_parts(weight) if weight.dtype is torch.float32 else _packed(weight)
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


def _in_parts(weight: Tensor) -> Linear:
    parts = [_packed(part.contiguous()) for part in torch.split(weight, PART_WIDTH, dim=1)]
    if len(parts) == 1:
        return parts[0]

    def apply(x: Tensor) -> Tensor:
        first, *others = (
            part(piece.contiguous()) for part, piece in zip(parts, torch.split(x, PART_WIDTH, dim=1), strict=True)
        )
        for other in others:
            first.add_(other)
        return first

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
