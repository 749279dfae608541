"""RMSNorm (Zhang and Sennrich 2019), alone and fused with the residual addition before it.

Floor: the bytes moved. The fused kernel reads a row of the residual stream and a row of the branch, and writes two rows:
4 * hidden * element size. Addition and norm in two kernels would move 5 * hidden, and a norm of the branch 2 * hidden more.
Llama-3-8B in bfloat16, 2,048 rows: 67 MB, 14 us at 4.8 TB/s. With a few rows, the launch is the whole cost (2 to 3 us, less
in a graph).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.norms import Norm


@triton.jit
def weighed(scaled, weight, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Return `scaled` times weight + OFFSET, both float32, rounded to DTYPE: float32.

    Without an offset, `scaled` is rounded before the weight is applied, as in the Llama reference. With an offset, only the
    result is rounded, as in the Gemma reference.
    """
    if OFFSET == 0:
        result = scaled.to(DTYPE).to(tl.float32) * weight
    else:
        result = scaled * (weight + OFFSET)
    return result.to(DTYPE).to(tl.float32)


@triton.jit
def norm_kernel(
    out, summed, x, branch, weight, post_weight, eps, post_eps,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, POST: tl.constexpr, OFFSET: tl.constexpr,
    POST_OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). All tensors are contiguous [rows, HIDDEN], weights are [HIDDEN].

    With ADD, the kernel writes x + branch to `summed` and the norm of this sum to `out`; otherwise it norms x. With POST, it
    norms the branch before it adds it.
    """
    column = tl.arange(0, WIDTH)
    mask = column < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + column
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(branch + place, mask=mask, other=0.0).to(tl.float32)
        if POST:
            post_scale = tl.rsqrt(tl.sum(added * added, 0) / HIDDEN + post_eps)
            factor = tl.load(post_weight + column, mask=mask, other=0.0).to(tl.float32)
            added = weighed(added * post_scale, factor, POST_OFFSET, out.dtype.element_ty)
        total = (wide + added).to(summed.dtype.element_ty)
        tl.store(summed + place, total, mask=mask)
        wide = total.to(tl.float32)  # the rounded sum is normed, as two separate kernels would do
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    result = weighed(wide * scale, tl.load(weight + column, mask=mask, other=0.0).to(tl.float32), OFFSET, out.dtype.element_ty)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return the RMSNorm of x: [rows, hidden] in x's dtype. x: [rows, hidden], contiguous; weight: [hidden]."""
    out = torch.empty_like(x)
    _launch(out, x, x, x, Norm(weight, eps, offset))
    return out


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, offset: float = 0.0, post: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + branch and the norm of this sum. x, branch: [rows, hidden], contiguous, of one dtype.

    post: the norm of the branch before it is added.
    """
    summed, out = torch.empty_like(x), torch.empty_like(x)
    _launch(out, summed, x, branch, Norm(weight, eps, offset), post, add=True)
    return summed, out


def _launch(
    out: Tensor, summed: Tensor, x: Tensor, branch: Tensor, norm: Norm, post: Norm | None = None, *, add: bool = False
) -> None:
    rows, hidden = x.shape
    if rows == 0:
        return
    width, first = next_power_of_2(hidden), post or norm
    norm_kernel[(rows,)](
        out, summed, x, branch, norm.weight, first.weight, norm.eps, first.eps,
        HIDDEN=hidden, WIDTH=width, ADD=add, POST=post is not None, OFFSET=norm.offset, POST_OFFSET=first.offset,
        num_warps=min(8, max(1, width // 512)),
    )  # fmt: skip
