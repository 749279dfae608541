"""Rotary position embedding (Su et al. 2021), with the scalings of frequencies that published models use.

Sines and cosines come from one table, by position, so they cannot depend on the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.core.model_spec import Attention, LinearScaling, Llama3Scaling, MlaSpec, RopeSpec, YarnScaling


def rope_table(rope: RopeSpec, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """Return the table for `rotate`: cosines, then sines, whose first half is negated.

    It is [max_positions, 2, dim] float32, where dim is head_dim or the smaller `rope.dim`.
    """
    dim = head_dim if rope.dim is None else rope.dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / rope.theta**exponents
    size = 1.0
    if isinstance(rope.scaling, Llama3Scaling):
        frequencies = _stretch(frequencies, rope.scaling)
    elif isinstance(rope.scaling, LinearScaling):
        frequencies = frequencies / rope.scaling.factor
    elif isinstance(rope.scaling, YarnScaling):
        frequencies = _yarn(frequencies, rope.theta, rope.scaling)
        size = rope.scaling.attention_factor
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * size, angles.sin() * size
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)


def rope_key(attention: Attention) -> tuple[RopeSpec, int]:
    """Return what determines the table of an attention: the first two arguments of `rope_table`."""
    return attention.rope, attention.rope_dim if isinstance(attention, MlaSpec) else attention.qk_dim


def rotate(x: Tensor, table_rows: Tensor) -> Tensor:
    """Rotate the first dim numbers of the heads of x [rows, heads, head_dim] by table_rows [rows, 2, dim].

    Number i of a head pairs with i + dim / 2. Numbers from dim on stay as they are.
    The code uses only sums and products, without fused multiply-add. Each is correctly rounded at every place of an element.
    """
    dim = table_rows.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], table_rows), x[..., dim:]), -1)
    cos, sin = table_rows.unsqueeze(2).unbind(1)
    wide = x.float()
    swapped = torch.roll(wide, dim // 2, dims=-1)
    return (wide * cos).add_(swapped.mul_(sin)).to(x.dtype)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scale the frequencies as Llama 3.1 does: divide frequencies of long wavelengths, keep those of short wavelengths, and
    blend in between."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Scale the frequencies by YaRN: a ramp over their indices goes from the kept frequencies to the divided frequencies."""
    count = len(frequencies)

    def index_of(turns: float) -> float:
        """Return the index of the frequency that makes this number of turns within the original positions."""
        return count * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    divided = ((torch.arange(count, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (divided / scaling.factor + (1 - divided))
