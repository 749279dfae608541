"""The model's other operations by Triton kernels."""

from __future__ import annotations

from torch import Tensor

from pdserve.engine.kernels.activation import silu_and_mul
from pdserve.engine.kernels.norm import add_rms_norm, rms_norm
from pdserve.engine.kernels.quantise import quantise_write
from pdserve.engine.kernels.rope import rotate_and_write
from pdserve.engine.kv.paged import KvFormat, PagedKv


class TritonOps:
    """As `pdserve.engine.layers.torch_ops.Ops`; slots below zero are nobody's, and their token is written nowhere."""

    def __init__(self, kv: PagedKv) -> None:
        self._kv = kv
        self._layers = [kv.layer(i) for i in range(kv.num_layers)]

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, branch, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

    def rotate_and_write(self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor) -> Tensor:
        kv, of_layer = self._kv, self._layers[layer]
        query = rotate_and_write(projected, table_rows, kv, of_layer, slots[:, 0])
        if kv.format is not KvFormat.PLAIN:  # the keys were rotated where they are
            heads = projected.unflatten(1, (-1, kv.head_dim))
            key, value = heads[:, -2 * kv.num_kv_heads : -kv.num_kv_heads], heads[:, -kv.num_kv_heads :]
            quantise_write(kv, of_layer, key, value, slots)
        return query
