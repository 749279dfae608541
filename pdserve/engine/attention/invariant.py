"""Attention whose bits do not depend on company: not on chunking, batch, neighbours or block ids.

Every call has one shape: a tile of QUERY_TILE tokens of one sequence against a tile of KV_TILE positions that starts
at a multiple of KV_TILE from the sequence's beginning. Tiles are merged with an online softmax (Milakov and
Gimelshein 2018) from position 0 upwards. So a row goes through the same operations on the same numbers whoever is
computed with it: positions behind it are masked to weight 0 exactly, and a tile all behind it changes nothing,
since its maximum is -inf, its sum 0 and its rescaling 1. float32 inside, also for a bfloat16 cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.core.kv_layout import ceil_div
from pdserve.engine.attention.api import Span
from pdserve.engine.elementwise import exp_fixed
from pdserve.engine.kv_cache import KvCache

QUERY_TILE: Final = 32
KV_TILE: Final = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows [row, row + count) of the batch, padded to QUERY_TILE.

    hidden: for each KV tile that a row can see, [group * QUERY_TILE, KV_TILE] bool, true where it may not look.
    """

    row: int
    count: int
    hidden: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence. kv_rows: for `KvCache.gather`; positions from `end` on are padding or stale."""

    kv_rows: Tensor
    end: int
    tiles: tuple[Tile, ...]


class InvariantAttention:
    def __init__(self, kv: KvCache, num_heads: int) -> None:
        self._kv = kv
        self._num_kv_heads = kv.layout.num_kv_heads
        self._group = num_heads // kv.layout.num_kv_heads
        self._scale = 1.0 / math.sqrt(kv.layout.head_dim)
        self._device = kv.tensor.device

    def prepare(self, spans: tuple[Span, ...]) -> tuple[Work, ...]:
        return tuple(self._work(span) for span in spans)

    def run(self, prepared: tuple[Work, ...], layer: int, query: Tensor) -> Tensor:
        """query: [tokens, num_heads, head_dim]."""
        result = torch.empty_like(query)
        for work in prepared:
            key, value = self._history(work, layer)
            for tile in work.tiles:
                rows = slice(tile.row, tile.row + tile.count)
                result[rows] = self._attend(tile, query[rows], key, value)
        return result

    def _history(self, work: Work, layer: int) -> tuple[Tensor, Tensor]:
        """K^T: [tiles, num_kv_heads, head_dim, KV_TILE], V: [tiles, num_kv_heads, KV_TILE, head_dim]; float32.

        Zero from `end` on: a stale infinity would turn a weight of 0 into NaN.
        """
        key, value = (x[0].float() for x in self._kv.gather(layer, work.kv_rows, 1))
        missing = -work.end % KV_TILE
        key, value = (torch.nn.functional.pad(x[:, : work.end], (0, 0, 0, missing)) for x in (key, value))
        tiled = (self._num_kv_heads, -1, KV_TILE, key.shape[-1])
        return key.view(tiled).permute(1, 0, 3, 2).contiguous(), value.view(tiled).transpose(0, 1).contiguous()

    def _attend(self, tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: [count, num_heads, head_dim]; returns the same shape, float32."""
        count, heads, dim = query.shape
        padded = torch.zeros(QUERY_TILE, heads, dim, dtype=torch.float32, device=self._device)
        padded[:count] = query
        folded = padded.mul_(self._scale).view(QUERY_TILE, self._num_kv_heads, self._group, dim)
        folded = folded.permute(1, 2, 0, 3).reshape(self._num_kv_heads, self._group * QUERY_TILE, dim)
        out = self._merge(folded, key, value, tile.hidden)
        return out.view(self._num_kv_heads, self._group, QUERY_TILE, dim).permute(2, 0, 1, 3).reshape(-1, heads, dim)[:count]

    def _merge(self, query: Tensor, key: Tensor, value: Tensor, hidden: tuple[Tensor, ...]) -> Tensor:
        """query: [num_kv_heads, rows, head_dim], float32. The KV tiles are merged in order of position."""
        maximum = torch.full((*query.shape[:2], 1), -torch.inf, device=self._device)
        total = torch.zeros_like(maximum)
        result = torch.zeros_like(query)
        for i, mask in enumerate(hidden):
            scores = torch.bmm(query, key[i]).masked_fill_(mask, -torch.inf)
            higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            weights = exp_fixed(scores.sub_(higher))
            keep = exp_fixed(maximum.sub_(higher))
            total = total.mul_(keep).add_(weights.sum(-1, keepdim=True))
            result = result.mul_(keep).add_(torch.bmm(weights, value[i]))
            maximum = higher
        return result.div_(total)

    def _work(self, span: Span) -> Work:
        blocks = ceil_div(span.end, self._kv.layout.block_size)
        table = torch.tensor([span.block_table[:blocks]], dtype=torch.int64, device=self._device)
        tiles = tuple(self._tile(span, done) for done in range(0, span.count, QUERY_TILE))
        return Work(self._kv.gather_rows(table), span.end, tiles)

    def _tile(self, span: Span, done: int) -> Tile:
        count = min(QUERY_TILE, span.count - done)
        first = span.start + done
        position = torch.arange(first, first + QUERY_TILE, device=self._device).view(-1, 1)
        position[count:] = 0  # padding rows look at the first token only, so that they stay finite
        hidden = []
        for begin in range(0, first + count, KV_TILE):
            behind = torch.arange(begin, begin + KV_TILE, device=self._device) > position
            hidden.append(behind.repeat(self._group, 1))
        return Tile(span.row + done, count, tuple(hidden))
