"""Quantised KV in torch: the meaning of the numbers and scales of a block, for all its heads at once.

A value is a stored number times its head's scale. int8: [-127, 127]. fp8_e4m3: no infinities, up to 448 (Micikevicius et
al. 2022, section 3). int4: [-7, 7] stored plus 8, two neighbouring dimensions in a byte, the even one in the low half.
Numbers are bytes here, in the order of `KvGroup`. The compiled and the Triton kernels compute the same: the scale is the
largest magnitude divided by the largest number; a value is multiplied by 1 / scale and then rounded, integers with halves
upwards, fp8 with halves to even.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LARGEST: Final = {"int8": 127.0, "fp8_e4m3": 448.0, "int4": 7.0}
"""The largest stored magnitude of each format. The largest value of a block and head is mapped to it."""
SMALLEST_SCALE: Final = 2.0**-100
"""A smaller scale becomes 0, and the numbers with it, so that 1 / scale is finite. The limit lies far below any K or V."""


def stored_dim(head_dim: int, dtype: str) -> int:
    """Return the bytes of one token of one head in a quantised format."""
    return head_dim // 2 if dtype == "int4" else head_dim


def quantise(values: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Quantise whole blocks: return numbers [..., block_size, stored_dim] uint8 and scales [...] float32.

    values: [..., block_size, head_dim] float32; all of them count for the scale. The result equals a block whose tokens were
    written in one step, which rounds less often than many steps do.
    """
    scales = scales_for(values.abs().amax((-1, -2)), dtype)
    return to_numbers(values, scales, dtype), scales


def dequantise(numbers: Tensor, scales: Tensor, dtype: str) -> Tensor:
    """Return the values [..., tokens, head_dim] float32 of numbers [..., tokens, stored_dim] uint8 and scales [...] float32."""
    return from_numbers(numbers, dtype).mul_(scales[..., None, None])


def scales_for(largest: Tensor, dtype: str) -> Tensor:
    """Return the scales for the largest magnitudes `largest` (float32, any shape)."""
    scales = largest / LARGEST[dtype]
    return torch.where(scales < SMALLEST_SCALE, 0.0, scales)


def to_numbers(values: Tensor, scales: Tensor, dtype: str) -> Tensor:
    """Return the stored numbers [..., tokens, stored_dim] uint8 of `values` under given scales.

    values: [..., tokens, head_dim] float32, within the range of their scale. scales: [...] float32; 0 gives zeros.
    """
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
    """Return numbers [..., stored_dim] uint8 as [..., head_dim] float32. Bfloat16 holds them exactly as well."""
    if dtype == "int4":
        pairs = torch.stack((numbers & 15, numbers >> 4), -1)
        return pairs.flatten(-2).float().sub_(8)
    return numbers.view(torch.int8 if dtype == "int8" else torch.float8_e4m3fn).float()
