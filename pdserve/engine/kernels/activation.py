"""The activation of the gate times the other half, in one pass.

Floor: the bytes moved, 3 * width * element size a row. Llama-3-8B in bfloat16, 2,048 rows: 176 MB, 37 us at 4.8 TB/s. Two
operations of torch move 5 * width, and torch rounds the gate to the element type in between. This kernel rounds it as well,
so that its results equal torch's.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS: Final = 1024  # columns of one program: 16 bytes a thread at four warps in bfloat16
_LINEAR = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def gated(gate, GELU: tl.constexpr):
    """Return GELU by its tangent hyperbolic, or SiLU, of float32 numbers.

    Both are gate * sigmoid(y): y is the gate in SiLU; in GELU it is twice the argument of the tangent, because
    (1 + tanh(x)) / 2 = sigmoid(2 x).
    """
    argument = gate
    if GELU:
        argument = _LINEAR * (gate + _CUBIC * gate * gate * gate)
    return gate / (1.0 + tl.exp(-argument))


@triton.jit
def gate_kernel(out, gate_up, WIDTH: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr):
    """Grid (rows, columns / TILE). gate_up: [rows, 2 * WIDTH], the gate first; out: [rows, WIDTH]; both contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    rounded = gated(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (rounded * up).to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [rows, width]. gate_up: [rows, 2 * width], contiguous, the gate first."""
    return _launch(gate_up, gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up, [rows, width]. gate_up: [rows, 2 * width], contiguous, the gate first."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        gate_kernel[(rows, triton.cdiv(width, COLUMNS))](out, gate_up, WIDTH=width, TILE=COLUMNS, GELU=gelu, num_warps=4)
    return out
