"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3.1.

Sines and cosines come from one table, by position, so they cannot depend on the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.core.model_spec import Llama3Scaling, RopeSpec


def rope_table(rope: RopeSpec, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """Return the table for `rotate`, [max_positions, 2, head_dim] float32: cosines, then sines, whose first half is negated."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling is not None:
        frequencies = _stretch(frequencies, rope.scaling)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)


def rotate(x: Tensor, table_rows: Tensor) -> Tensor:
    """Rotate x [rows, heads, head_dim] by table_rows [rows, 2, head_dim]. Element i of a head pairs with i + head_dim / 2.

    The code uses only sums and products, without fused multiply-add. Each is correctly rounded at every place of an element.
    """
    cos, sin = table_rows.unsqueeze(2).unbind(1)
    wide = x.float()
    swapped = torch.roll(wide, x.shape[-1] // 2, dims=-1)
    return (wide * cos).add_(swapped.mul_(sin)).to(x.dtype)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scale the frequencies as Llama 3.1 does: divide those of long wavelengths, keep short ones, blend between them."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)
