"""Attention whose bits do not depend on company: not on chunking, batch, neighbours or block ids.

Every product has one shape: a tile of QUERY_TILE tokens of one sequence against a tile of positions that starts at a
multiple of its own size from the sequence's beginning. Tiles are merged with an online softmax (Milakov and
Gimelshein 2018) from position 0 upwards. So a row goes through the same operations on the same numbers whoever is
computed with it: positions behind it get weight 0 exactly, and a tile all behind it changes nothing, since its
maximum is -inf, its sum 0 and its rescaling 1. float32 inside, also for a bfloat16 cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.core.kv_layout import ceil_div
from pdserve.engine.attention.api import Span
from pdserve.engine.elementwise import exp_fixed
from pdserve.engine.kv_cache import KvCache

QUERY_TILE: Final = 8  # a decode computes a whole tile for its one token
KV_TILE_TOKENS: Final = 128  # rounded down to whole blocks; one block where blocks are larger


@dataclass(frozen=True, slots=True)
class Tile:
    """One query tile and the KV tiles it looks at, from position 0 upwards.

    kv_tiles: indices among all KV tiles of the step; hidden: for each, [group * QUERY_TILE, positions] bool, true
    where a token may not look, or None where all may look everywhere.
    """

    kv_tiles: range
    hidden: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """All sequences of a step.

    tables: [kv tiles, blocks a tile], as rows for `KvCache.gather`; stale: [kv tiles, 1, positions, 1] bool, true
    behind a sequence's end; query_rows: [tiles * QUERY_TILE], the batch row at each place of the query tiles;
    places: [tokens], the inverse.
    """

    kv_tiles: int
    kv_rows: Tensor
    stale: Tensor
    tiles: tuple[Tile, ...]
    query_rows: Tensor
    places: Tensor


class InvariantAttention:
    def __init__(self, kv: KvCache, num_heads: int) -> None:
        self._kv = kv
        self._num_kv_heads = kv.layout.num_kv_heads
        self._group = num_heads // kv.layout.num_kv_heads
        self._scale = 1.0 / math.sqrt(kv.layout.head_dim)
        self._tile_blocks = max(1, KV_TILE_TOKENS // kv.layout.block_size)
        self._tile_tokens = self._tile_blocks * kv.layout.block_size
        self._device = kv.device

    def run(self, prepared: Work, layer: int, query: Tensor) -> Tensor:
        """query: [tokens, num_heads, head_dim]."""
        heads, dim = query.shape[1:]
        key, value = (x.float() for x in self._kv.gather(layer, prepared.kv_rows, prepared.kv_tiles))
        value = value.masked_fill(prepared.stale, 0.0)  # a stale infinity would turn a weight of 0 into NaN
        key = key.transpose(2, 3).contiguous()
        padded = query[prepared.query_rows].float().mul_(self._scale)
        tiled = padded.view(-1, QUERY_TILE, self._num_kv_heads, self._group, dim).permute(0, 2, 3, 1, 4)
        folded = tiled.reshape(-1, self._num_kv_heads, self._group * QUERY_TILE, dim)
        out = torch.stack([self._merge(q, key, value, tile) for q, tile in zip(folded, prepared.tiles, strict=True)])
        unfolded = out.view(-1, self._num_kv_heads, self._group, QUERY_TILE, dim).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(-1, heads, dim)[prepared.places].to(query.dtype)

    def _merge(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> Tensor:
        """query: [num_kv_heads, group * QUERY_TILE, head_dim], float32; returns the same shape."""
        maximum = torch.full((*query.shape[:2], 1), -torch.inf, device=self._device)
        total = torch.zeros_like(maximum)
        result = torch.zeros_like(query)
        for i, hidden in zip(tile.kv_tiles, tile.hidden, strict=True):
            scores = torch.bmm(query, key[i])
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            weights = exp_fixed(scores.sub_(higher))
            keep = exp_fixed(maximum.sub_(higher))
            total = total.mul_(keep).add_(weights.sum(-1, keepdim=True))
            result = result.mul_(keep).add_(torch.bmm(weights, value[i]))
            maximum = higher
        return result.div_(total)

    def prepare(self, spans: tuple[Span, ...]) -> Work:
        tables: list[tuple[int, ...]] = []
        ends: list[int] = []
        tiles: list[Tile] = []
        query_rows: list[int] = []
        places: list[int] = []
        for span in spans:
            first = len(tables)
            for table, end in self._kv_tiles(span):
                tables.append(table)
                ends.append(end)
            for start in range(span.start, span.end, QUERY_TILE):
                count = min(QUERY_TILE, span.end - start)
                row = span.row + start - span.start
                places += range(len(query_rows), len(query_rows) + count)
                query_rows += [*range(row, row + count), *[row] * (QUERY_TILE - count)]
                tiles.append(self._tile(first, start, count))
        return Work(
            kv_tiles=len(tables),
            kv_rows=self._kv.gather_rows(torch.tensor(tables, dtype=torch.int64, device=self._device)),
            stale=self._stale(ends),
            tiles=tuple(tiles),
            query_rows=torch.tensor(query_rows, device=self._device),
            places=torch.tensor(places, device=self._device),
        )

    def _kv_tiles(self, span: Span) -> Iterator[tuple[tuple[int, ...], int]]:
        """Block ids of each KV tile, filled up with the sequence's first block, and the end of what is real in it."""
        for begin in range(ceil_div(span.end, self._tile_tokens)):
            blocks = span.block_table[begin * self._tile_blocks : (begin + 1) * self._tile_blocks]
            padding = span.block_table[:1] * (self._tile_blocks - len(blocks))
            yield (*blocks, *padding), span.end - begin * self._tile_tokens

    def _stale(self, ends: list[int]) -> Tensor:
        behind = torch.arange(self._tile_tokens, device=self._device) >= torch.tensor(ends, device=self._device).view(-1, 1)
        return behind.view(len(ends), 1, self._tile_tokens, 1)

    def _tile(self, first_kv_tile: int, start: int, count: int) -> Tile:
        """For tokens [start, start + count); the tile's padding repeats the first of them."""
        tokens = self._tile_tokens
        used = ceil_div(start + count, tokens)
        position = start + torch.arange(QUERY_TILE, device=self._device).view(-1, 1)
        position[count:] = start
        hidden: list[Tensor | None] = [None] * used
        for i in range(start // tokens, used):  # the others lie before every token of the tile
            behind = torch.arange(i * tokens, (i + 1) * tokens, device=self._device) > position
            hidden[i] = behind.repeat(self._group, 1)
        return Tile(range(first_kv_tile, first_kv_tile + used), tuple(hidden))
