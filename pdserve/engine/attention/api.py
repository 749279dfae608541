"""The interface between the model and an attention backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from pdserve.core.kv_layout import KvGroup
from pdserve.core.model_spec import AttentionSpec, MlaSpec
from pdserve.engine.kv.span import Span

Prepared = TypeVar("Prepared")


class Attention(Protocol, Generic[Prepared]):
    """Causal grouped-query attention over paged KV.

    A backend keeps no state between steps: the model calls `prepare` once a step and `run` once a layer.
    """

    def prepare(self, spans: tuple[Span, ...]) -> Prepared:
        """Do the part of a step's work that all layers share."""

    def run(self, prepared: Prepared, layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` [tokens, heads, qk_dim] in one layer: [tokens, heads, v_dim] of the same dtype."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The settings of attention that all layers of a KV group share.

    v_dim: numbers of a head of values. A group of one plane has its values in the first v_dim numbers of its keys. scale:
    factor of the scores. window: positions that a token sees, its own included; None means all. softcap: bound c of the
    scaled scores s, which become c * tanh(s / c); None means no bound.
    """

    v_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def plain(cls, layout: KvGroup) -> Scores:
        """Return the settings of Llama's attention over KV of this layout."""
        return cls(layout.planes[-1][1], 1.0 / math.sqrt(layout.head_dim))

    @classmethod
    def of(cls, spec: AttentionSpec | MlaSpec) -> Scores:
        """Return the settings of a layer. Latent attention is meant in its absorbed form."""
        scale = 1.0 / math.sqrt(spec.qk_dim) if spec.scale is None else spec.scale
        if isinstance(spec, MlaSpec):
            return cls(spec.kv_rank, scale)
        return cls(spec.v_dim, scale, spec.window, spec.softcap)

    def first_seen(self, start: int) -> int:
        """Return the first position that the token at `start` sees. No later token sees an earlier one."""
        return 0 if self.window is None else max(0, start - self.window + 1)
