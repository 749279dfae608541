"""The KV pool as kernels see it: one run of bytes a block, plain numbers or quantised ones with their scales behind them.

A quantised block is [num_layers, 2 (K, V), num_kv_heads, block_size, stored_dim] bytes, then
[num_layers, 2, num_kv_heads] float32 scales: still one descriptor on the wire. One scale a block and head: within a
head, K and V of neighbouring tokens are of a size, across heads they are not. Llama-3-8B, 16 tokens a block: 1 MiB in
int8 and 2 KiB of scales (0.2 %), against 2 MiB in bfloat16.

A stored number times its scale is the value. int8: [-127, 127]. fp8: E4M3 without infinities, up to 448
(Micikevicius et al. 2022, section 3). int4: [-7, 7] stored plus 8, two neighbouring dimensions a byte, the even one
in the low half.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from pdserve.engine.kv.format import LARGEST

SCALE_BYTES = 4
TOUCH_FIELDS = 4  # block, first new token's row, its offset in the block, new tokens


class KvFormat(IntEnum):
    """How numbers are stored. The values are what kernels compile for."""

    PLAIN = 0  # in the pool's own dtype
    INT8 = 1
    FP8_E4M3 = 2
    INT4 = 3

    @property
    def largest(self) -> float:
        """The largest stored magnitude: what the largest of a block and head is mapped to."""
        return LARGEST[self.name.lower()]

    def stored_dim(self, head_dim: int) -> int:
        """Elements of memory for one head of one token. Asserts that it is a whole number."""
        if self is not KvFormat.INT4:
            return head_dim
        assert head_dim % 2 == 0
        return head_dim // 2


@dataclass(frozen=True, slots=True)
class PagedKv:
    """Views of a pool; owns nothing.

    data: [num_blocks, num_layers, 2, num_kv_heads, block_size, stored_dim] in the pool's dtype, uint8 where quantised;
    the last four dimensions are contiguous. scales: [num_blocks, num_layers, 2, num_kv_heads] float32, or None.
    """

    data: Tensor
    scales: Tensor | None
    format: KvFormat
    head_dim: int

    def __post_init__(self) -> None:
        assert self.data.ndim == 6
        assert self.data.shape[-1] == self.format.stored_dim(self.head_dim)
        assert self.data[0, 0].is_contiguous()
        assert (self.scales is None) == (self.format is KvFormat.PLAIN)
        assert self.scales is None or self.scales.shape == self.data.shape[:4]

    @property
    def num_layers(self) -> int:
        return self.data.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[3]

    @property
    def block_size(self) -> int:
        return self.data.shape[4]

    def layer(self, layer: int) -> LayerKv:
        """The part of one layer. Slicing costs microseconds: call it once a layer, not once a step."""
        key_scales = value_scales = self.data  # never read where numbers are plain
        scales_step = 0
        if self.scales is not None:
            key_scales, value_scales = self.scales[:, layer, 0], self.scales[:, layer, 1]
            scales_step = self.scales.stride(0)
        return LayerKv(
            key=self.data[:, layer, 0],
            value=self.data[:, layer, 1],
            key_scales=key_scales,
            value_scales=value_scales,
            block_step=self.data.stride(0),
            head_step=self.data.stride(3),
            scales_step=scales_step,
        )


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What a kernel gets of one layer. key, value: [num_blocks, num_kv_heads, block_size, stored_dim]; steps in elements."""

    key: Tensor
    value: Tensor
    key_scales: Tensor
    value_scales: Tensor
    block_step: int
    head_step: int
    scales_step: int


def plain_kv(tensor: Tensor) -> PagedKv:
    """tensor: `KvCache.tensor`."""
    return PagedKv(tensor, None, KvFormat.PLAIN, tensor.shape[-1])


def quantised_block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, kind: KvFormat) -> int:
    """Numbers and scales of one block. Asserts that the scales are aligned."""
    heads = num_layers * 2 * num_kv_heads
    data_bytes = heads * block_size * kind.stored_dim(head_dim)
    assert data_bytes % SCALE_BYTES == 0
    return data_bytes + heads * SCALE_BYTES


def quantised_kv(
    memory: Tensor, *, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, kind: KvFormat
) -> PagedKv:
    """memory: [bytes] uint8, contiguous and aligned to 4 B; as many blocks as it holds."""
    block_bytes = quantised_block_bytes(num_layers, num_kv_heads, block_size, head_dim, kind)
    num_blocks = memory.numel() // block_bytes
    assert memory.dtype is torch.uint8
    assert num_blocks >= 1
    blocks = memory[: num_blocks * block_bytes].view(num_blocks, block_bytes)
    scales_bytes = num_layers * 2 * num_kv_heads * SCALE_BYTES
    shape = (num_blocks, num_layers, 2, num_kv_heads)
    data = blocks[:, :-scales_bytes].unflatten(1, (num_layers, 2, num_kv_heads, block_size, kind.stored_dim(head_dim)))  # type: ignore[no-untyped-call]
    scales = blocks.view(torch.float32)[:, -scales_bytes // SCALE_BYTES :].view(*shape[:1], -1).unflatten(1, shape[1:])  # type: ignore[no-untyped-call]
    return PagedKv(data, scales, kind, head_dim)


def touched_blocks(row: int, start: int, count: int, block_table: tuple[int, ...], block_size: int) -> list[tuple[int, ...]]:
    """What `quantise_write` is told of one sequence's tokens [start, start + count), the first in `row`."""
    touched: list[tuple[int, ...]] = []
    position = start
    while position < start + count:
        offset = position % block_size
        tokens = min(block_size - offset, start + count - position)
        touched.append((block_table[position // block_size], row + position - start, offset, tokens))
        position += tokens
    return touched


def touched_tensor(touched: list[tuple[int, ...]]) -> Tensor:
    return torch.tensor(touched, dtype=torch.int32).view(-1, TOUCH_FIELDS)
