"""Attention computed literally from its definition, in float64, one token and one head at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.format import from_numbers
from pdserve.engine.kv.span import Span


class ReferenceAttention:
    """Slow attention that the tests take for correct. It satisfies `Attention`."""

    def __init__(self, kv: KvCache, num_heads: int) -> None:
        self._kv = kv
        self._group = num_heads // kv.layout.num_kv_heads

    def prepare(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return `spans` unchanged: there is nothing to share between layers."""
        return spans

    def run(self, prepared: tuple[Span, ...], layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` [tokens, num_heads, head_dim]: the same shape in float64."""
        result = torch.zeros(query.shape, dtype=torch.float64)
        for span in prepared:
            for i in range(span.count):
                for head in range(query.shape[1]):
                    row = span.row + i
                    key, value = self._history(span, layer, head // self._group, span.start + i + 1)
                    scores = key @ query[row, head].double() / math.sqrt(query.shape[-1])
                    result[row, head] = scores.softmax(0) @ value
        return result

    def _history(self, span: Span, layer: int, kv_head: int, length: int) -> tuple[Tensor, Tensor]:
        """Return K and V of tokens [0, length) of one head, each [length, head_dim] float64."""
        size = self._kv.layout.block_size
        where = [(span.block_table[p // size], p % size) for p in range(length)]
        key, value = (torch.stack([self._token(block, layer, i, kv_head, offset) for block, offset in where]) for i in (0, 1))
        return key, value

    def _token(self, block: int, layer: int, which: int, kv_head: int, offset: int) -> Tensor:
        """Return K (`which` is 0) or V (1) of one token and head: [head_dim] float64."""
        stored = self._kv.tensor[block, layer, which, kv_head, offset]
        if self._kv.scales is None:
            return stored.double()
        return from_numbers(stored, self._kv.layout.dtype).double() * self._kv.scales[block, layer, which, kv_head].double()
