"""The shape of a KV block, as it lies in memory and travels in a ticket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError

DTYPE_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}
QUANTISED: Final = ("fp8_e4m3", "int8", "int4")
"""Stored with a float32 scale for each layer, K or V, and head of a block."""
SCALE_BYTES: Final = 4


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One block is contiguous: [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim] of `dtype`, and where that is
    quantised the scales behind it: [num_layers, 2, num_kv_heads] float32.

    A block is one descriptor on the wire: large descriptors move several times faster than small ones.
    SmolLM2-135M in bf16: 30 * 2 * 3 * 16 * 64 * 2 B = 360 KiB for 16 tokens; in int8 180 KiB and 720 B of scales.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.quantised and (self.head_dim % 2 or self.data_bytes % SCALE_BYTES):
            raise ConfigError(f"a KV block of {self._numbers} numbers in {self.dtype} is not a whole number of words")

    @property
    def quantised(self) -> bool:
        return self.dtype in QUANTISED

    @property
    def data_bytes(self) -> int:
        """Of a block without its scales, which begin there."""
        return self._numbers * DTYPE_BITS[self.dtype] // 8

    @property
    def scale_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * SCALE_BYTES if self.quantised else 0

    @property
    def block_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def bytes_per_token(self) -> int:
        """The share of a block, rounded up."""
        return ceil_div(self.block_bytes, self.block_size)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.num_layers, self.num_kv_heads, self.head_dim, self.block_size

    @property
    def _numbers(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim

    def holds_the_same_as(self, other: KvLayout) -> bool:
        """Whether a block of one becomes a block of the other by storing each number in another way.

        Layers, heads, dimensions and tokens a block must be equal: a block is then still a block, with the same place in
        a block table. What may differ is `dtype`, and with it the scales and the bytes.
        """
        return self._shape == other._shape

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens, the last one partly filled."""
        return ceil_div(tokens, self.block_size)


def fit_max_model_len(requested: int | None, max_position: int, pool_tokens: int) -> int:
    """The longest request (prompt + output tokens) that model and KV pool can hold.

    Unset: as long as fits. Asked for explicitly and impossible: raises `ConfigError` saying which knob to turn.
    """
    if requested is None:
        return min(max_position, pool_tokens)
    if requested > max_position:
        raise ConfigError(f"max_model_len {requested} is over the model's own limit of {max_position} tokens")
    if requested > pool_tokens:
        raise ConfigError(
            f"max_model_len {requested} does not fit the KV pool of {pool_tokens} tokens: "
            "raise kv_cache_memory or lower max_model_len"
        )
    return requested
