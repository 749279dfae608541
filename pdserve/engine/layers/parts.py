"""The two parts of a decoder layer, attention and MLP, as the decoder calls them. Each type of a spec has its own class."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionPart(Protocol):
    """The work on rows before and after attention, and the write of KV between the two."""

    attended_width: int
    """The numbers of one token that the backend of attention returns, all heads together."""

    def before(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Return the projections of normed [rows, hidden], each [rows, any width]. This is a function of rows."""

    def write(self, at: int, projected: tuple[Tensor, ...], table_rows: Tensor, slots: Tensor) -> Tensor:
        """Write the KV of all tokens and return their queries, as the backend of attention takes them.

        at: the layer's place in its KV group. projected: the result of `before`, without padding. table_rows: rows of
        `rope_table`. slots: the result of `KvCache.slots`.
        """

    def after(self, attended: Tensor) -> Tensor:
        """Return the part's result [rows, hidden]. attended: [rows, width], all heads together. This is a function of rows."""


class MlpPart(Protocol):
    """The MLP of a layer."""

    def __call__(self, normed: Tensor) -> Tensor:
        """Return the part's result [rows, hidden] of normed [rows, hidden]. This is a function of rows."""
