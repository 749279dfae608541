"""The per-token functions of a decoder besides its matrix products. float32 inside, whatever the dtype outside.

`exp` is the only function here whose vectorised and scalar forms may differ in the last bit (sum, product,
quotient and square root are correctly rounded in both). torch runs the scalar form on what is left over after
whole vectors in each thread's share, and threads share out tensors of 32,768 elements and more at any boundary. So
`exp_fixed` hands out pieces small enough for one thread and long enough to have no rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

_PIECE: Final = 16384  # below torch's grain of 32,768 elements, a multiple of two 512-bit vectors

Exp = Callable[[Tensor], Tensor]
"""In place, x: contiguous float32."""


def exp_whole(x: Tensor) -> Tensor:
    return x.exp_()


def exp_fixed(x: Tensor) -> Tensor:
    """An element's result does not depend on its place. The size must be a multiple of 32."""
    assert x.numel() % 32 == 0
    for piece in torch.split(x.view(-1), _PIECE):
        piece.exp_()
    return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [rows, hidden]. As in the Llama reference: rounded to x's dtype before the weight is applied."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


def silu_and_mul(gate_up: Tensor, exp: Exp) -> Tensor:
    """gate_up: [rows, 2 * width], gate first. Returns silu(gate) * up: [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    denominator = exp(wide.neg()).add_(1)
    return (wide / denominator).to(gate_up.dtype) * up
