"""Batch-invariant attention: the bits of a result do not depend on chunking, batch, neighbours or block ids.

A query row is one query head of one token. It attends to the positions of its sequence in tiles of fixed size, from
position 0 upwards, and the tiles are merged with an online softmax (Milakov and Gimelshein 2018). So a row goes through
the same operations on the same numbers whatever is computed beside it: later positions get weight 0 exactly, and the
products of a tile contain only the rows that have this tile. The number of rows in a product is chosen among counts that
give the same bits, as in `rows.py`. All computation is in float32, also for a bfloat16 cache.

Single tokens of all sequences are computed together. They are sorted by length, longest first, so the sequences that have
an i-th tile are always the first ones. Prompts are computed in pieces that lie within one tile, so only the last tile of
a piece needs a mask.

With a sliding window a row begins at the tile of the first position that it sees. Tiles in front of it are not read, and blocks
in front of it are replaced. Tokens of one piece begin in at most two tiles. For the later tokens the whole first tile is
hidden: its weights are 0, so it adds 0 to sums of 0 and changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.kv_layout import ceil_div
from pdserve.engine.attention.api import Scores
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.span import Span
from pdserve.engine.layers.elementwise import exp_fixed, softcap_fixed

BASE_ROWS: Final = 32
KV_TILE_TOKENS: Final = 64
"""Size of a tile, rounded down to whole blocks; at least one block. The last tile of a sequence is gathered whole, so large
tiles waste work on short sequences, and small tiles need many rounds. The time of a float32 step, relative to an ordinary step,
with tiles of 64 and of 128: 32 sequences at 129 positions 1.26 and 1.41; 8 sequences at 1,000 positions 1.31 and 1.16."""
PROBE_SEQUENCES: Final = 5
_LOWEST: Final = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Round:
    """One tile of positions for each of the first `count` sequences of a group.

    first: the index of the first sequence's tile among all KV tiles of the step. hidden: [last, 1, rows or 1, positions] bool,
    true for positions that a row may not see. It covers the last sequences of the round, at least the sequences with hidden
    positions; rows of the other sequences see the whole tile. None means that there is no such sequence.
    """

    first: int
    count: int
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionGroup:
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
class AttentionWork:
    """All sequences of a step.

    kv_rows: the argument for `KvCache.gather`. stale: indices into [kv tiles * num_kv_heads * positions] of the positions
    that hold no KV of the tile's sequence.
    """

    kv_tiles: int
    kv_rows: Tensor
    stale: Tensor
    groups: tuple[AttentionGroup, ...]


class InvariantAttention:
    """Attention whose bits do not depend on the batch. It satisfies `Attention`."""

    def __init__(self, kv: KvCache, num_heads: int, scores: Scores | None = None) -> None:
        """Compute `num_heads` query heads over `kv`. scores None: the settings are those of Llama."""
        self._kv = kv
        self._scores = scores or Scores.plain(kv.layout)
        self._num_kv_heads = kv.layout.num_kv_heads
        self._group = num_heads // kv.layout.num_kv_heads
        self._tile_blocks = max(1, KV_TILE_TOKENS // kv.layout.block_size)
        self._tile_tokens = self._tile_blocks * kv.layout.block_size
        self._device = kv.device
        self._sizes = self._settle()
        self._piece_tokens = min(self._tile_tokens, self._sizes[-1] // self._group)

    def run(self, prepared: AttentionWork, layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` [tokens, num_heads, qk_dim] in one layer: [tokens, num_heads, v_dim]."""
        planes = [plane.float() for plane in self._kv.gather(layer, prepared.kv_rows, prepared.kv_tiles)]
        values = planes[-1].view(-1, planes[-1].shape[-1])
        values.index_fill_(0, prepared.stale, 0.0)  # infinity times a weight of 0 would be NaN
        key, value = planes[0], planes[-1][..., : self._scores.v_dim].contiguous()
        if prepared.groups[0].places is None:
            return self._attend(prepared.groups[0], query, key, value)
        result = query.new_empty((*query.shape[:2], self._scores.v_dim))
        for group in prepared.groups:
            result[group.places] = self._attend(group, query[group.places], key, value)
        return result

    def _attend(self, group: AttentionGroup, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of one group, [sequences * tokens, num_heads, v_dim] in the dtype of `query`.

        query: [sequences * tokens, num_heads, qk_dim]. key, value: all tiles of the step.
        """
        tokens, dim = group.tokens, query.shape[-1]
        split = query.view(group.sequences, tokens, self._num_kv_heads, self._group, dim).transpose(1, 2)
        folded = split.float().mul(self._scores.scale).reshape(-1, tokens * self._group, dim)
        padded = F.pad(folded, (0, 0, 0, group.rows - folded.shape[1]))
        out = self._merge(padded, key, value, group.rounds)[:, : folded.shape[1]]
        out = out.reshape(*split.shape[:-1], -1).transpose(1, 2)
        return out.reshape(*query.shape[:2], -1).to(query.dtype)

    def _merge(self, query: Tensor, key: Tensor, value: Tensor, rounds: tuple[Round, ...]) -> Tensor:
        """Merge all rounds of a group. query: [sequences * num_kv_heads, rows, qk_dim] float32; returns heads of v_dim."""
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
        if self._scores.softcap is not None:
            scores = softcap_fixed(scores, self._scores.softcap)
        if one.hidden is not None:
            last = scores.view(one.count, self._num_kv_heads, *scores.shape[1:])[-len(one.hidden) :]
            last.masked_fill_(one.hidden, -torch.inf)
        highest = scores.amax(-1, keepdim=True)
        if self._scores.window is not None:
            highest.clamp_(min=_LOWEST)  # a row that sees nothing of a tile would get NaN, as infinity less infinity
        if maximum is not None:
            highest = torch.maximum(maximum, highest)
        return highest, exp_fixed(scores.sub_(highest))

    def prepare(self, spans: tuple[Span, ...]) -> AttentionWork:
        """Cut a step into groups and rounds, and list the blocks of each tile."""
        singles = sorted((span for span in spans if span.count == 1), key=lambda span: (-self._tiles_of(span), -span.end))
        total = sum(span.count for span in spans)
        tiles: list[tuple[Span, int]] = []
        groups = [self._singles(singles, tiles, total)] if singles else []
        for span in spans:
            if span.count > 1:
                groups += self._pieces(span, tiles, total)
        sources = [self._sources(span, tile) for span, tile in tiles]
        tables = [[span.block_table[i] for i in held] for (span, _), held in zip(tiles, sources, strict=True)]
        return AttentionWork(
            kv_tiles=len(tiles),
            kv_rows=self._kv.gather_rows(torch.tensor(tables, dtype=torch.int64, device=self._device)),
            stale=self._stale(sources, [span.end for span, _ in tiles]),
            groups=tuple(groups),
        )

    def _singles(self, spans: list[Span], tiles: list[tuple[Span, int]], total: int) -> AttentionGroup:
        """Return the group of all single tokens.

        spans: spans with the most tiles first. Their tiles are appended to `tiles`: the first tile of each span, then the
        second tile of each, and so on.
        """
        rounds = []
        counts = [self._tiles_of(span) for span in spans]
        for index in range(counts[0]):
            there = [(span, self._first_tile(span.start) + index) for span, n in zip(spans, counts, strict=True) if n > index]
            all_begin = index == 0 and self._scores.window is not None
            masked = [one for one, n in zip(there, counts, strict=False) if n == index + 1 or all_begin]
            rounds.append(Round(len(tiles), len(there), self._hidden([(tile, span.start) for span, tile in masked])))
            tiles += there
        return AttentionGroup(
            len(spans), 1, self._rows_for(1), self._places([span.row for span in spans], total), tuple(rounds)
        )

    def _hidden(self, tokens: list[tuple[int, int]]) -> Tensor | None:
        """Return `Round.hidden` for single tokens, each given as its tile and its position. None: there is no token."""
        if not tokens:
            return None
        own = torch.tensor([position - tile * self._tile_tokens for tile, position in tokens], device=self._device)
        return self._unseen(own).view(len(tokens), 1, 1, -1)

    def _pieces(self, span: Span, tiles: list[tuple[Span, int]], total: int) -> Iterator[AttentionGroup]:
        """Yield the groups of one prompt, one for each piece. Its tiles are appended to `tiles`."""
        before = len(tiles) - self._first_tile(span.start)
        tiles += [(span, tile) for tile in range(self._first_tile(span.start), ceil_div(span.end, self._tile_tokens))]
        start = span.start
        while start < span.end:
            last = start // self._tile_tokens
            count = min(self._piece_tokens, (last + 1) * self._tile_tokens - start, span.end - start)
            row = span.row + start - span.start
            places = self._places(list(range(row, row + count)), total)
            seen_by_all = self._scores.first_seen(start + count - 1)
            rounds = []
            for tile in range(self._first_tile(start), last + 1):
                begin = tile * self._tile_tokens
                whole = seen_by_all <= begin and tile < last
                rounds.append(Round(before + tile, 1, None if whole else self._causal(start - begin, count)))
            yield AttentionGroup(1, count, self._rows_for(count), places, tuple(rounds))
            start += count

    def _places(self, rows: list[int], total: int) -> Tensor | None:
        return None if rows == list(range(total)) else torch.tensor(rows, device=self._device)

    def _causal(self, offset: int, count: int) -> Tensor:
        """Return `Round.hidden` for tokens at [offset, offset + count), counted from the tile's first position: rows of all
        heads, then padding."""
        own = torch.arange(offset, offset + count, device=self._device).repeat_interleave(self._group)
        padded = F.pad(own, (0, self._rows_for(count) - len(own)))
        return self._unseen(padded).view(1, 1, len(padded), self._tile_tokens)

    def _unseen(self, own: Tensor) -> Tensor:
        """Return a mask [tokens, positions of a tile] bool, true for the positions that a token does not see.

        own: [tokens] int64, the position of each token, counted from the tile's first.
        """
        position = torch.arange(self._tile_tokens, device=self._device)
        hidden = position > own.view(-1, 1)
        if self._scores.window is not None:
            hidden |= position <= own.view(-1, 1) - self._scores.window
        return hidden

    def _stale(self, sources: list[list[int]], ends: list[int]) -> Tensor:
        """Return `AttentionWork.stale`: positions that the sequence has not written, which may hold anything, even NaN.

        These are the rest of its last block, wherever this block stands. sources: the sources of each tile. ends: the position
        after the last token of each tile's sequence.
        """
        size = self._kv.layout.block_size
        first = torch.tensor(sources, device=self._device).unsqueeze(-1) * size
        held = (first + torch.arange(size, device=self._device)).view(len(sources), 1, -1)
        stale = held >= torch.tensor(ends, device=self._device).view(-1, 1, 1)
        return stale.expand(-1, self._num_kv_heads, -1).reshape(-1).nonzero().view(-1)

    def _sources(self, span: Span, tile: int) -> list[int]:
        """Return the indices, in the block table of a sequence, of the blocks that are gathered for a tile.

        Blocks that no token sees, in front of the window and behind the end, are replaced by the first block that a token sees.
        """
        size = self._kv.layout.block_size
        first, behind = self._scores.first_seen(span.start) // size, ceil_div(span.end, size)
        wanted = range(tile * self._tile_blocks, (tile + 1) * self._tile_blocks)
        if first <= wanted.start and wanted.stop <= behind:
            return list(wanted)
        return [index if first <= index < behind else first for index in wanted]

    def _first_tile(self, start: int) -> int:
        """Return the tile of the first position that the token at `start` sees."""
        return self._scores.first_seen(start) // self._tile_tokens

    def _tiles_of(self, span: Span) -> int:
        """Return the number of tiles that the tokens of `span` see."""
        return ceil_div(span.end, self._tile_tokens) - self._first_tile(span.start)

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
        dim, v_dim, tile = self._kv.layout.head_dim, self._scores.v_dim, self._tile_tokens
        query, key, value = (
            torch.randn(PROBE_SEQUENCES * factor, self._num_kv_heads, length, width, generator=random).to(self._device)
            for factor, length, width in ((1, most, dim), (2, tile, dim), (2, tile, v_dim))
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
