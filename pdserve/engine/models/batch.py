"""One step's plan as tensors. The batch is ragged: the tokens of all slices lie one after the other in one flat batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.kv_layout import ceil_div
from pdserve.core.step_plan import StepPlan
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.span import Span


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step.

    The first `tokens` rows of `token_ids` and `positions` count. The other rows are padding (zeros), which reaches neither KV
    nor logits.
    """

    tokens: int
    token_ids: Tensor  # [padded] int64
    positions: Tensor  # [padded] int64
    slots: tuple[Tensor, ...]  # for each KV group, the places for the tokens' K and V: `KvCache.slots`
    spans: tuple[tuple[Span, ...], ...]  # for each KV group, the sequences of the step
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
    spans = tuple(_spans(plan, group, kv) for group, kv in enumerate(caches))
    return Batch(
        tokens=tokens,
        token_ids=torch.tensor(ids + padding, device=device),
        positions=torch.tensor(positions + padding, device=device),
        slots=tuple(kv.slots(own) for kv, own in zip(caches, spans, strict=True)),
        spans=spans,
    )


def _spans(plan: StepPlan, group: int, kv: KvCache) -> tuple[Span, ...]:
    """Return the plan's sequences with their blocks of one group."""
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
        spans.append(span)
        row += span.count
    return tuple(spans)
