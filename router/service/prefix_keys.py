"""The keys of a prompt's full blocks, which name them to the core's index of held prefixes.

They come from the chain of hashes that the workers compute (`core.block_hash`), so they are computed here once, outside of the
core. Most prompts begin as an earlier one did: a memo of chains makes 16 blocks cost one look-up instead of 16 hashes.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from pdserve.core.block_hash import BlockHash, chain_salt, next_hash, root_hash
from pdserve.core.prefix_keys import key_of

MAX_BLOCKS: Final = 2048
"""The most blocks of a prompt that are named. A worker that holds so many is the right one, whatever follows."""
RUN_BLOCKS: Final = 16
"""The blocks of one entry of the memo. Prompts that part within a run share nothing of it: at most 15 hashes more."""
MAX_RUNS: Final = 4096
"""The most entries of the memo: about 8 MB with blocks of 16 tokens."""
AWAY_RUNS: Final = 16
"""The loop may do something else after so many runs, which take 0.3 ms if they are new."""

_Run = tuple[BlockHash, tuple[int, ...]]
"""The hash of the last block, and the keys of all."""


class PromptKeys:
    """Computes the keys of prompts. One loop uses it."""

    def __init__(self, model_name: Callable[[], str], max_runs: int = MAX_RUNS) -> None:
        """`model_name` returns what the workers' salts name their weights by at present: their digest."""
        self._model_name = model_name
        self._max_runs = max_runs
        self._memo: OrderedDict[tuple[BlockHash, bytes], _Run] = OrderedDict()
        self._roots: OrderedDict[tuple[str, str], BlockHash] = OrderedDict()

    async def of(self, prompt_ids: tuple[int, ...], cache_salt: str, block_size: int) -> tuple[int, ...]:
        """Return the keys of the first full blocks of a prompt, at most `MAX_BLOCKS`. Long prompts let the loop do other
        things in between."""
        blocks = min(len(prompt_ids) // block_size, MAX_BLOCKS)
        parent = self._root(cache_salt)
        keys: list[int] = []
        step = RUN_BLOCKS * AWAY_RUNS
        for first in range(0, blocks, step):
            if first:
                await asyncio.sleep(0)
            count = min(step, blocks - first)
            parent = self._extend(keys, parent, prompt_ids[first * block_size : (first + count) * block_size], block_size)
        return tuple(keys)

    def _extend(self, keys: list[int], parent: BlockHash, ids: tuple[int, ...], block_size: int) -> BlockHash:
        packed = struct.pack(f"<{len(ids)}I", *ids)
        block_bytes = 4 * block_size
        memo = self._memo
        for start in range(0, len(packed), RUN_BLOCKS * block_bytes):
            name = parent, packed[start : start + RUN_BLOCKS * block_bytes]
            run = memo.get(name)
            if run is None:
                run = memo[name] = _run(parent, name[1], block_bytes)
                if len(memo) > self._max_runs:
                    memo.popitem(last=False)
            else:
                memo.move_to_end(name)
            parent = run[0]
            keys += run[1]
        return parent

    def _root(self, cache_salt: str) -> BlockHash:
        name = self._model_name(), cache_salt
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = root_hash(chain_salt(name[0].encode(), cache_salt))
            if len(self._roots) > self._max_runs:
                self._roots.popitem(last=False)
        return root


def _run(parent: BlockHash, content: bytes, block_bytes: int) -> _Run:
    """Return the run of the blocks that follow `parent`, of which `content` has the tokens."""
    keys = []
    for start in range(0, len(content), block_bytes):
        parent = next_hash(parent, content[start : start + block_bytes])
        keys.append(key_of(parent))
    return parent, tuple(keys)
