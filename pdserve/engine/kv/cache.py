"""The memory of the KV blocks. All layers share one piece of memory, so a block is one run of bytes.

Numbers are [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]; the scales of a quantised block follow
its numbers. A reader on another machine fetches a block with one descriptor. Attention gathers rows of block_size *
head_dim numbers, one for each (block, layer, K or V, head), straight into [heads, positions, head_dim].

The dtype of the computation and that of the store may differ: written tokens are cast or quantised, gathered tokens are
cast back.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvGroup
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
"""Stands in place of a slot: the token is written nowhere. Only the Triton kernels know this value."""


class KvCache:
    """Owner of the blocks' memory. It lives as long as its process, because peers may hold its address."""

    def __init__(self, layout: KvGroup, memory_bytes: int, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Allocate as many blocks as `memory_bytes` holds.

        dtype: the dtype of tokens that are written and gathered; None means that of the layout. Raises `ConfigError` when
        `memory_bytes` is less than one block.
        """
        self.layout = layout
        self.device = device
        self.dtype = TORCH_DTYPES[layout.dtype] if dtype is None else dtype
        self.num_blocks = memory_bytes // layout.block_bytes
        if self.num_blocks == 0:
            raise ConfigError(f"kv_cache_memory of {memory_bytes} B is less than one block of {layout.block_bytes} B")
        self.blocks = _zeros(self.num_blocks * layout.block_bytes, device).view(self.num_blocks, layout.block_bytes)
        """[num_blocks, block_bytes] uint8: all bytes of each block, scales included."""
        self.paged = _views(layout, self.blocks)
        self._tokens = self._rows = self.tensor
        if not layout.quantised:
            self._tokens = self.tensor.view(-1, layout.head_dim)
            self._rows = self.tensor.view(-1, layout.block_size * layout.head_dim)

    @property
    def tensor(self) -> Tensor:
        """The numbers: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

        The last dimension of a quantised pool is stored_dim bytes.
        """
        return self.paged.data

    @property
    def scales(self) -> Tensor | None:
        """The scales of a quantised pool, [num_blocks, num_layers, 2, num_kv_heads] float32; None for a plain pool."""
        return self.paged.scales

    @property
    def address(self) -> int:
        """Address of block 0. Block i starts i * layout.block_bytes later. The address is page-aligned on CPU."""
        return self.blocks.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks.nbytes

    def slots(self, spans: Sequence[Span]) -> Tensor:
        """Return the places for the new tokens of `spans`, as `write` takes them.

        A plain pool gives [tokens, 2 * num_kv_heads] int64: the places in layer 0 of K, then V, of each head, in rows of
        head_dim numbers. A quantised pool gives [blocks, 4] int32 of `touched_blocks`, since the tokens of a block share
        their scales.
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
        """Return slots for `tokens` single tokens that are written nowhere."""
        if self.layout.quantised:
            return torch.full((tokens, TOUCH_FIELDS), NOBODY, dtype=torch.int32, device=self.device)
        return torch.full((tokens, 2 * self.layout.num_kv_heads), NOBODY, dtype=torch.int64, device=self.device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the new tokens of one layer. key, value: [tokens, num_kv_heads, head_dim]; slots: the result of `slots`."""
        if self.layout.quantised:
            return self._quantise(layer, slots.long(), torch.stack((key, value), 1).float())
        step = layer * 2 * self.layout.num_kv_heads * self.layout.block_size
        rows = torch.stack((key, value), 1).view(-1, self.layout.head_dim)
        self._tokens.index_copy_(0, slots.reshape(-1) + step, rows.to(self._tokens.dtype))
        return None

    def gather_rows(self, block_tables: Tensor) -> Tensor:
        """Return the argument `rows` of `gather` for `block_tables` [sequences, blocks] int64.

        A plain pool gives the places of K and V in layer 0, one for each block and head. A quantised pool gives the tables.
        """
        if self.layout.quantised:
            return block_tables
        sequences, blocks = block_tables.shape
        rows = self._head_rows(block_tables.reshape(-1)).view(2, sequences, blocks, self.layout.num_kv_heads)
        return rows.transpose(2, 3).reshape(-1)

    def gather(self, layer: int, rows: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Copy K and V of one layer out of the pool, each [sequences, num_kv_heads, blocks * block_size, head_dim].

        rows: the result of `gather_rows` for these sequences.
        """
        heads, dim = self.layout.num_kv_heads, self.layout.head_dim
        if self.layout.quantised:
            found = self._dequantised(layer, rows).permute(2, 0, 3, 1, 4, 5)
        else:
            found = self._rows.index_select(0, rows + layer * 2 * heads)
        key, value = found.to(self.dtype).reshape(2, sequences, heads, -1, dim)
        return key, value

    def _dequantised(self, layer: int, blocks: Tensor) -> Tensor:
        """Return the values of blocks [sequences, blocks] int64 in one layer.

        The result is [sequences, blocks, 2, num_kv_heads, block_size, head_dim] float32.
        """
        assert self.scales is not None
        numbers = from_numbers(self.tensor[blocks, layer], self.layout.dtype)
        return numbers.mul_(self.scales[blocks, layer][..., None, None])

    def _quantise(self, layer: int, touched: Tensor, tokens: Tensor) -> None:
        """Write tokens [tokens, 2, num_kv_heads, head_dim] float32 to a quantised pool.

        The older tokens of a block are quantised again when its scale grows. touched: [blocks, 4] int64 of `touched_blocks`.
        """
        assert self.scales is not None
        block, row, first, count = touched.unbind(1)
        offset = torch.arange(self.layout.block_size, device=self.device)
        old = offset < first[:, None]
        new = ~old & (offset < (first + count)[:, None])
        old, new = (mask.view(len(block), 1, 1, -1, 1) for mask in (old, new))
        source = (row[:, None] + offset - first[:, None]).clamp(0, len(tokens) - 1)
        newer = tokens[source].permute(0, 2, 3, 1, 4).masked_fill(~new, 0.0)
        # A block without older tokens has no scale yet: the memory holds a value of its former owner, which may be NaN.
        before = self.scales[block, layer].masked_fill((first == 0)[:, None, None], 0.0)
        scales = torch.maximum(before, scales_for(newer.abs().amax((-1, -2)), self.layout.dtype))
        stored = self.tensor[block, layer]
        older = from_numbers(stored, self.layout.dtype).mul_(before[..., None, None])
        numbers = to_numbers(torch.where(old, older, newer), scales, self.layout.dtype)
        changed = new | (old & (scales > before)[..., None, None])
        self.tensor[block, layer] = torch.where(changed, numbers, stored)
        self.scales[block, layer] = scales

    def _head_rows(self, block_ids: Tensor) -> Tensor:
        """Return the index of (block, layer 0, K or V, head) among all heads of all blocks: [2, blocks, num_kv_heads]."""
        heads = self.layout.num_kv_heads
        base = block_ids.view(1, -1, 1) * (self.layout.num_layers * 2 * heads)
        which = torch.arange(2, device=block_ids.device).view(2, 1, 1) * heads
        return base + which + torch.arange(heads, device=block_ids.device)


def _views(layout: KvGroup, blocks: Tensor) -> PagedKv:
    heads, size, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
    if not layout.quantised:
        numbers = blocks.view(-1).view(TORCH_DTYPES[layout.dtype])
        return plain_kv(numbers.view(len(blocks), layout.num_layers, 2, heads, size, dim))
    kind = KvFormat[layout.dtype.upper()]
    return quantised_kv(
        blocks.view(-1), num_layers=layout.num_layers, num_kv_heads=heads, block_size=size, head_dim=dim, kind=kind
    )


def _zeros(nbytes: int, device: torch.device) -> Tensor:
    """Return zeroed bytes. On CPU they are mapped but not touched: a block costs no memory before it is first used.

    Raises `ConfigError` when the machine cannot map so many bytes.
    """
    if device.type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"kv_cache_memory of {nbytes} B is more than this machine can give") from exc
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A head of a block is 1 or 2 KiB, so with small pages each head needs its own address translation. SmolLM2, 32 decodes
        # at 2,048 tokens: huge pages save 8 % CPU time a step. The price is that memory is taken in pieces of 2 MiB.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
