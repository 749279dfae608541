"""One step's plan as tensors. The batch is ragged: the tokens of all slices lie one after the other in one flat batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.step_plan import StepPlan
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.span import Span


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step.

    The first `tokens` rows of `token_ids` and `positions` count. The others are padding (zeros), which reaches neither KV
    nor logits.
    """

    tokens: int
    token_ids: Tensor  # [padded] int64
    positions: Tensor  # [padded] int64
    slots: Tensor  # the places for the tokens' K and V: `KvCache.slots`
    spans: tuple[Span, ...]


def make_batch(plan: StepPlan, kv: KvCache, padded: int) -> Batch:
    """Return a batch of `padded` rows, at least as many as the plan has tokens. Asserts that each token has a valid block."""
    assert plan.slices
    device = kv.device
    size = kv.layout.block_size
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    for piece in plan.slices:
        span = Span(len(ids), piece.start, len(piece.token_ids), piece.block_tables[0])
        assert span.count > 0
        assert span.end <= len(span.block_table) * size, "tokens without a block"
        assert min(span.block_table) >= 0
        assert max(span.block_table) < kv.num_blocks
        ids += piece.token_ids
        positions += range(span.start, span.end)
        spans.append(span)
    tokens, padding = len(ids), [0] * (padded - len(ids))
    return Batch(
        tokens=tokens,
        token_ids=torch.tensor(ids + padding, device=device),
        positions=torch.tensor(positions + padding, device=device),
        slots=kv.slots(spans),
        spans=tuple(spans),
    )
