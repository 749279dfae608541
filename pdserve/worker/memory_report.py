"""What a worker's memory goes to, and what its KV pool holds, as printed at its start."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import MIB


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes. `step_bytes`: what the largest step takes beside weights and KV. `rest_bytes`: resident beyond these three,
    mostly torch, NIXL and Python; on a GPU all that is resident, since the others are the device's.
    """

    weights_bytes: int = 0
    step_bytes: int = 0
    kv_bytes: int = 0
    rest_bytes: int = 0
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def longest_requests(self) -> float:
        """How many requests of the greatest length fit the pool at a time."""
        return self.kv_tokens / self.max_model_len if self.max_model_len else 0.0

    def pool(self) -> str:
        """The KV pool in words."""
        return (
            f"KV pool {_mib(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} = {self.kv_tokens:,} tokens, "
            f"{self.longest_requests:,.1f} requests of {self.max_model_len:,} tokens"
        )

    def __str__(self) -> str:
        parts = (("weights", self.weights_bytes), ("largest step", self.step_bytes), ("rest", self.rest_bytes))
        return f"{', '.join(f'{name} {_mib(size)}' for name, size in parts)}; {self.pool()}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
