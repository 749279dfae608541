"""The per-token functions of a decoder besides its matrix products. They compute in float32 for any dtype of the inputs.

The vectorised and scalar forms of `exp` and `tanh` may differ in the last bit; sum, product, quotient and square root are
correctly rounded in both. Torch uses the scalar form for the elements that are left over after the whole vectors of each
thread's share. It divides tensors of 32,768 elements and more between threads at any boundary. So `exp_fixed` and
`tanh_fixed` compute in pieces that are small enough for one thread and are whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_VECTORS: Final = 32  # float32 elements of two 512-bit vectors, torch's widest stride
_PIECE: Final = 16384  # below torch's grain of 32,768 elements, a multiple of _VECTORS

_GELU: Final = (sqrt(2 / pi), 0.044715)
"""The factors of x, and of x^3, within the tangent hyperbolic of GELU (Hendrycks and Gimpel 2016, section 2)."""

Softcap = Callable[[Tensor, float], Tensor]
"""Function of float32 numbers x and of a bound c that returns c * tanh(x / c), in place of x."""


def exp_fixed(x: Tensor) -> Tensor:
    """Replace x by exp(x) and return it. The result of an element does not depend on its place. x: contiguous float32."""
    return _by_pieces(x, torch.exp_)


def tanh_fixed(x: Tensor) -> Tensor:
    """Replace x by tanh(x) and return it. The result of an element does not depend on its place. x: contiguous float32."""
    return _by_pieces(x, torch.tanh_)


def _by_pieces(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Replace x by function(x), which changes its argument. Each call has whole vectors of one thread."""
    flat = x.view(-1)
    rest = len(flat) % _VECTORS
    whole = len(flat) - rest
    if whole:
        for piece in torch.split(flat[:whole], _PIECE):
            function(piece)
    if rest:
        padded = function(F.pad(flat[whole:], (0, _VECTORS - rest)))
        flat[whole:] = padded[:rest]
    return x


def softcap(x: Tensor, cap: float) -> Tensor:
    """Replace float32 x by cap * tanh(x / cap) in the fastest way; the last bits may depend on the batch."""
    return x.div_(cap).tanh_().mul_(cap)


def softcap_fixed(x: Tensor, cap: float) -> Tensor:
    """Replace contiguous float32 x by cap * tanh(x / cap) so that the result of an element does not depend on its place."""
    return tanh_fixed(x.div_(cap)).mul_(cap)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return the RMSNorm of x [rows, width].

    Without an offset it is rounded to x's dtype before the weight, as in the Llama reference. With an offset, which is added
    to the weight, all is computed in float32, as in the Gemma reference.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if offset:
        return (wide * scale).mul_(weight.float() + offset).to(x.dtype)
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


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up in the fastest way; the last bits may depend on the batch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_and_mul_fixed(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up so that the result of an element does not depend on its place."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float().contiguous()
    first, third = _GELU
    inner = (wide * wide).mul_(wide).mul_(third).add_(wide).mul_(first)
    return tanh_fixed(inner).add_(1).mul_(wide).mul_(0.5).to(gate_up.dtype) * up
