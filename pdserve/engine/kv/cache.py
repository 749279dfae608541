"""The KV blocks themselves: one piece of memory for all layers, so that a block is one run of bytes.

Numbers are [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]; behind those of a quantised block
stand its scales. A reader on another machine fetches a block with one descriptor; attention gathers rows of block_size *
head_dim numbers, one for each (block, layer, K or V, head), straight into [heads, positions, head_dim].

What is computed and what is stored may differ in dtype: written tokens are cast or quantised, gathered ones cast back.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvLayout
from pdserve.engine.kv.format import from_numbers, scales_for, to_numbers
from pdserve.engine.kv.paged import (
    TOUCH_FIELDS,
    KvFormat,
    PagedKv,
    plain_kv,
    quantised_kv,
    touched_blocks,
    touched_tensor,
)
from pdserve.engine.kv.span import Span

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOBODY: Final = -1
"""In place of a slot: the token is written nowhere. For Triton kernels only."""


class KvCache:
    """Owns the memory; lives as long as its process, since peers may hold its address."""

    def __init__(self, layout: KvLayout, memory_bytes: int, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """As many blocks as `memory_bytes` holds; dtype: of what is written and gathered, by default that of the layout.

        Raises `ConfigError` when that is no block.
        """
        self.layout = layout
        self.device = device
        self.dtype = TORCH_DTYPES[layout.dtype] if dtype is None else dtype
        self.num_blocks = memory_bytes // layout.block_bytes
        if self.num_blocks == 0:
            raise ConfigError(f"kv_cache_memory of {memory_bytes} B is less than one block of {layout.block_bytes} B")
        self.blocks = _zeros(self.num_blocks * layout.block_bytes, device).view(self.num_blocks, layout.block_bytes)
        """[num_blocks, block_bytes] uint8: all there is of each block."""
        self.paged = _views(layout, self.blocks)
        self._tokens = self._rows = self.tensor
        if not layout.quantised:
            self._tokens = self.tensor.view(-1, layout.head_dim)
            self._rows = self.tensor.view(-1, layout.block_size * layout.head_dim)

    @property
    def tensor(self) -> Tensor:
        """The numbers: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], or stored_dim bytes if quantised."""
        return self.paged.data

    @property
    def scales(self) -> Tensor | None:
        """[num_blocks, num_layers, 2, num_kv_heads] float32 of a quantised pool."""
        return self.paged.scales

    @property
    def address(self) -> int:
        """Of block 0; block i follows i * layout.block_bytes later. Page-aligned on CPU."""
        return self.blocks.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def slots(self, spans: Sequence[Span]) -> Tensor:
        """Where the tokens of `spans` go, for `write`.

        [tokens, 2 * num_kv_heads] int64: where layer 0 keeps K, then V, of each head, in rows of head_dim numbers. Quantised:
        [blocks, 4] int32 of `touched_blocks`, since a block's tokens share their scales.
        """
        size = self.layout.block_size
        if self.layout.quantised:
            pieces = [piece for s in spans for piece in touched_blocks(s.row, s.start, s.count, s.block_table, size)]
            return touched_tensor(pieces).to(self.device)
        positions = [(s.block_table[p // size], p % size) for s in spans for p in range(s.start, s.end)]
        blocks, offsets = torch.tensor(positions, dtype=torch.int64).view(-1, 2).to(self.device).unbind(1)
        rows = self._head_rows(blocks) * size + offsets.view(1, -1, 1)
        return rows.transpose(0, 1).reshape(len(positions), -1)

    def nobodys_slots(self, tokens: int) -> Tensor:
        """Slots of so many single tokens that are written nowhere."""
        if self.layout.quantised:
            return torch.full((tokens, TOUCH_FIELDS), NOBODY, dtype=torch.int32, device=self.device)
        return torch.full((tokens, 2 * self.layout.num_kv_heads), NOBODY, dtype=torch.int64, device=self.device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """key, value: [tokens, num_kv_heads, head_dim]; slots as `slots` gave them."""
        if self.layout.quantised:
            return self._quantise(layer, slots.long(), torch.stack((key, value), 1).float())
        step = layer * 2 * self.layout.num_kv_heads * self.layout.block_size
        rows = torch.stack((key, value), 1).view(-1, self.layout.head_dim)
        self._tokens.index_copy_(0, slots.reshape(-1) + step, rows.to(self._tokens.dtype))
        return None

    def gather_rows(self, block_tables: Tensor) -> Tensor:
        """Where layer 0 keeps K and V of the blocks of `block_tables` [sequences, blocks] int64, for `gather`."""
        if self.layout.quantised:
            return block_tables
        sequences, blocks = block_tables.shape
        rows = self._head_rows(block_tables.reshape(-1)).view(2, sequences, blocks, self.layout.num_kv_heads)
        return rows.transpose(2, 3).reshape(-1)

    def gather(self, layer: int, rows: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """K and V, each [sequences, num_kv_heads, blocks * block_size, head_dim], copied out of the pool."""
        heads, dim = self.layout.num_kv_heads, self.layout.head_dim
        if self.layout.quantised:
            found = self._dequantised(layer, rows).permute(2, 0, 3, 1, 4, 5)
        else:
            found = self._rows.index_select(0, rows + layer * 2 * heads)
        key, value = found.to(self.dtype).reshape(2, sequences, heads, -1, dim)
        return key, value

    def _dequantised(self, layer: int, blocks: Tensor) -> Tensor:
        """blocks: [sequences, blocks] int64. Returns [sequences, blocks, 2, num_kv_heads, block_size, head_dim] float32."""
        assert self.scales is not None
        numbers = from_numbers(self.tensor[blocks, layer], self.layout.dtype)
        return numbers.mul_(self.scales[blocks, layer][..., None, None])

    def _quantise(self, layer: int, touched: Tensor, tokens: Tensor) -> None:
        """tokens: [tokens, 2, num_kv_heads, head_dim] float32. The older tokens of a block are quantised again if need be."""
        assert self.scales is not None
        block, row, first, count = touched.unbind(1)
        offset = torch.arange(self.layout.block_size, device=self.device)
        old = offset < first[:, None]
        new = ~old & (offset < (first + count)[:, None])
        old, new = (mask.view(len(block), 1, 1, -1, 1) for mask in (old, new))
        source = (row[:, None] + offset - first[:, None]).clamp(0, len(tokens) - 1)
        newer = tokens[source].permute(0, 2, 3, 1, 4).masked_fill(~new, 0.0)
        # A block without older tokens has no scale yet: what lies there is its former owner's, even NaN.
        before = self.scales[block, layer].masked_fill((first == 0)[:, None, None], 0.0)
        scales = torch.maximum(before, scales_for(newer.abs().amax((-1, -2)), self.layout.dtype))
        stored = self.tensor[block, layer]
        older = from_numbers(stored, self.layout.dtype).mul_(before[..., None, None])
        numbers = to_numbers(torch.where(old, older, newer), scales, self.layout.dtype)
        changed = new | (old & (scales > before)[..., None, None])
        self.tensor[block, layer] = torch.where(changed, numbers, stored)
        self.scales[block, layer] = scales

    def _head_rows(self, block_ids: Tensor) -> Tensor:
        """[2, blocks, num_kv_heads]: the index of (block, layer 0, K or V, head) among all heads of all blocks."""
        heads = self.layout.num_kv_heads
        base = block_ids.view(1, -1, 1) * (self.layout.num_layers * 2 * heads)
        which = torch.arange(2, device=block_ids.device).view(2, 1, 1) * heads
        return base + which + torch.arange(heads, device=block_ids.device)


def _views(layout: KvLayout, blocks: Tensor) -> PagedKv:
    heads, size, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
    if not layout.quantised:
        numbers = blocks.view(-1).view(TORCH_DTYPES[layout.dtype])
        return plain_kv(numbers.view(len(blocks), layout.num_layers, 2, heads, size, dim))
    kind = KvFormat[layout.dtype.upper()]
    return quantised_kv(
        blocks.view(-1), num_layers=layout.num_layers, num_kv_heads=heads, block_size=size, head_dim=dim, kind=kind
    )


def _zeros(nbytes: int, device: torch.device) -> Tensor:
    """Zeroed bytes. On CPU they are mapped and not touched: a block costs memory when it is first used."""
    if device.type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"kv_cache_memory of {nbytes} B is more than this machine can give") from exc
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A head of a block is 1 or 2 KiB: with small pages each is an address translation of its own. SmolLM2, 32 decodes at
        # 2,048 tokens: 8 % less CPU time a step. The price: memory is taken in pieces of 2 MiB.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
