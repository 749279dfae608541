"""Batch-invariant attention: the bits of a result do not depend on chunking, batch, neighbours or block ids.

A query row is one query head of one token. It attends to the positions of its sequence in tiles of fixed size, from
position 0 upwards, and the tiles are merged with an online softmax (Milakov and Gimelshein 2018). So a row goes through
the same operations on the same numbers whatever is computed beside it: later positions get weight 0 exactly, and the
products of a tile contain only the rows that have this tile. The number of rows in a product is chosen among counts that
give the same bits, as in `rows.py`. All computation is in float32, also for a bfloat16 cache.

Single tokens of all sequences are computed together. They are sorted by length, longest first, so the sequences that have
an i-th tile are always the first ones. Prompts are computed in pieces that lie within one tile, so only the last tile of
a piece needs a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.kv_layout import ceil_div
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.span import Span
from pdserve.engine.layers.elementwise import exp_fixed

BASE_ROWS: Final = 32
KV_TILE_TOKENS: Final = 64
"""Size of a tile, rounded down to whole blocks; at least one block. The last tile of a sequence is gathered whole, so large
tiles waste work on short sequences, and small tiles need many rounds. The time of a float32 step, relative to an ordinary
step, with 64 and with 128: 32 sequences at 129 positions 1.26 and 1.41; 8 sequences at 1,000 positions 1.31 and 1.16."""
PROBE_SEQUENCES: Final = 5


@dataclass(frozen=True, slots=True)
class Round:
    """One tile of positions for each of the first `count` sequences of a group.

    first: the index of the first sequence's tile among all KV tiles of the step. hidden: [last, 1, rows or 1, positions]
    bool, true for positions that a row may not see. It covers the sequences whose last tile this is, which come last; rows
    of the others see the whole tile. None means that there is no such sequence.
    """

    first: int
    count: int
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class Group:
    """`sequences` sequences with `tokens` query tokens each that are computed together.

    rows: the number of query rows for one sequence and KV head, padding included. places: [sequences * tokens], the rows of
    the tokens in the batch; None means all rows in order.
    """

    sequences: int
    tokens: int
    rows: int
    places: Tensor | None
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """All sequences of a step.

    kv_rows: the argument for `KvCache.gather`. stale: indices into [kv tiles * num_kv_heads * positions] of the positions
    after a sequence's end that hold no KV of it.
    """

    kv_tiles: int
    kv_rows: Tensor
    stale: Tensor
    groups: tuple[Group, ...]


class InvariantAttention:
    """Attention whose bits do not depend on the batch. It satisfies `Attention`."""

    def __init__(self, kv: KvCache, num_heads: int) -> None:
        self._kv = kv
        self._num_kv_heads = kv.layout.num_kv_heads
        self._group = num_heads // kv.layout.num_kv_heads
        self._scale = 1.0 / math.sqrt(kv.layout.head_dim)
        self._tile_blocks = max(1, KV_TILE_TOKENS // kv.layout.block_size)
        self._tile_tokens = self._tile_blocks * kv.layout.block_size
        self._device = kv.device
        self._sizes = self._settle()
        self._piece_tokens = min(self._tile_tokens, self._sizes[-1] // self._group)

    def run(self, prepared: Work, layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` [tokens, num_heads, head_dim] in one layer: the same shape and dtype."""
        key, value = (x.float() for x in self._kv.gather(layer, prepared.kv_rows, prepared.kv_tiles))
        value.view(-1, value.shape[-1]).index_fill_(0, prepared.stale, 0.0)  # infinity times a weight of 0 would be NaN
        if prepared.groups[0].places is None:
            return self._attend(prepared.groups[0], query, key, value)
        result = torch.empty_like(query)
        for group in prepared.groups:
            result[group.places] = self._attend(group, query[group.places], key, value)
        return result

    def _attend(self, group: Group, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of one group, in the shape and dtype of `query`.

        query: [sequences * tokens, num_heads, head_dim]. key, value: all tiles of the step.
        """
        tokens, dim = group.tokens, query.shape[-1]
        split = query.view(group.sequences, tokens, self._num_kv_heads, self._group, dim).transpose(1, 2)
        folded = split.float().mul(self._scale).reshape(-1, tokens * self._group, dim)
        padded = F.pad(folded, (0, 0, 0, group.rows - folded.shape[1]))
        out = self._merge(padded, key, value, group.rounds)[:, : folded.shape[1]]
        return out.reshape(split.shape).transpose(1, 2).reshape(query.shape).to(query.dtype)

    def _merge(self, query: Tensor, key: Tensor, value: Tensor, rounds: tuple[Round, ...]) -> Tensor:
        """Merge all rounds of a group. query: [sequences * num_kv_heads, rows, head_dim] float32; returns the same shape."""
        first, *others = rounds
        maximum, weights = self._weights(query, key, first, None)
        total = weights.sum(-1, keepdim=True)
        result = torch.bmm(weights, _tiles(value, first))
        for one in others:
            many = one.count * self._num_kv_heads
            higher, weights = self._weights(query[:many], key, one, maximum[:many])
            keep = exp_fixed(maximum[:many].sub_(higher))
            total[:many].mul_(keep).add_(weights.sum(-1, keepdim=True))
            result[:many].mul_(keep).add_(torch.bmm(weights, _tiles(value, one)))
            maximum[:many] = higher
        return result.div_(total)

    def _weights(self, query: Tensor, key: Tensor, one: Round, maximum: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the largest score of each row so far, and exp(score - largest) for each score of this round.

        maximum: the largest scores of earlier rounds; None in the first round.
        """
        scores = torch.bmm(query, _tiles(key, one).transpose(1, 2))
        if one.hidden is not None:
            last = scores.view(one.count, self._num_kv_heads, *scores.shape[1:])[-len(one.hidden) :]
            last.masked_fill_(one.hidden, -torch.inf)
        highest = scores.amax(-1, keepdim=True)
        if maximum is not None:
            highest = torch.maximum(maximum, highest)
        return highest, exp_fixed(scores.sub_(highest))

    def prepare(self, spans: tuple[Span, ...]) -> Work:
        """Cut a step into groups and rounds, and list the blocks of each tile."""
        singles = sorted((span for span in spans if span.count == 1), key=lambda span: -span.end)
        total = sum(span.count for span in spans)
        tables: list[tuple[int, ...]] = []
        ends: list[int] = []
        groups = [self._singles(singles, tables, ends, total)] if singles else []
        for span in spans:
            if span.count > 1:
                groups += self._pieces(span, tables, ends, total)
        return Work(
            kv_tiles=len(tables),
            kv_rows=self._kv.gather_rows(torch.tensor(tables, dtype=torch.int64, device=self._device)),
            stale=self._stale(ends),
            groups=tuple(groups),
        )

    def _singles(self, spans: list[Span], tables: list[tuple[int, ...]], ends: list[int], total: int) -> Group:
        """Return the group of all single tokens.

        spans: longest first. Their tiles are appended to `tables` and `ends`: first tile 0 of all, then tile 1, and so on.
        """
        rounds = []
        counts = [ceil_div(span.end, self._tile_tokens) for span in spans]
        for index in range(counts[0]):
            there = [span for span, count in zip(spans, counts, strict=True) if count > index]
            begin = index * self._tile_tokens
            last = torch.tensor([span.end - begin for span, count in zip(spans, counts, strict=True) if count == index + 1])
            hidden = self._behind(last.to(self._device)).view(len(last), 1, 1, -1) if len(last) else None
            rounds.append(Round(len(tables), len(there), hidden))
            tables += [self._tile_table(span, index) for span in there]
            ends += [span.end - begin for span in there]
        return Group(len(spans), 1, self._rows_for(1), self._places([span.row for span in spans], total), tuple(rounds))

    def _pieces(self, span: Span, tables: list[tuple[int, ...]], ends: list[int], total: int) -> Iterator[Group]:
        """Yield the groups of one prompt, one for each piece. Its tiles are appended to `tables` and `ends`."""
        first = len(tables)
        for index in range(ceil_div(span.end, self._tile_tokens)):
            tables.append(self._tile_table(span, index))
            ends.append(span.end - index * self._tile_tokens)
        start = span.start
        while start < span.end:
            tile = start // self._tile_tokens
            count = min(self._piece_tokens, (tile + 1) * self._tile_tokens - start, span.end - start)
            row = span.row + start - span.start
            places = self._places(list(range(row, row + count)), total)
            rounds = [Round(first + i, 1, None) for i in range(tile)]
            rounds.append(Round(first + tile, 1, self._causal(start - tile * self._tile_tokens, count)))
            yield Group(1, count, self._rows_for(count), places, tuple(rounds))
            start += count

    def _places(self, rows: list[int], total: int) -> Tensor | None:
        return None if rows == list(range(total)) else torch.tensor(rows, device=self._device)

    def _causal(self, offset: int, count: int) -> Tensor:
        """Return `Round.hidden` for the tokens at [offset, offset + count) of one tile: rows of all heads, then padding."""
        ends = torch.arange(offset + 1, offset + 1 + count, device=self._device).repeat_interleave(self._group)
        padded = F.pad(ends, (0, self._rows_for(count) - len(ends)), value=1)
        return self._behind(padded).view(1, 1, len(padded), self._tile_tokens)

    def _stale(self, ends: list[int]) -> Tensor:
        """Return `Work.stale`: positions that the sequence has not written, which may hold anything, even NaN.

        These are the rest of its last block. The padding of a tile is the sequence's first block. That block is full unless
        it is the last one too, so where the end lies in the first block, the padding counts as well.
        """
        size = self._kv.layout.block_size
        limits = [self._tile_tokens if end < size else ceil_div(end, size) * size for end in ends]
        behind, beyond = (self._behind(torch.tensor(x, device=self._device)) for x in (ends, limits))
        here = (behind & ~beyond).unsqueeze(1).expand(-1, self._num_kv_heads, -1)
        return here.reshape(-1).nonzero().view(-1)

    def _behind(self, ends: Tensor) -> Tensor:
        """Return a mask [ends, positions of a tile] bool that is true from each end on."""
        return torch.arange(self._tile_tokens, device=self._device) >= ends.view(-1, 1)

    def _tile_table(self, span: Span, index: int) -> tuple[int, ...]:
        """Return the block ids of a tile, filled up with the sequence's first block."""
        blocks = span.block_table[index * self._tile_blocks : (index + 1) * self._tile_blocks]
        return (*blocks, *span.block_table[:1] * (self._tile_blocks - len(blocks)))

    def _rows_for(self, tokens: int) -> int:
        return next(size for size in self._sizes if size >= tokens * self._group)

    def _settle(self) -> tuple[int, ...]:
        """Return the row counts whose products give each row the same bits, ascending.

        These are the base count, a multiple of `BASE_ROWS`, and all counts that gave the same bits in a trial here.
        """
        base = ceil_div(self._group, BASE_ROWS) * BASE_ROWS
        most = ceil_div(self._tile_tokens * self._group, base) * base
        wanted = {*range(4, BASE_ROWS, 4), *(base << i for i in range((most // base).bit_length())), most}
        random = torch.Generator().manual_seed(0)
        dim = self._kv.layout.head_dim
        query, key, value = (
            torch.randn(PROBE_SEQUENCES * factor, self._num_kv_heads, length, dim, generator=random).to(self._device)
            for factor, length in ((1, most), (2, self._tile_tokens), (2, self._tile_tokens))
        )
        query = query.flatten(0, 1)
        rounds = tuple(Round(first, PROBE_SEQUENCES, None) for first in (0, PROBE_SEQUENCES))
        expected = torch.cat(
            [self._merge(part.contiguous(), key, value, rounds) for part in torch.split(query, base, dim=1)], dim=1
        )

        def same(size: int) -> bool:
            part, heads = query[:, -size:].contiguous(), self._num_kv_heads
            alone = tuple(Round(one.first, 1, None) for one in rounds)
            return torch.equal(self._merge(part, key, value, rounds), expected[:, -size:]) and torch.equal(
                self._merge(part[:heads], key, value, alone), expected[:heads, -size:]
            )

        return tuple(sorted({base, *(size for size in wanted if same(size))}))


def _tiles(tensor: Tensor, one: Round) -> Tensor:
    """Return the tiles of a round: [count * num_kv_heads, positions, head_dim]."""
    return tensor[one.first : one.first + one.count].flatten(0, 1)
