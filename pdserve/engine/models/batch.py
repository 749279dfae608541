"""One step's plan as tensors. The batch is ragged: the tokens of all slices lie one after the other in one flat batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.core.kv_layout import ceil_div
from pdserve.core.step_plan import StepPlan
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.span import Span


class KeptBlocks:
    """Copies of quantised blocks as they were after a row, for slices whose next row changes the same block."""

    def __init__(self, caches: tuple[KvCache, ...], slices: list[int], blocks: tuple[Tensor, ...]) -> None:
        """Keep nothing yet. slices: the numbers of the slices in the plan. blocks: [slices] int64 for each KV group."""
        self._caches = caches
        self._slices = slices
        self._blocks = blocks
        self._copies: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def keep(self, group: int, layer: int) -> None:
        """Copy what the blocks of a group hold of a layer."""
        self._copies[group, layer] = self._caches[group].copies(layer, self._blocks[group])

    def restore(self, slices: Collection[int]) -> None:
        """Copy the blocks of these slices back."""
        chosen = [i for i, number in enumerate(self._slices) if number in slices]
        if not chosen:
            return
        which = torch.tensor(chosen, device=self._blocks[0].device)
        for (group, layer), copies in self._copies.items():
            self._caches[group].restore(layer, self._blocks[group][which], tuple(one[which] for one in copies))


@dataclass(frozen=True, slots=True)
class RowTurn:
    """Rows of a step whose KV is written, and which then attend, before the next turn writes any.

    A step has one turn, unless it has drafts and its KV is quantised. Then the rows of a slice take turns, because each token
    may change what the block stores of the tokens before.
    """

    rows: Tensor | None  # [rows] int64, those of the step; None: all of them
    slots: tuple[Tensor, ...]  # for each KV group, the places for the tokens' K and V: `KvCache.slots`
    spans: tuple[tuple[Span, ...], ...]  # for each KV group, the sequences of the turn; row i is the turn's own
    kept: KeptBlocks | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step.

    The first `tokens` rows of `token_ids` and `positions` count. The other rows are padding (zeros), which reaches neither KV
    nor logits.
    """

    tokens: int
    token_ids: Tensor  # [padded] int64
    positions: Tensor  # [padded] int64
    turns: tuple[RowTurn, ...]  # at least one
    real: Tensor | None = None  # [] int64 on the device: the rows of a recorded step that are not empty


def make_batch(plan: StepPlan, caches: tuple[KvCache, ...], padded: int) -> Batch:
    """Return a batch of `padded` rows, at least as many as the plan has tokens. Asserts that each token has a valid block."""
    assert plan.slices
    device = caches[0].device
    ids: list[int] = []
    positions: list[int] = []
    for piece in plan.slices:
        assert piece.token_ids
        ids += piece.token_ids
        positions += range(piece.start, piece.start + len(piece.token_ids))
    tokens, padding = len(ids), [0] * (padded - len(ids))
    quantised = caches[0].layout.quantised
    spans = tuple(_spans(plan, group, kv) for group, kv in enumerate(caches))
    return Batch(
        tokens=tokens,
        token_ids=torch.tensor(ids + padding, device=device),
        positions=torch.tensor(positions + padding, device=device),
        turns=_turns(plan, caches, spans) if quantised else (RowTurn(None, _slots(caches, spans), spans),),
    )


def _slots(caches: tuple[KvCache, ...], spans: tuple[tuple[Span, ...], ...]) -> tuple[Tensor, ...]:
    return tuple(kv.slots(own) for kv, own in zip(caches, spans, strict=True))


def _turns(plan: StepPlan, caches: tuple[KvCache, ...], spans: tuple[tuple[Span, ...], ...]) -> tuple[RowTurn, ...]:
    """Return the turns of a step with quantised KV. Turn i has row i of each slice with drafts; the first has all others."""
    of_spans = [(i, turn) for i, piece in enumerate(plan.slices) for turn in range(len(piece.drafts) + 1)]
    count = max(turn for _, turn in of_spans) + 1
    if count == 1:
        return (RowTurn(None, _slots(caches, spans), spans),)
    device, size = caches[0].device, caches[0].layout.block_size
    turns = []
    for turn in range(count):
        chosen = [at for at, (_, of_span) in enumerate(of_spans) if of_span == turn]
        rows = [row for at in chosen for row in range(spans[0][at].row, spans[0][at].row + spans[0][at].count)]
        own = tuple(_renumbered([of_group[at] for at in chosen]) for of_group in spans)
        changed = [at for at in chosen if turn < len(plan.slices[of_spans[at][0]].drafts) and spans[0][at].end % size]
        blocks = tuple(
            torch.tensor([of_group[at].block_table[of_group[at].start // size] for at in changed], device=device)
            for of_group in spans
        )
        kept = KeptBlocks(caches, [of_spans[at][0] for at in changed], blocks) if changed else None
        turns.append(RowTurn(torch.tensor(rows, device=device), _slots(caches, own), own, kept))
    return tuple(turns)


def _renumbered(spans: list[Span]) -> tuple[Span, ...]:
    """Return the spans as if there were no rows between them."""
    own, row = [], 0
    for span in spans:
        own.append(replace(span, row=row))
        row += span.count
    return tuple(own)


def _spans(plan: StepPlan, group: int, kv: KvCache) -> tuple[Span, ...]:
    """Return the plan's sequences with their blocks of one group.

    Each row of a slice with drafts is a span of its own, so that it has the bits of a decode, and what is no number in a later
    row does not reach it. Recordings of decodes fit it as well.
    """
    spans: list[Span] = []
    row, size = 0, kv.layout.block_size
    for piece in plan.slices:
        span = Span(row, piece.start, len(piece.token_ids), piece.block_tables[group])
        assert span.end <= len(span.block_table) * size, "tokens without a block"
        # Only the blocks that this step writes: those before them were looked at when they were written, and a look at all of
        # them in each step takes longer than everything else here.
        written = span.block_table[span.start // size : ceil_div(span.end, size)]
        assert min(written) >= 0
        assert max(written) < kv.num_blocks
        if piece.drafts:
            spans += [Span(row + i, span.start + i, 1, span.block_table) for i in range(span.count)]
        else:
            spans.append(span)
        row += span.count
    return tuple(spans)
