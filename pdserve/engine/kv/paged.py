"""The KV pool as kernels see it. A block is one run of bytes: plain numbers, or quantised numbers and then their scales.

A quantised block is, for each layer and plane, [heads, block_size, stored_dim] bytes, and then, for each layer and plane,
[heads] float32 scales, so it is still one descriptor on the wire. Each block and head has its own scale: K and V of
neighbouring tokens have similar magnitudes within a head, but not across heads. Llama-3-8B, 16 tokens a block: 1 MiB in
int8 and 2 KiB of scales (0.2 %), against 2 MiB in bfloat16.

A value is a stored number times its scale. int8: [-127, 127]. fp8: E4M3 without infinities, up to 448 (Micikevicius et al.
2022, section 3). int4: [-7, 7] stored plus 8, two neighbouring dimensions in a byte, the even one in the low half.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from pdserve.core.kv_layout import KvGroup, gqa_group
from pdserve.engine.kv.format import LARGEST, stored_dim

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of torch that hold plain numbers."""
TOUCH_FIELDS = 4  # block, first new token's row, its offset in the block, new tokens


class KvFormat(IntEnum):
    """Storage format of numbers. Kernels are compiled for these values."""

    PLAIN = 0  # in the pool's own dtype
    INT8 = 1
    FP8_E4M3 = 2
    INT4 = 3

    @property
    def largest(self) -> float:
        """The largest stored magnitude. The largest value of a block and head is mapped to it."""
        return LARGEST[self.name.lower()]

    def stored_dim(self, head_dim: int) -> int:
        """Return the elements of memory for one head of one token. Asserts that int4 has an even `head_dim`."""
        if self is not KvFormat.INT4:
            return head_dim
        assert head_dim % 2 == 0
        return head_dim // 2


@dataclass(frozen=True, slots=True)
class PagePart:
    """Views of one of `KvGroup.parts` in all blocks: neighbouring planes whose heads have one dim.

    data: [num_blocks, num_layers, heads, block_size, stored_dim], uint8 in a quantised block; the last three dimensions are
    contiguous. scales: [num_blocks, num_layers, heads] float32; None for plain numbers.
    """

    data: Tensor
    scales: Tensor | None


def part_views(blocks: Tensor, group: KvGroup) -> tuple[PagePart, ...]:
    """Return the parts of blocks [num_blocks, block_bytes] uint8, in the order of `group.parts`."""
    layers, size = (len(blocks), group.num_layers), group.block_size
    data = blocks[:, : group.data_bytes].view(*layers, -1)
    if not group.quantised:
        numbers = data.view(TORCH_DTYPES[group.dtype])
        split = torch.split(numbers, [heads * size * dim for heads, dim in group.parts], 2)
        return tuple(
            PagePart(one.view(*layers, heads, size, dim), None) for one, (heads, dim) in zip(split, group.parts, strict=True)
        )
    stored = [(heads, stored_dim(dim, group.dtype)) for heads, dim in group.parts]
    split = torch.split(data, [heads * size * dim for heads, dim in stored], 2)
    all_scales = blocks[:, group.data_bytes :].view(torch.float32).view(*layers, -1)
    scales = torch.split(all_scales, [heads for heads, _ in stored], 2)
    return tuple(
        PagePart(one.view(*layers, heads, size, dim), of_heads)
        for one, of_heads, (heads, dim) in zip(split, scales, stored, strict=True)
    )


