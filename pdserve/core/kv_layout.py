"""The shape of a KV block, as it lies in memory and travels in a ticket."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One block is contiguous: [num_layers, 2 (K, V), num_kv_heads, block_size, head_dim] of `dtype`.

    A block is one descriptor on the wire: large descriptors move several times faster than small ones.
    SmolLM2-135M in bf16: 30 * 2 * 3 * 16 * 64 * 2 B = 360 KiB for 16 tokens.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_size

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
