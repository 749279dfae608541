"""The projections of `AttentionSpec` around attention. They satisfy `AttentionPart`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdserve.core.model_spec import AttentionSpec
from pdserve.engine.layers.linear import LinearFor
from pdserve.engine.layers.torch_ops import Ops
from pdserve.engine.norms import HeadNorms, Norm

if TYPE_CHECKING:
    from pdserve.engine.models.weights import GqaWeights


class GqaPart:
    """Queries, keys and values of rows, and the projection of attention's result."""

    def __init__(self, spec: AttentionSpec, weights: GqaWeights, ops: Ops, linear: LinearFor, heads: range) -> None:
        """Lay out the weights. heads: the KV heads that are written, and whose queries are returned."""
        self._ops = ops
        self._own = None if len(heads) == spec.kv_heads else _columns_of(spec, heads)
        self._qkv = linear(weights.qkv, weights.qkv_bias)
        self._out = linear(weights.out, weights.out_bias)
        self.attended_width = spec.out_width
        self._widths = [spec.query_width, spec.kv_heads * spec.qk_dim, spec.kv_heads * spec.v_dim]
        self._norms: HeadNorms | None = None
        if spec.qk_norm is not None:
            assert weights.q_norm is not None
            assert weights.k_norm is not None
            self._norms = HeadNorms(Norm.of(spec.qk_norm, weights.q_norm), Norm.of(spec.qk_norm, weights.k_norm))

    def before(self, normed: Tensor) -> tuple[Tensor]:
        """Return q, k and v in one tensor, [rows, query_width + kv_width]. normed: [rows, hidden]."""
        projected = self._qkv(normed)
        if self._norms is None or self._ops.norms_heads:
            return (projected,)
        query, key, value = torch.split(projected, self._widths, dim=1)
        return (torch.cat((self._by_head(query, self._norms.query), self._by_head(key, self._norms.key), value), 1),)

    def _by_head(self, x: Tensor, norm: Norm) -> Tensor:
        """Return x [rows, heads * qk_dim] with each head normed."""
        heads = x.reshape(-1, len(norm.weight))
        return self._ops.norm(heads, *norm).view(x.shape)

    def write(self, at: int, projected: tuple[Tensor, ...], table_rows: Tensor, slots: Tensor) -> Tensor:
        """Rotate queries and keys, write keys and values, and return the queries [tokens, heads, qk_dim]."""
        norms = self._norms if self._ops.norms_heads else None
        (whole,) = projected
        own = whole if self._own is None else torch.cat([whole[:, columns] for columns in self._own], 1)
        return self._ops.rotate_and_write(at, own, table_rows, slots, norms)

    def after(self, attended: Tensor) -> Tensor:
        """Return the projection [rows, hidden] of attended [rows, out_width]."""
        return self._out(attended)


def _columns_of(spec: AttentionSpec, heads: range) -> list[slice]:
    """Return the columns of the queries, keys and values of some KV heads, in the order q, k, v."""
    columns, begin = [], 0
    for each in (spec.heads // spec.kv_heads * spec.qk_dim, spec.qk_dim, spec.v_dim):
        columns.append(slice(begin + heads.start * each, begin + heads.stop * each))
        begin += spec.kv_heads * each
    return columns