@dataclass(frozen=True, slots=True)
class PagedKv:
    """Views of a pool whose planes are alike. Somebody else owns the memory.

    data: [num_blocks, num_layers, planes, num_kv_heads, block_size, stored_dim] in the pool's dtype, uint8 for a quantised
    pool; the last three dimensions are contiguous. scales: [num_blocks, num_layers, planes, num_kv_heads] float32; None for
    plain numbers. The planes are K and V, or the one plane of latent attention.
    """

    data: Tensor
    scales: Tensor | None
    format: KvFormat
    head_dim: int

    def __post_init__(self) -> None:
        assert self.data.ndim == 6
        assert self.data.shape[-1] == self.format.stored_dim(self.head_dim)
        assert self.data[0, 0, 0].is_contiguous()
        assert (self.scales is None) == (self.format is KvFormat.PLAIN)
        assert self.scales is None or self.scales.shape == self.data.shape[:4]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.data.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.data.shape[3]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.data.shape[4]

    def of_heads(self, heads: range) -> PagedKv:
        """Return the views of these KV heads."""
        data, scales = self.data[:, :, :, heads.start : heads.stop], self.scales
        own = None if scales is None else scales[..., heads.start : heads.stop]
        return PagedKv(data, own, self.format, self.head_dim)

    def layer(self, layer: int) -> LayerKv:
        """Return the views of one layer. Slicing costs microseconds: call this once a layer, not once a step."""
        key_scales = value_scales = self.data  # never read where numbers are plain
        scales_step = 0
        if self.scales is not None:
            key_scales, value_scales = self.scales[:, layer, 0], self.scales[:, layer, -1]
            scales_step = self.scales.stride(0)
        return LayerKv(
            key=self.data[:, layer, 0],
            value=self.data[:, layer, -1],
            key_scales=key_scales,
            value_scales=value_scales,
            block_step=self.data.stride(0),
            head_step=self.data.stride(3),
            scales_step=scales_step,
        )


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's part of a pool, as a kernel takes it.

    key, value: [num_blocks, num_kv_heads, block_size, stored_dim]; both are the same plane where there is only one. key_scales,
    value_scales: [num_blocks, num_kv_heads] float32; any tensor for a plain pool, since kernels do not read it. Steps are in
    elements.
    """

    key: Tensor
    value: Tensor
    key_scales: Tensor
    value_scales: Tensor
    block_step: int
    head_step: int
    scales_step: int


def paged_kv(blocks: Tensor, group: KvGroup) -> PagedKv:
    """Return the views of blocks [num_blocks, block_bytes] uint8. Asserts that the planes of the group are alike."""
    assert group.alike, "planes of different shapes are no dimension of one tensor"
    (part,) = part_views(blocks, group)
    shape = (len(group.planes), group.num_kv_heads)
    data = part.data.unflatten(2, shape)  # type: ignore[no-untyped-call]
    scales = None if part.scales is None else part.scales.unflatten(2, shape)  # type: ignore[no-untyped-call]
    kind = KvFormat[group.dtype.upper()] if group.quantised else KvFormat.PLAIN
    return PagedKv(data, scales, kind, group.head_dim)


def plain_kv(tensor: Tensor) -> PagedKv:
    """Return the views of a pool of plain numbers. tensor: `KvCache.tensor`."""
    return PagedKv(tensor, None, KvFormat.PLAIN, tensor.shape[-1])


def quantised_block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, kind: KvFormat) -> int:
    """Return the bytes of one quantised block of K and V, scales included. Raises `ConfigError` as `KvGroup` does."""
    return gqa_group(num_layers, num_kv_heads, head_dim, block_size, kind.name.lower()).block_bytes


def quantised_kv(
    memory: Tensor, *, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, kind: KvFormat
) -> PagedKv:
    """Return the views of a quantised pool of K and V in `memory`, with as many blocks as fit into it.

    memory: [bytes] uint8, contiguous and aligned to 4 bytes.
    """
    group = gqa_group(num_layers, num_kv_heads, head_dim, block_size, kind.name.lower())
    num_blocks = memory.numel() // group.block_bytes
    assert memory.dtype is torch.uint8
    assert num_blocks >= 1
    return paged_kv(memory[: num_blocks * group.block_bytes].view(num_blocks, group.block_bytes), group)


def touched_blocks(row: int, start: int, count: int, block_table: tuple[int, ...], block_size: int) -> list[tuple[int, ...]]:
    """Return one entry for each block that a sequence's tokens [start, start + count) are written to.

    An entry is (block, row of its first new token, offset of that token in the block, number of new tokens), as
    `quantise_write` takes it. The first token is in row `row` of the batch.
    """
    touched: list[tuple[int, ...]] = []
    position = start
    while position < start + count:
        offset = position % block_size
        tokens = min(block_size - offset, start + count - position)
        touched.append((block_table[position // block_size], row + position - start, offset, tokens))
        position += tokens
    return touched


def touched_tensor(touched: list[tuple[int, ...]]) -> Tensor:
    """Return the entries of `touched_blocks` as [blocks, 4] int32."""
    return torch.tensor(touched, dtype=torch.int32).view(-1, TOUCH_FIELDS)
