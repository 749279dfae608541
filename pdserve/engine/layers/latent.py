"""Multi-head latent attention in its absorbed form (DeepSeek-V2, section 2.1.2). It satisfies `AttentionPart`.

A token stores one normed latent vector of kv_rank numbers and one rotated key of rope_dim numbers, which all heads share. The
expansion kv_b would make a key and a value of each head from the latent vector. Its rows of the key are multiplied into the
query instead, and its rows of the value into the result. So attention has one KV head of kv_rank + rope_dim numbers, whose
first kv_rank numbers are the value as well, and the keys and values of earlier positions are never expanded.

DeepSeek-V3 stores 576 numbers for each token and layer. Expanded keys and values of 128 heads would be 40,960 numbers. The
price is arithmetic: a query head and a position take 2 * (576 + 512) operations, instead of 2 * (192 + 128).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.model_spec import MlaSpec
from pdserve.engine.layers.linear import LinearFor
from pdserve.engine.layers.torch_ops import Ops
from pdserve.engine.norms import Norm

if TYPE_CHECKING:
    from pdserve.engine.models.weights import MlaWeights

VECTOR: Final = 16
"""Columns of the products of each head are a multiple of this number. MKL gives rows other bits at other places of a product
when its columns are no multiple of 4 (256 shapes were tried), and `Rows` relies on bits that do not depend on the place."""


class LatentPart:
    """Absorbed queries and latent vectors of rows, and the expansion and projection of attention's result."""

    def __init__(self, spec: MlaSpec, weights: MlaWeights, ops: Ops, linear: LinearFor) -> None:
        """Lay out the weights. Rows that are rotated as neighbours are sorted, so that number i pairs with i + rope_dim / 2."""
        self._spec = spec
        self._ops = ops
        self._q_a = None if weights.q_a is None else linear(weights.q_a)
        self._q_norm = None if weights.q_a_norm is None else Norm.of(spec.norm, weights.q_a_norm)
        q, kv_a = in_halves(spec, weights)
        self._q = linear(q)
        self._kv_a = linear(kv_a)
        self._kv_norm = Norm.of(spec.norm, weights.kv_a_norm)
        keys, values = expansion(spec, weights)
        self._to_latent = _whole_vectors(keys)  # [heads, nope_dim, kv_rank]
        self._to_value = _whole_vectors(values.transpose(1, 2))  # [heads, kv_rank, v_dim]
        self._out = linear(weights.out)
        self.attended_width = spec.heads * spec.kv_rank

    def before(self, normed: Tensor) -> tuple[Tensor]:
        """Return heads in one tensor, [rows, (heads + 1) * (kv_rank + rope_dim)]: absorbed queries, then the numbers that are
        stored.

        The last rope_dim numbers of each head are still to be rotated. normed: [rows, hidden].
        """
        spec = self._spec
        if self._q_a is None or self._q_norm is None:
            query = self._q(normed)
        else:
            query = self._q(self._ops.norm(self._q_a(normed), *self._q_norm))
        plain, turned = torch.split(query.view(-1, spec.heads, spec.qk_dim), [spec.nope_dim, spec.rope_dim], -1)
        absorbed = _by_head(plain, self._to_latent)[..., : spec.kv_rank]
        latent, key = torch.split(self._kv_a(normed), [spec.kv_rank, spec.rope_dim], -1)
        stored = torch.cat((self._ops.norm(latent.contiguous(), *self._kv_norm), key), -1)
        return (torch.cat((torch.cat((absorbed, turned), -1).flatten(1), stored), -1),)

    def write(self, at: int, projected: tuple[Tensor, ...], table_rows: Tensor, slots: Tensor) -> Tensor:
        """Rotate queries and keys, write latent vectors and keys, and return queries [tokens, heads, kv_rank + rope_dim]."""
        return self._ops.rotate_and_write(at, projected[0], table_rows, slots)

    def after(self, attended: Tensor) -> Tensor:
        """Return the projection [rows, hidden] of attended [rows, heads * kv_rank], expanded to values."""
        spec = self._spec
        latent = attended.view(-1, spec.heads, spec.kv_rank)
        return self._out(_by_head(latent, self._to_value)[..., : spec.v_dim].flatten(1))


def in_halves(spec: MlaSpec, weights: MlaWeights) -> tuple[Tensor, Tensor]:
    """Return q and kv_a with rotated rows in the order in which number i pairs with i + rope_dim / 2."""
    order = torch.arange(spec.rope_dim, device=weights.kv_a.device)
    if spec.rope.neighbours:  # neighbours are pairs: the rows of even places come first
        order = torch.cat((order[::2], order[1::2]))
    heads = weights.q.view(spec.heads, spec.qk_dim, -1)
    q = torch.cat((heads[:, : spec.nope_dim], heads[:, spec.nope_dim :][:, order]), 1).flatten(0, 1)
    return q, torch.cat((weights.kv_a[: spec.kv_rank], weights.kv_a[spec.kv_rank :][order]))


def expansion(spec: MlaSpec, weights: MlaWeights) -> tuple[Tensor, Tensor]:
    """Return the rows of the expansion that make keys, [heads, nope_dim, kv_rank], and values, [heads, v_dim, kv_rank]."""
    both = weights.kv_b.view(spec.heads, spec.nope_dim + spec.v_dim, spec.kv_rank)
    return both[:, : spec.nope_dim], both[:, spec.nope_dim :]


def _by_head(x: Tensor, weights: Tensor) -> Tensor:
    """Return the product of each head of x [rows, heads, in] with its own matrix of weights [heads, in, out]."""
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)


def _whole_vectors(weights: Tensor) -> Tensor:
    """Return weights [heads, in, out] in new memory, with columns of zeros up to a whole number of vectors."""
    return F.pad(weights, (0, -weights.shape[-1] % VECTOR)).contiguous()
