"""The memory of the KV blocks of one group. All layers share one piece of memory, so a block is one run of bytes.

A block is, for each layer and plane, [heads, block_size, dim] numbers; the scales of a quantised block follow its numbers
(`KvGroup`). A reader on another machine fetches a block with one descriptor. Attention gathers rows of numbers straight
into [heads, positions, dim]: K and V of a usual model are one row of block_size * dim numbers for each block and head.

The dtype of the computation and that of the store may differ: written tokens are cast or quantised, gathered tokens are
cast back.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Final

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvGroup
from pdserve.engine.kv.format import from_numbers, scales_for, to_numbers
from pdserve.engine.kv.paged import (
    TORCH_DTYPES,
    TOUCH_FIELDS,
    PagedKv,
    PagePart,
    paged_kv,
    part_views,
    touched_blocks,
    touched_tensor,
)
from pdserve.engine.kv.places import Places
from pdserve.engine.kv.span import Span

NOBODY: Final = -1
"""Stands in place of a slot: the token is written nowhere. Only the Triton kernels know this value."""
Allocate = Callable[[int, torch.device], Tensor]
"""Function that returns so many zeroed bytes on a device, [nbytes] uint8."""


class KvCache:
    """Owner of the blocks' memory. It lives as long as its process, because peers may hold its address."""

    def __init__(
        self,
        layout: KvGroup,
        memory_bytes: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """Allocate as many blocks as `memory_bytes` holds, by `zeros` or another function.

        dtype: the dtype of tokens that are written and gathered; None means that of the layout. Raises `ConfigError` when
        `memory_bytes` is less than one block.
        """
        self.layout = layout
        self.device = device
        self.dtype = TORCH_DTYPES[layout.dtype] if dtype is None else dtype
        self.num_blocks = memory_bytes // layout.block_bytes
        if self.num_blocks == 0:
            raise ConfigError(f"kv_cache_memory of {memory_bytes} B is less than one block of {layout.block_bytes} B")
        allocate = zeros if allocate is None else allocate
        self.blocks = allocate(self.num_blocks * layout.block_bytes, device).view(self.num_blocks, layout.block_bytes)
        """[num_blocks, block_bytes] uint8: all bytes of each block, scales included."""
        self.parts = part_views(self.blocks, layout)
        """The numbers and scales of neighbouring planes of one dim."""
        self._joined = [len(list(planes)) for _, planes in groupby(layout.planes, key=itemgetter(1))]  # planes of each part
        self._heads = range(layout.num_kv_heads)
        self._whole = layout
        self._places = Places(layout, device)
        self._numbers = self.blocks.view(-1)
        if not layout.quantised:
            self._numbers = self._numbers.view(TORCH_DTYPES[layout.dtype])

    def of_heads(self, heads: range) -> KvCache:
        """Return the same memory as a rank sees it that computes these KV heads, at least one.

        `layout` has these heads alone. Its numbers are not those of a block, which holds all heads.
        """
        if heads == self._heads:
            return self
        assert heads
        view = copy(self)
        view._heads = heads
        view.layout = replace(self.layout, planes=tuple((len(heads), dim) for _, dim in self.layout.planes))
        view._places = Places(self.layout, self.device, heads)
        if not self.layout.quantised:
            view._numbers = self._numbers[view._places.skipped :]
        view._joined = [1] * len(self.layout.planes)
        parts = []
        for part, joined in zip(self.parts, self._joined, strict=True):
            scales = [None] * joined if part.scales is None else part.scales.chunk(joined, 2)
            parts += [
                PagePart(data[:, :, heads.start : heads.stop], None if of is None else of[..., heads.start : heads.stop])
                for data, of in zip(part.data.chunk(joined, 2), scales, strict=True)
            ]
        view.parts = tuple(parts)
        return view

    @property
    def paged(self) -> PagedKv:
        """The views for kernels. Asserts that the planes are alike."""
        return paged_kv(self.blocks, self._whole).of_heads(self._heads)

    @property
    def tensor(self) -> Tensor:
        """The numbers: [num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim]. Asserts that the planes are alike.

        The last dimension of a quantised pool is stored_dim bytes.
        """
        return self.paged.data

    @property
    def scales(self) -> Tensor | None:
        """The scales of a quantised pool, [num_blocks, num_layers, planes, num_kv_heads] float32; None for a plain pool.

        Asserts that the planes are alike.
        """
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

        A plain pool gives the result of `Places.of_tokens`. A quantised pool gives [blocks, 4] int32 of `touched_blocks`,
        since the tokens of a block share their scales.
        """
        size = self.layout.block_size
        if self.layout.quantised:
            pieces = [piece for s in spans for piece in touched_blocks(s.row, s.start, s.count, s.block_table, size)]
            return touched_tensor(pieces).to(self.device)
        positions = [(s.block_table[p // size], p % size) for s in spans for p in range(s.start, s.end)]
        return self._places.of_tokens(torch.tensor(positions, dtype=torch.int64).view(-1, 2).to(self.device))

    def nobodys_slots(self, tokens: int) -> Tensor:
        """Return slots for `tokens` single tokens that are written nowhere."""
        if self.layout.quantised:
            return torch.full((tokens, TOUCH_FIELDS), NOBODY, dtype=torch.int32, device=self.device)
        return torch.full((tokens, self._places.strips), NOBODY, dtype=torch.int64, device=self.device)

    def write(self, layer: int, slots: Tensor, *planes: Tensor) -> None:
        """Write the new tokens of one layer. planes: [tokens, heads, dim] for each; slots: the result of `slots`."""
        if self.layout.quantised:
            rest = iter(planes)
            for part, joined in zip(self.parts, self._joined, strict=True):
                self._quantise(part, layer, slots.long(), torch.cat(list(islice(rest, joined)), 1).float())
            return
        tokens = torch.cat(planes if len(self.parts) == 1 else [plane.flatten(1) for plane in planes], 1)
        rows = self._numbers.view(-1, self._places.unit)
        where = slots.reshape(-1) + layer * self._places.layer_strips * self.layout.block_size
        rows.index_copy_(0, where, tokens.to(rows.dtype).view(-1, self._places.unit))

    def gather_rows(self, block_tables: Tensor) -> Tensor:
        """Return the argument `rows` of `gather` for `block_tables` [sequences, blocks] int64.

        A plain pool gives the result of `Places.of_blocks`. A quantised pool gives the tables.
        """
        return block_tables if self.layout.quantised else self._places.of_blocks(block_tables)

    def gather(self, layer: int, rows: Tensor, sequences: int) -> tuple[Tensor, ...]:
        """Copy one layer out of the pool: for each plane [sequences, heads, blocks * block_size, dim].

        rows: the result of `gather_rows` for these sequences.
        """
        if self.layout.quantised:
            return tuple(self._dequantised(layer, rows))
        strips = self._numbers.view(-1, self._places.unit * self.layout.block_size)
        found = strips.index_select(0, rows + layer * self._places.layer_strips).to(self.dtype)
        split = torch.split(found, self._places.counts(len(rows)))
        return tuple(
            plane.view(sequences, heads, -1, dim) for plane, (heads, dim) in zip(split, self.layout.planes, strict=True)
        )

    def copies(self, layer: int, blocks: Tensor) -> tuple[Tensor, ...]:
        """Return copies of what quantised blocks [n] int64 hold of one layer, scales included; the first dimension is n."""
        return tuple(one[blocks, layer] for one in self._stored())

    def restore(self, layer: int, blocks: Tensor, copies: tuple[Tensor, ...]) -> None:
        """Write the result of `copies` for these blocks back."""
        for one, copy_ in zip(self._stored(), copies, strict=True):
            one[blocks, layer] = copy_

    def _stored(self) -> Iterator[Tensor]:
        """Yield the numbers and the scales of each part of a quantised pool."""
        for part in self.parts:
            assert part.scales is not None
            yield part.data
            yield part.scales

    def _dequantised(self, layer: int, blocks: Tensor) -> Iterator[Tensor]:
        """Yield the values of each plane in one layer as `gather` returns them. blocks: [sequences, blocks] int64."""
        planes = iter(self.layout.planes)
        for part in self.parts:
            assert part.scales is not None
            numbers = from_numbers(part.data[blocks, layer], self.layout.dtype)
            values = numbers.mul_(part.scales[blocks, layer][..., None, None]).transpose(1, 2).to(self.dtype)
            done = 0
            while done < values.shape[1]:
                heads, dim = next(planes)
                yield values[:, done : done + heads].reshape(len(blocks), heads, -1, dim)
                done += heads

    def _quantise(self, part: PagePart, layer: int, touched: Tensor, tokens: Tensor) -> None:
        """Write tokens [tokens, heads, dim] float32 to a part of a quantised pool.

        The older tokens of a block are quantised again when its scale grows. touched: [blocks, 4] int64 of `touched_blocks`.
        """
        assert part.scales is not None
        block, row, first, count = touched.unbind(1)
        offset = torch.arange(self.layout.block_size, device=self.device)
        old = offset < first[:, None]
        new = ~old & (offset < (first + count)[:, None])
        old, new = (mask.view(len(block), 1, -1, 1) for mask in (old, new))
        source = (row[:, None] + offset - first[:, None]).clamp(0, len(tokens) - 1)
        newer = tokens[source].transpose(1, 2).masked_fill(~new, 0.0)
        # A block without older tokens has no scale yet: the memory holds a value of its former owner, which may be NaN.
        before = part.scales[block, layer].masked_fill((first == 0)[:, None], 0.0)
        scales = torch.maximum(before, scales_for(newer.abs().amax((-1, -2)), self.layout.dtype))
        stored = part.data[block, layer]
        older = from_numbers(stored, self.layout.dtype).mul_(before[..., None, None])
        numbers = to_numbers(torch.where(old, older, newer), scales, self.layout.dtype)
        changed = new | (old & (scales > before)[..., None, None])
        part.data[block, layer] = torch.where(changed, numbers, stored)
        part.scales[block, layer] = scales


def zeros(nbytes: int, device: torch.device) -> Tensor:
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
