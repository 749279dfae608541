"""The report of a worker about its start: how far it has loaded, and then the use of its memory and the size of its KV pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve.config import MIB

log = logging.getLogger(__name__)

SAY_S: Final = 5.0
"""The seconds between two lines of the log. A start that takes less is not worth a line."""
_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class LoadState:
    """One moment of a start. `done` and `total` are bytes; `total` is 1 where nobody knows how many there are."""

    what: str
    done: int
    total: int
    bytes_per_s: float

    def __str__(self) -> str:
        if self.total <= 1:
            return self.what
        return f"{self.what}: {self.done / _GB:.2f} of {self.total / _GB:.2f} GB, {self.bytes_per_s / _GB:.2f} GB/s"


class LoadProgress:
    """A `Progress` of the checkpoint that remembers the last moment, and writes one line to the log now and then."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s` is a monotonic clock."""
        self._now_s = now_s
        self._began_s = self._said_s = 0.0
        self.state: LoadState | None = None
        """The last moment; None before the first one. Any thread may read it."""

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = self._now_s()
        if self.state is None or self.state.what != what:
            self._began_s = self._said_s = now_s
        passed_s = now_s - self._began_s
        self.state = LoadState(what, done, total, done / passed_s if passed_s > 0 else 0.0)
        if now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            log.info("%s", self.state)


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
