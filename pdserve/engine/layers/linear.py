"""The product y = x W^T without bias. The weight is laid out once for its device.

On x86 CPUs oneDNN with a prepacked weight is 1.3 to 3 times faster than `F.linear`. Its two operators are private to torch,
so they are tried once, and `F.linear` is used when they are missing. In float32, oneDNN sums all products of an output one
after the other, which moves the logits of SmolLM2 up to 1.2e-4 away from the reference. So in float32 the inputs are cut
into parts of PART_WIDTH, whose products are summed one by one. That gives 0.5e-4, against 0.7e-4 by `F.linear`, whose step
takes 1.2 to 1.6 times as long (one thread: decode B=1 41 ms against 34, B=32 171 against 121, a prompt of 512 tokens 1,366
against 906).

The bits of a row depend on the number of rows that are multiplied together, never on the place of the row or on the other
rows. So the caller gets batch invariance by choosing fixed row counts (see `rows.py`), not by another kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

PART_WIDTH: Final = 288
"""Inputs of one part. Tried: 96, 144, 192, 288 and the whole width. 288 is the nearest to the reference and the fastest
except for the whole width."""

Linear = Callable[[Tensor], Tensor]
"""Function of a contiguous x [rows, in_features] that returns [rows, out_features] of the same dtype and device."""


def make_linear(weight: Tensor) -> Linear:
    """Return the fastest way to multiply by `weight` [out_features, in_features]. It may keep a copy instead of `weight`."""
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
    """Tell whether this torch and this CPU have the private operators for `dtype`, and whether they multiply correctly."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x = torch.eye(32, dtype=dtype)
    weight = torch.arange(32 * 32, dtype=torch.float32).remainder(7).to(dtype).view(32, 32)
    try:
        y = _packed(weight)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(y, weight.t())
