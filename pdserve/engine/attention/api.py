"""What the model asks of an attention backend, and how one step's sequences are described to it."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from torch import Tensor

from pdserve.engine.kv.span import Span

Prepared = TypeVar("Prepared")


class Attention(Protocol, Generic[Prepared]):
    """Causal grouped-query attention over paged KV. Stateless: `prepare` once a step, `run` once a layer."""

    def prepare(self, spans: tuple[Span, ...]) -> Prepared:
        """Whatever of the work all layers share."""

    def run(self, prepared: Prepared, layer: int, query: Tensor) -> Tensor:
        """query: [tokens, num_heads, head_dim]; returns the same shape and dtype."""
