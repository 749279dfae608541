"""Operations of a decoder besides attention and matrix products, computed by Triton kernels."""

from __future__ import annotations

from torch import Tensor

from pdserve.engine.kernels.activation import silu_and_mul
from pdserve.engine.kernels.norm import add_rms_norm, rms_norm
from pdserve.engine.kernels.quantise import quantise_write
from pdserve.engine.kernels.rope import rotate_and_write
from pdserve.engine.kv.paged import KvFormat, PagedKv


class TritonOps:
    """Satisfies `pdserve.engine.layers.torch_ops.Ops`. A token whose slot is negative is written nowhere."""

    def __init__(self, kv: PagedKv) -> None:
        self._kv = kv
        self._layers = [kv.layer(i) for i in range(kv.num_layers)]

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm of x [rows, hidden] with weight [hidden]."""
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return x + branch, both [rows, hidden], and the norm of this sum."""
        return add_rms_norm(x, branch, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [rows, width], of gate_up [rows, 2 * width] with the gate first."""
        return silu_and_mul(gate_up)

    def rotate_and_write(self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor) -> Tensor:
        """Rotate queries and keys, write K and V of one layer to `slots`, and return q [tokens, num_heads, head_dim]."""
        kv, of_layer = self._kv, self._layers[layer]
        query = rotate_and_write(projected, table_rows, kv, of_layer, slots[:, 0])
        if kv.format is not KvFormat.PLAIN:  # the keys were rotated in place
            heads = projected.unflatten(1, (-1, kv.head_dim))
            key, value = heads[:, -2 * kv.num_kv_heads : -kv.num_kv_heads], heads[:, -kv.num_kv_heads :]
            quantise_write(kv, of_layer, key, value, slots)
        return query
