"""Operations of a decoder besides attention and matrix products: the interface for the model, and the torch version."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from pdserve.core.model_spec import MoeSpec
from pdserve.core.shards import RankShare
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layers.elementwise import (
    gelu_and_mul,
    gelu_and_mul_fixed,
    rms_norm,
    silu_and_mul,
    silu_and_mul_fixed,
)
from pdserve.engine.layers.moe import GatherColumns, Grouped
from pdserve.engine.layers.rope import rotate
from pdserve.engine.norms import HeadNorms, Norm


class Ops(Protocol):
    """The operations that a model needs.

    All except `rotate_and_write` are functions of rows: row i of a result depends only on rows i of the inputs.
    """

    @property
    def norms_heads(self) -> bool:
        """True when `rotate_and_write` takes norms of heads. Otherwise the caller norms the heads before, as rows."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return the RMSNorm of x [rows, width] with weight [width], to which `offset` is added."""

    def add_norm(
        self, x: Tensor, branch: Tensor, weight: Tensor, eps: float, offset: float = 0.0, post: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x + branch, both [rows, width], and the norm of this sum. post: the norm of the branch before the sum."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [rows, width], of gate_up [rows, 2 * width] with the gate first."""

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu_tanh(gate) * up, [rows, width], of gate_up [rows, 2 * width] with the gate first."""

    def grouped(self, spec: MoeSpec, gate_up: Tensor, down: Tensor, share: RankShare, gather: GatherColumns) -> Grouped | None:
        """Return the routed experts of a layer with these matrices, or None where each expert is computed by itself.

        gate_up: [experts, 2 * intermediate, hidden]. down: [experts, hidden, intermediate]. share: it says which columns of
        each product this rank computes. gather: returns whole rows from these columns.
        """

    def rotate_and_write(
        self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate queries and keys, write K and V of one layer to the pool, and return q [tokens, num_heads, qk_dim].

        projected: [tokens, (num_heads + num_kv_heads) * qk_dim + num_kv_heads * v_dim], q then k then v. table_rows: [tokens,
        2, dim], rows of `rope_table`; the first dim numbers of a head are rotated. slots: the result of `KvCache.slots`. A pool
        of one plane takes heads of one width: q, then the stored head. The last dim numbers of each head are rotated. norms:
        applied to each head of queries and keys first, where `norms_heads` is true. The result may be a view of `projected`,
        which may have changed.
        """


class TorchOps:
    """Satisfies `Ops` by torch; K and V go to `kv`."""

    norms_heads: Final = False

    def __init__(self, kv: KvCache, *, fixed: bool) -> None:
        """Write to `kv`. fixed: the result of an element must not depend on its place in a batch."""
        self._kv = kv
        self._silu_and_mul = silu_and_mul_fixed if fixed else silu_and_mul
        self._gelu_and_mul = gelu_and_mul_fixed if fixed else gelu_and_mul

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return the RMSNorm of x."""
        return rms_norm(x, weight, eps, offset)

    def add_norm(
        self, x: Tensor, branch: Tensor, weight: Tensor, eps: float, offset: float = 0.0, post: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x + branch and the norm of this sum."""
        summed = x + (branch if post is None else rms_norm(branch, *post))
        return summed, rms_norm(summed, weight, eps, offset)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        return self._silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu_tanh(gate) * up."""
        return self._gelu_and_mul(gate_up)

    def grouped(self, spec: MoeSpec, gate_up: Tensor, down: Tensor, share: RankShare, gather: GatherColumns) -> None:
        """Return None: each expert is computed by itself."""

    def rotate_and_write(
        self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate queries and keys, write K and V, and return q."""
        assert norms is None, "the caller norms the heads"
        if len(self._kv.layout.planes) == 1:
            return self._rotate_and_write_latent(layer, projected, table_rows, slots)
        (kv_heads, qk_dim), (_, v_dim) = self._kv.layout.planes
        rest, value = projected[:, : -kv_heads * v_dim], projected[:, -kv_heads * v_dim :]
        rotated = rotate(rest.view(len(rest), -1, qk_dim), table_rows)
        self._kv.write(layer, slots, rotated[:, -kv_heads:], value.view(len(rest), kv_heads, v_dim))
        return rotated[:, :-kv_heads].contiguous()

    def _rotate_and_write_latent(self, layer: int, projected: Tensor, table_rows: Tensor, slots: Tensor) -> Tensor:
        """Rotate the last dim numbers of all heads, write the last head, and return the others."""
        heads = projected.view(len(projected), -1, self._kv.layout.head_dim)
        plain = heads.shape[-1] - table_rows.shape[-1]
        rotated = torch.cat((heads[..., :plain], rotate(heads[..., plain:], table_rows)), -1)
        self._kv.write(layer, slots, rotated[:, -1:])
        return rotated[:, :-1].contiguous()
