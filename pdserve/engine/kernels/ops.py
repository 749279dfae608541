"""The model's other operations by Triton kernels, into a plain pool."""

from __future__ import annotations

from torch import Tensor

from pdserve.engine.kernels.activation import silu_and_mul
from pdserve.engine.kernels.norm import add_rms_norm, rms_norm
from pdserve.engine.kernels.paged_kv import KvFormat, PagedKv
from pdserve.engine.kernels.rope import rotate_and_write


class TritonOps:
    """As `pdserve.engine.ops.Ops`; a slot below zero is nobody's, and its token is written nowhere."""

    def __init__(self, kv: PagedKv) -> None:
        assert kv.format is KvFormat.PLAIN
        self._kv = kv
        self._layers = [kv.layer(i) for i in range(kv.num_layers)]

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, branch, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

    def rotate_and_write(self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor) -> Tensor:
        first = slots.view(2, -1, self._kv.num_kv_heads)[0, :, 0]
        return rotate_and_write(projected, table_rows, self._kv, self._layers[layer], first)
