"""Operations of a decoder besides attention and matrix products, computed by Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pdserve.core.model_spec import MoeSpec
from pdserve.core.shards import RankShare
from pdserve.engine.kernels.activation import gelu_and_mul, silu_and_mul
from pdserve.engine.kernels.experts import GroupedExperts
from pdserve.engine.kernels.norm import add_rms_norm, rms_norm
from pdserve.engine.kernels.quantise import quantise_write
from pdserve.engine.kernels.rope import rotate_and_write
from pdserve.engine.kv.paged import KvFormat, PagedKv
from pdserve.engine.norms import HeadNorms, Norm


class TritonOps:
    """Satisfies `pdserve.engine.layers.torch_ops.Ops`. A token whose slot is negative is written nowhere."""

    norms_heads: Final = True

    def __init__(self, kv: PagedKv) -> None:
        self._kv = kv
        self._layers = [kv.layer(i) for i in range(kv.num_layers)]

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return the RMSNorm of x [rows, width] with weight [width], to which `offset` is added."""
        return rms_norm(x, weight, eps, offset)

    def add_norm(
        self, x: Tensor, branch: Tensor, weight: Tensor, eps: float, offset: float = 0.0, post: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x + branch, both [rows, width], and the norm of this sum. post: the norm of the branch before the sum."""
        return add_rms_norm(x, branch, weight, eps, offset, post)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [rows, width], of gate_up [rows, 2 * width] with the gate first."""
        return silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu_tanh(gate) * up, [rows, width], of gate_up [rows, 2 * width] with the gate first."""
        return gelu_and_mul(gate_up)

    def grouped(
        self, spec: MoeSpec, gate_up: Tensor, down: Tensor, share: RankShare, gather: Callable[[Tensor, int], Tensor]
    ) -> GroupedExperts:
        """Return the routed experts of a layer, computed by the kernels of sorted pairs."""
        if share.degrees.tensor > 1:
            inner, outer = share.columns_of(spec.intermediate), share.columns_of(down.shape[1])
            gates, ups = (half[:, inner.start : inner.stop] for half in gate_up.chunk(2, 1))
            gate_up, down = torch.cat((gates, ups), 1), down[:, outer.start : outer.stop].contiguous()
        return GroupedExperts(spec, gate_up, down, gather)

    def rotate_and_write(
        self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate queries and keys, write the KV of one layer to `slots`, and return q [tokens, num_heads, head_dim].

        norms: applied to each head of queries and keys first.
        """
        kv, of_layer = self._kv, self._layers[layer]
        query = rotate_and_write(projected, table_rows, kv, of_layer, slots[:, 0], norms)
        if kv.format is not KvFormat.PLAIN:  # the keys were rotated in place
            heads = projected.unflatten(1, (-1, kv.head_dim))
            key, value = heads[:, query.shape[1] :][:, : kv.num_kv_heads], heads[:, -kv.num_kv_heads :]
            quantise_write(kv, of_layer, key, value, slots)
        return query
