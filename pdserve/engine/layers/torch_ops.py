"""Operations of a decoder besides attention and matrix products: the interface for the model, and the torch version."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layers.elementwise import SiluAndMul, rms_norm
from pdserve.engine.layers.rope import rotate


class Ops(Protocol):
    """The operations that a model needs.

    All except `rotate_and_write` are functions of rows: row i of a result depends only on rows i of the inputs.
    """

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm of x [rows, hidden] with weight [hidden]."""

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return x + branch, both [rows, hidden], and the norm of this sum."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [rows, width], of gate_up [rows, 2 * width] with the gate first."""

    def rotate_and_write(self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor) -> Tensor:
        """Rotate queries and keys, write K and V of one layer to the pool, and return q [tokens, num_heads, head_dim].

        projected: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], q then k then v. table_rows: [tokens, 2, head_dim],
        rows of `rope_table`. slots: the result of `KvCache.slots`.
        """


class TorchOps:
    """Satisfies `Ops` by torch; K and V go to `kv`."""

    def __init__(self, kv: KvCache, silu_and_mul: SiluAndMul) -> None:
        self._kv = kv
        self._silu_and_mul = silu_and_mul

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm of x."""
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return x + branch and the norm of this sum."""
        summed = x + branch
        return summed, rms_norm(summed, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, by the function that was given at construction."""
        return self._silu_and_mul(gate_up)

    def rotate_and_write(self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor) -> Tensor:
        """Rotate queries and keys, write K and V, and return q."""
        heads = projected.view(projected.shape[0], -1, self._kv.layout.head_dim)
        num_kv_heads = self._kv.layout.num_kv_heads
        rotated = rotate(heads[:, :-num_kv_heads], table_rows)
        self._kv.write(layer, slots, rotated[:, -num_kv_heads:], heads[:, -num_kv_heads:])
        return rotated[:, :-num_kv_heads].contiguous()
