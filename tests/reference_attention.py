"""Attention computed literally from its definition, in float64, one token and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.engine.attention.api import Scores
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.format import from_numbers
from pdserve.engine.kv.span import Span


class ReferenceAttention:
    """Slow attention that the tests take for correct. It satisfies `Attention`."""

    def __init__(self, kv: KvCache, num_heads: int, scores: Scores | None = None) -> None:
        self._kv = kv
        self._settings = scores or Scores.plain(kv.layout)
        self._group = num_heads // kv.layout.num_kv_heads

    def prepare(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return `spans` unchanged: there is nothing to share between layers."""
        return spans

    def run(self, prepared: tuple[Span, ...], layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` [tokens, num_heads, head_dim]: [tokens, num_heads, v_dim] float64."""
        result = torch.zeros((*query.shape[:2], self._settings.v_dim), dtype=torch.float64)
        for span in prepared:
            for i in range(span.count):
                for head in range(query.shape[1]):
                    row = span.row + i
                    end = span.start + i + 1
                    seen = range(max(0, end - (self._settings.window or end)), end)
                    key, value = (self._tokens(span, layer, which, head // self._group, seen) for which in (0, 1))
                    scores = key @ query[row, head].double() * self._settings.scale
                    cap = self._settings.softcap
                    if cap is not None:
                        scores = cap * torch.tanh(scores / cap)
                    result[row, head] = scores.softmax(0) @ value
        return result

    def _tokens(self, span: Span, layer: int, which: int, kv_head: int, positions: range) -> Tensor:
        """Return K (`which` is 0) or V (1) of tokens of one head: [positions, head_dim] float64."""
        size = self._kv.layout.block_size
        blocks = torch.tensor([span.block_table[p // size] for p in positions])
        stored = self._kv.tensor[blocks, layer, which, kv_head, torch.tensor([p % size for p in positions])]
        if self._kv.scales is None:
            return stored.double()
        scales = self._kv.scales[blocks, layer, which, kv_head].double().unsqueeze(-1)
        return from_numbers(stored, self._kv.layout.dtype).double() * scales
