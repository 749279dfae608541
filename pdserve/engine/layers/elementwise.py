"""The per-token functions of a decoder besides its matrix products. They compute in float32 for any dtype of the inputs.

`exp` is the only function here whose vectorised and scalar forms may differ in the last bit; sum, product, quotient and
square root are correctly rounded in both. Torch uses the scalar form for the elements that are left over after the whole
vectors of each thread's share. It divides tensors of 32,768 elements and more between threads at any boundary. So
`exp_fixed` computes in pieces that are small enough for one thread and are whole vectors.
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
"""Function of gate_up [rows, 2 * width], the gate first, that returns silu(gate) * up: [rows, width]."""


def exp_fixed(x: Tensor) -> Tensor:
    """Replace x by exp(x) and return it. The result of an element does not depend on its place. x: contiguous float32."""
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
    """Return the RMSNorm of x [rows, hidden]. It is rounded to x's dtype before the weight, as in the Llama reference."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up in the fastest way; the last bits may depend on the batch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul_fixed(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up so that the result of an element does not depend on its place."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    denominator = exp_fixed(wide.neg().contiguous()).add_(1)
    return (wide / denominator).to(gate_up.dtype) * up
