"""The interface between the model and an attention backend."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from torch import Tensor

from pdserve.engine.kv.span import Span

Prepared = TypeVar("Prepared")


class Attention(Protocol, Generic[Prepared]):
    """Causal grouped-query attention over paged KV.

    A backend keeps no state between steps: the model calls `prepare` once a step and `run` once a layer.
    """

    def prepare(self, spans: tuple[Span, ...]) -> Prepared:
        """Do the part of a step's work that all layers share."""

    def run(self, prepared: Prepared, layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` [tokens, num_heads, head_dim] in one layer: the same shape and dtype."""
