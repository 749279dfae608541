"""Quantised KV by torch: what the numbers and scales of a block mean, for every head of it at once.

A stored number times its head's scale is the value. int8: [-127, 127]. fp8_e4m3: without infinities, up to 448
(Micikevicius et al. 2022, section 3). int4: [-7, 7] stored plus 8, two neighbouring dimensions a byte, the even one
in the low half. Numbers are bytes here, in the order of `KvLayout`. The compiled and the Triton kernels compute the
same: the scale is the largest magnitude over the largest number, a value is multiplied by 1 / scale and then rounded,
integers with halves upwards, fp8 with halves to even.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LARGEST: Final = {"int8": 127.0, "fp8_e4m3": 448.0, "int4": 7.0}
"""The largest stored magnitude: what the largest of a block and head is mapped to."""
SMALLEST_SCALE: Final = 2.0**-100
"""Where all are smaller the scale is 0 and so are the numbers: 1 / scale must be finite. Chosen, far below any K or V."""


def stored_dim(head_dim: int, dtype: str) -> int:
    """Bytes of one token of a head."""
    return head_dim // 2 if dtype == "int4" else head_dim


def quantise(values: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """values: [..., block_size, head_dim] float32, all of them written. Returns numbers, [..., block_size, stored_dim]
    uint8, and scales, [...] float32.

    As if all tokens of a block were written in one step: less rounding than over many.
    """
    scales = scales_for(values.abs().amax((-1, -2)), dtype)
    return to_numbers(values, scales, dtype), scales


def dequantise(numbers: Tensor, scales: Tensor, dtype: str) -> Tensor:
    """numbers: [..., tokens, stored_dim] uint8; scales: [...] float32. Returns [..., tokens, head_dim] float32."""
    return from_numbers(numbers, dtype).mul_(scales[..., None, None])


def scales_for(largest: Tensor, dtype: str) -> Tensor:
    """largest: magnitudes, float32."""
    scales = largest / LARGEST[dtype]
    return torch.where(scales < SMALLEST_SCALE, 0.0, scales)


def to_numbers(values: Tensor, scales: Tensor, dtype: str) -> Tensor:
    """values: [..., tokens, head_dim] float32, none above what its scale can say; scales: [...] float32, 0 for zeros."""
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    scaled = values * inverse[..., None, None]
    most = LARGEST[dtype]
    if dtype == "fp8_e4m3":
        return scaled.clamp_(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)
    whole = scaled.add_(0.5).floor_().clamp_(-most, most)
    if dtype == "int8":
        return whole.to(torch.int8).view(torch.uint8)
    nibbles = whole.add_(8).to(torch.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def from_numbers(numbers: Tensor, dtype: str) -> Tensor:
    """numbers: [..., stored_dim] uint8. Returns [..., head_dim] float32, all exact in bfloat16 as well."""
    if dtype == "int4":
        pairs = torch.stack((numbers & 15, numbers >> 4), -1)
        return pairs.flatten(-2).float().sub_(8)
    return numbers.view(torch.int8 if dtype == "int8" else torch.float8_e4m3fn).float()
