"""Requests of public traces, and the tokens that stand for their prompts.

A trace names blocks of 512 prompt tokens by numbers; equal numbers mean equal tokens. Block n becomes 512 times the token id n,
so that production code hashes equal blocks alike and different blocks differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

from pdserve.core.block_hash import block_hashes, chain_salt, key_of
from pdserve_bench.workload import traces
from pdserve_bench.workload.traces import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `arrived_s` counts from the first request."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """The number of each block of `BLOCK_TOKENS` prompt tokens. The last block may not be full."""
    slo_class: str = "default"
    session_id: str = ""
    priority: int = 0

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The token ids of the prompt."""
        return tuple(chain.from_iterable(map(_block, self.blocks)))[: self.prompt_tokens]

    def prefix_keys(self, block_size: int, model_salt: bytes) -> tuple[int, ...]:
        """Return the keys of the prompt's full blocks, as the router's admission computes them."""
        return _keys(self.blocks, self.prompt_tokens, block_size, model_salt)


@lru_cache(maxsize=1 << 15)
def _keys(blocks: tuple[int, ...], prompt_tokens: int, block_size: int, model_salt: bytes) -> tuple[int, ...]:
    """Return the keys of a prompt. They are kept, since each policy places the same requests."""
    ids = tuple(chain.from_iterable(map(_block, blocks)))[:prompt_tokens]
    return tuple([key_of(one) for one in block_hashes(ids, block_size, salt=chain_salt(model_salt, ""))])


@lru_cache(maxsize=1 << 14)
def _block(number: int) -> tuple[int, ...]:
    return (number,) * BLOCK_TOKENS


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace: Mooncake's format if the name ends with "jsonl", else Azure's."""
    return read_mooncake(path) if path.suffix == ".jsonl" else read_azure(path)


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Read a trace of Mooncake. Raises `ConfigError` for a malformed line.

    The trace names no conversations. The second block of a request identifies its conversation: the first block is the same for
    nearly all.
    """
    return [
        TraceRequest(
            row.arrived_s,
            row.prompt_tokens,
            row.output_tokens,
            row.blocks,
            session_id=str(row.blocks[1]) if len(row.blocks) > 1 else "",
        )
        for row in traces.read_mooncake(path).rows
    ]


def read_azure(path: Path) -> list[TraceRequest]:
    """Read a trace of Azure. It does not say which prompts begin alike, so no two prompts begin alike here. Raises
    `ConfigError`."""
    requests: list[TraceRequest] = []
    used = 0
    for row in traces.read_azure(path).rows:
        count = -(-row.prompt_tokens // BLOCK_TOKENS)
        requests.append(TraceRequest(row.arrived_s, row.prompt_tokens, row.output_tokens, tuple(range(used, used + count))))
        used += count
    return requests


def faster(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the requests with all arrivals `factor` times as fast after each other."""
    return [replace(request, arrived_s=request.arrived_s / factor) for request in requests]


def oracle_tokens(requests: Sequence[TraceRequest], block_size: int = BLOCK_TOKENS) -> int:
    """Return how many prompt tokens must be computed if one cache without a limit held every earlier prompt.

    Only full blocks are shared, and the last token of a prompt is always computed, as in production. `block_size` divides
    `BLOCK_TOKENS`.
    """
    assert BLOCK_TOKENS % block_size == 0
    seen: dict[tuple[int, int], int] = {}
    full: set[tuple[int, int]] = set()
    computed = 0
    for request in requests:
        parent, hits, found = 0, 0, True
        for position, number in enumerate(request.blocks):
            node = seen.setdefault((parent, number), len(seen) + 1)
            for part in range(BLOCK_TOKENS // block_size):
                end = position * BLOCK_TOKENS + (part + 1) * block_size
                if end > request.prompt_tokens:
                    break
                found = found and (node, part) in full and end < request.prompt_tokens
                hits += block_size * found
                full.add((node, part))
            parent = node
        computed += request.prompt_tokens - hits
    return computed
