"""Limits that follow the linked workers, where the settings name no number. Pure.

A number that suits four workers refuses the clients of forty. What may wait is a multiple of what the workers can serve. A
floor serves a cluster whose workers have not joined yet, and a ceiling bounds the router's memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from pdserve.config import MIB, RouterConfig
from pdserve.core.worker import Role, WorkerHello

QUEUE_TURNS: Final = 4
"""As many requests may wait as the decode workers run in this many turns: a client waits some times as long as it is served."""
MIN_QUEUED_REQUESTS: Final = 1024
MAX_QUEUED_REQUESTS: Final = 1 << 16  # 20 KiB each besides the prompt: 1.3 GiB
MIN_QUEUED_TOKENS: Final = 1 << 20
MAX_QUEUED_TOKENS: Final = 1 << 24  # 36 bytes each: 0.6 GiB
LONG_PROMPTS: Final = 32
"""So many prompts of the longest length may wait in any case: a limit of tokens that eight of them fill is one of requests."""
KEY_BYTES: Final = 216
"""A key of the index, its mask of up to 60 workers and its one holder (`prefix_index.index`)."""
MIN_INDEX_BYTES: Final = 256 * MIB
MAX_INDEX_BYTES: Final = 2048 * MIB  # 10 million blocks: 200 pools of 49,152
MIN_STREAMS: Final = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that hold now."""

    queued_requests: int
    queued_tokens: int
    index_bytes: int
    streams: int
    """The connections that clients can use at once, if each has one stream: those that run and those that wait."""


class DerivedLimits:
    """The sums over the linked workers, and the limits that follow from them. A number in the settings is the limit, whoever is
    linked."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._slots = self._blocks = self._kv_tokens = 0
        self._lengths: Counter[int] = Counter()
        self._index_bytes = 0

    def join(self, hello: WorkerHello) -> None:
        """Add a worker."""
        self._add(hello, 1)

    def leave(self, hello: WorkerHello) -> None:
        """Take a worker away that was added."""
        self._add(hello, -1)

    def _add(self, hello: WorkerHello, sign: int) -> None:
        self._blocks += sign * hello.num_blocks
        if hello.role is Role.DECODE:
            self._slots += sign * hello.max_num_seqs
            self._kv_tokens += sign * hello.num_blocks * hello.block_size
            self._lengths[hello.max_model_len] += sign
            if not self._lengths[hello.max_model_len]:
                del self._lengths[hello.max_model_len]

    def now(self) -> Limits:
        """Return the limits that hold now. The index never shrinks: when a worker dials again, it would forget what is true,
        and the memory was affordable."""
        config = self._config
        tokens = max(self._kv_tokens, LONG_PROMPTS * max(self._lengths, default=0))
        self._index_bytes = max(self._index_bytes, _within(KEY_BYTES * self._blocks, MIN_INDEX_BYTES, MAX_INDEX_BYTES))
        requests = config.max_queued_requests
        if requests is None:
            requests = _within(QUEUE_TURNS * self._slots, MIN_QUEUED_REQUESTS, MAX_QUEUED_REQUESTS)
        return Limits(
            queued_requests=requests,
            queued_tokens=config.max_queued_tokens or _within(tokens, MIN_QUEUED_TOKENS, MAX_QUEUED_TOKENS),
            index_bytes=self._index_bytes if config.prefix_index_bytes is None else config.prefix_index_bytes,
            streams=max(MIN_STREAMS, self._slots + requests),
        )


def _within(value: int, floor: int, ceiling: int) -> int:
    return max(floor, min(ceiling, value))
