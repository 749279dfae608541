"""The shape of an attention, for which its kernels are compiled, with the pool that it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pdserve.core.kv_layout import ceil_div
from pdserve.core.model_spec import Attention, MlaSpec
from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.kv.paged import KvFormat, PagedKv

SMALLEST: Final = 16
"""The fewest numbers that a matrix product of Triton takes along any dimension."""
_LOG2_E: Final = 1 / math.log(2)


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Causal attention of `heads` query heads over `kv_heads` KV heads in blocks of `block_size` tokens.

    qk_dim, v_dim: numbers of a head of queries and keys, and of a head of values. latent: there is one plane, and a value is
    the first v_dim numbers of its key. window: positions that a token sees, its own included; 0 means all. scale: factor of
    the scores s; None means 1 / sqrt(qk_dim). softcap: bound c of the scaled scores, which become c * tanh(s / c).
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    block_size: int
    format: KvFormat = KvFormat.PLAIN
    latent: bool = False
    window: int = 0
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0
        assert not self.latent or self.v_dim < self.qk_dim
        assert not (self.latent and self.format is KvFormat.INT4 and self.v_dim % 2)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def main(self) -> int:
        """The numbers of a key that one matrix product takes. The rest of a latent key takes a second product."""
        return self.v_dim if self.latent else self.qk_dim

    @property
    def numbers(self) -> int:
        """The numbers of a position that a program holds, padded: its key, and a value where it is not part of the key."""
        return padded(self.main) + (padded(self.qk_dim - self.v_dim) if self.latent else padded(self.v_dim))

    @property
    def factors(self) -> tuple[float, float]:
        """The factor of a raw score, and the factor after the tangent hyperbolic; the results are in units of log2.

        Without a softcap there is no second factor, and it is 0. With a softcap, the first factor turns s into 2 * s / c, the
        argument of the exponential within the tangent.
        """
        scale = self.scale if self.scale is not None else 1.0 / math.sqrt(self.qk_dim)
        if self.softcap is None:
            return scale * _LOG2_E, 0.0
        return 2.0 * scale / self.softcap * _LOG2_E, self.softcap * _LOG2_E

    def constants(self, rows: int) -> dict[str, int | bool]:
        """Return the constants of the kernels' arguments for query tiles of `rows` rows."""
        rest = self.qk_dim - self.main
        heads = self.heads_of_tile(rows)
        return {
            "FORMAT": int(self.format), "GROUP": self.group, "HEADS": heads, "BLOCK_SIZE": self.block_size,
            "HEAD_DIM": self.main, "DIM": padded(self.main), "REST": rest, "REST_DIM": padded(rest) if rest else 0,
            "V_HEAD_DIM": self.v_dim, "V_DIM": padded(self.v_dim), "STORED_DIM": self.format.stored_dim(self.qk_dim),
            "V_STORED_DIM": self.format.stored_dim(self.v_dim), "WINDOW": self.window, "CAPPED": self.softcap is not None,
        }  # fmt: skip

    def heads_of_tile(self, rows: int) -> int:
        """Return the query heads of one tile. A group of more heads than rows is cut into several tiles."""
        return min(self.group, rows)

    def programs(self, rows: int) -> int:
        """Return the tiles that the heads of one token need."""
        return self.kv_heads * ceil_div(self.group, self.heads_of_tile(rows))


def padded(numbers: int) -> int:
    """Return the length of a range that holds `numbers` numbers and that a matrix product takes."""
    return max(SMALLEST, next_power_of_2(numbers))


def grouped(kv: PagedKv, heads: int, window: int = 0) -> KernelShape:
    """Return the shape of Llama's attention over `kv`."""
    return KernelShape(heads, kv.num_kv_heads, kv.head_dim, kv.head_dim, kv.block_size, kv.format, window=window)


def shape_of(spec: Attention, block_size: int, kind: KvFormat) -> KernelShape:
    """Return the shape of a layer's attention. Latent attention is absorbed: one KV head, whose value is part of its key."""
    if isinstance(spec, MlaSpec):
        scale = spec.scale if spec.scale is not None else 1.0 / math.sqrt(spec.qk_dim)
        dim = spec.kv_rank + spec.rope_dim
        return KernelShape(spec.heads, 1, dim, spec.kv_rank, block_size, kind, latent=True, scale=scale)
    return KernelShape(
        spec.heads, spec.kv_heads, spec.qk_dim, spec.v_dim, block_size, kind,
        window=spec.window or 0, scale=spec.scale, softcap=spec.softcap,
    )  # fmt: skip
