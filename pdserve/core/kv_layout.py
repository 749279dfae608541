"""The shape of a KV block, as it lies in memory and travels in a ticket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError

DTYPE_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}
QUANTISED: Final = ("fp8_e4m3", "int8", "int4")
"""The quantised dtypes. A block of such a dtype has one float32 scale for each (layer, K or V, head)."""
SCALE_BYTES: Final = 4


def ceil_div(a: int, b: int) -> int:
    """Divide two integers and round up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of one KV block, which is contiguous: [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim] of `dtype`.
    The scales of a quantised dtype follow it: [num_layers, 2, num_kv_heads] float32.

    A block is one descriptor of a read: large descriptors move several times faster than small ones.
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
        """True when the blocks carry scales."""
        return self.dtype in QUANTISED

    @property
    def data_bytes(self) -> int:
        """The bytes of a block without its scales. The scales begin at this offset."""
        return self._numbers * DTYPE_BITS[self.dtype] // 8

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales of a block; 0 when the dtype is not quantised."""
        return self.num_layers * 2 * self.num_kv_heads * SCALE_BYTES if self.quantised else 0

    @property
    def block_bytes(self) -> int:
        """The bytes of a block with its scales."""
        return self.data_bytes + self.scale_bytes

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a block divided by its tokens, rounded up."""
        return ceil_div(self.block_bytes, self.block_size)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.num_layers, self.num_kv_heads, self.head_dim, self.block_size

    @property
    def _numbers(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim

    def holds_the_same_as(self, other: KvLayout) -> bool:
        """Tell whether a block of one layout can be converted to a block of the other by converting each number.

        Layers, KV heads, head dimension and block size must be equal, so that a block keeps its place in a block table. Only
        `dtype` may differ, and with it the scales and the bytes.
        """
        return self._shape == other._shape

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens. The last block may be partly filled."""
        return ceil_div(tokens, self.block_size)


def fit_max_model_len(requested: int | None, max_position: int, pool_tokens: int) -> int:
    """Return the length of the longest request, prompt and output, that model and KV pool can hold, in tokens.

    `requested` None stands for the longest possible. Raises `ConfigError` when the model (`max_position`) or the KV pool
    (`pool_tokens`) cannot hold `requested` tokens.
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
