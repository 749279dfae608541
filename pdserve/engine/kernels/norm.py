"""RMSNorm (Zhang and Sennrich 2019), alone and fused with the residual addition before it.

Floor: bytes. Fused, a row of the residual stream and one of the branch are read and two written: 4 * hidden *
element size; apart the addition and the norm would move 5. Llama-3-8B in bfloat16, 2,048 rows: 67 MB, 14 us at
4.8 TB/s; for a few rows the launch (2 to 3 us, less in a graph) is all there is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.support import next_power_of_2


@triton.jit
def norm_kernel(out, summed, x, branch, weight, eps, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Grid (rows,). All [rows, HIDDEN] contiguous, weight [HIDDEN]; with ADD, x + branch goes to `summed` and is normed."""
    column = tl.arange(0, WIDTH)
    mask = column < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + column
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        total = (wide + tl.load(branch + place, mask=mask, other=0.0).to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + place, total, mask=mask)
        wide = total.to(tl.float32)  # the rounded sum is what is normed, as when the two are apart
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    # Rounded before the weight is applied, as the Llama reference does.
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    result = normed * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [rows, hidden], contiguous; weight: [hidden]. Returns [rows, hidden] of x's dtype."""
    out = torch.empty_like(x)
    _launch(out, x, x, x, weight, eps, add=False)
    return out


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, branch: [rows, hidden], contiguous, of one dtype. Returns x + branch and its norm."""
    summed, out = torch.empty_like(x), torch.empty_like(x)
    _launch(out, summed, x, branch, weight, eps, add=True)
    return summed, out


def _launch(out: Tensor, summed: Tensor, x: Tensor, branch: Tensor, weight: Tensor, eps: float, *, add: bool) -> None:
    rows, hidden = x.shape
    if rows == 0:
        return
    width = next_power_of_2(hidden)
    norm_kernel[(rows,)](
        out, summed, x, branch, weight, eps,
        HIDDEN=hidden, WIDTH=width, ADD=add, num_warps=min(8, max(1, width // 512)),
    )  # fmt: skip
