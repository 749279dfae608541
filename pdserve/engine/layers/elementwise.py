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
import torch.nn.functional as F
from torch import Tensor

_VECTORS: Final = 32  # float32 elements of two 512-bit vectors, torch's widest stride
_PIECE: Final = 16384  # below torch's grain of 32,768 elements, a multiple of _VECTORS

SiluAndMul = Callable[[Tensor], Tensor]
"""gate_up: [rows, 2 * width], gate first. Returns silu(gate) * up: [rows, width]."""


def exp_fixed(x: Tensor) -> Tensor:
    """In place, x: contiguous float32. An element's result does not depend on its place."""
    flat = x.view(-1)
    rest = len(flat) % _VECTORS
    whole = len(flat) - rest
    if whole:
        for piece in torch.split(flat[:whole], _PIECE):
            piece.exp_()
    if rest:
        padded = F.pad(flat[whole:], (0, _VECTORS - rest)).exp_()
        flat[whole:] = padded[:rest]
    return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [rows, hidden]. As in the Llama reference: rounded to x's dtype before the weight is applied."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul_fixed(gate_up: Tensor) -> Tensor:
    """An element's result does not depend on its place."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    denominator = exp_fixed(wide.neg().contiguous()).add_(1)
    return (wide / denominator).to(gate_up.dtype) * up
