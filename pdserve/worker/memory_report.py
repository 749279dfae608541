"""The memory report that a worker prints at its start: the use of its memory, and the size of its KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import MIB


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of one worker. `step_bytes` is the memory that the largest step takes beside weights and KV. `rest_bytes` is
    the resident memory beyond these three, mostly torch, NIXL and Python. On a GPU it is all resident memory of the host, since
    the other three are in the GPU's memory. `max_model_len` counts tokens, and so does
    `held_tokens`: a request holds at most the blocks of so many; 0: it has no such bound.
    """

    weights_bytes: int = 0
    step_bytes: int = 0
    kv_bytes: int = 0
    rest_bytes: int = 0
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    held_tokens: int = 0

    @property
    def kv_tokens(self) -> int:
        """The number of tokens that the KV pool holds."""
        return self.num_blocks * self.block_size

    @property
    def longest_requests(self) -> float:
        """The number of requests of the greatest length that fit the pool at the same time."""
        held = min(self.max_model_len, self.held_tokens or self.max_model_len)
        return self.kv_tokens / held if held else 0.0

    def pool(self) -> str:
        """Describe the KV pool in words."""
        return (
            f"KV pool {_mib(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} = {self.kv_tokens:,} tokens, "
            f"{self.longest_requests:,.1f} requests of {self.max_model_len:,} tokens"
        )

    def __str__(self) -> str:
        parts = (("weights", self.weights_bytes), ("largest step", self.step_bytes), ("rest", self.rest_bytes))
        return f"{', '.join(f'{name} {_mib(size)}' for name, size in parts)}; {self.pool()}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
