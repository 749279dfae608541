"""What a decoder computes besides attention and its matrix products, as the model asks for it, and by torch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layers.elementwise import SiluAndMul, rms_norm
from pdserve.engine.layers.rope import rotate


class Ops(Protocol):
    """All but `rotate_and_write` are functions of rows: row i of a result depends on rows i of the inputs only."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [rows, hidden] with weight [hidden]."""

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + branch, both [rows, hidden], and the norm of that."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [rows, 2 * width], gate first. Returns silu(gate) * up: [rows, width]."""

    def rotate_and_write(self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor) -> Tensor:
        """projected: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], q then k then v; table_rows: [tokens, 2, head_dim]
        of `rope_table`; slots: of `KvCache.slots`. Writes K and V and returns q, [tokens, num_heads, head_dim].
        """


class TorchOps:
    def __init__(self, kv: KvCache, silu_and_mul: SiluAndMul) -> None:
        self._kv = kv
        self._silu_and_mul = silu_and_mul

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        summed = x + branch
        return summed, rms_norm(summed, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._silu_and_mul(gate_up)

    def rotate_and_write(self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor) -> Tensor:
        heads = projected.view(projected.shape[0], -1, self._kv.layout.head_dim)
        num_kv_heads = self._kv.layout.num_kv_heads
        rotated = rotate(heads[:, :-num_kv_heads], table_rows)
        self._kv.write(layer, slots, rotated[:, -num_kv_heads:], heads[:, -num_kv_heads:])
        return rotated[:, :-num_kv_heads].contiguous()
