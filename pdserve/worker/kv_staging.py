"""Staging blocks in torch: they hold KV as a peer stores it, and convert it to blocks of this worker's pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtransfer.api import Region
from kvtransfer.staging.staging import STAGING_BLOCKS
from pdserve.checkpoint.card import KV_DTYPES
from pdserve.core.ids import BlockSum
from pdserve.core.kv_layout import DTYPE_BITS, KvGroup
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.convert import convert_blocks
from pdserve.worker.host import device_of


def most_staged_bytes(layout: KvGroup) -> int:
    """Return the bytes that staging takes in a worker with such a pool once peers of all other dtypes have come. Scales, which
    are a hundredth of the bytes, are left out."""
    numbers = layout.data_bytes * 8 // DTYPE_BITS[layout.dtype]
    bits = sum(DTYPE_BITS[dtype] for dtype in KV_DTYPES.values() if dtype != layout.dtype)
    return STAGING_BLOCKS * numbers * bits // 8


class StagedKv:
    """Staging blocks of a peer's layout, on the device of our pool. See `kvtransfer.staging.staging.StagingBlocks`."""

    def __init__(self, layout: KvGroup, num_blocks: int, kv: KvCache) -> None:
        device = kv.device
        self._source, self._target = layout, kv.layout
        self._staged = torch.empty(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self._sums = BlockSums(self._staged, beside=True)
        self._pool = kv.blocks
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # One block fits a CPU's cache, so the conversion of one block after the other is up to 5 times as fast (bf16 to int8).
        self._step = 1 if self._stream is None else num_blocks

    def sums(self, staged: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return the checksums of these staging blocks, in order. Runs in the converter thread."""
        return self._sums(staged)

    @property
    def region(self) -> Region:
        """The region of the staging blocks."""
        staged = self._staged
        return Region(staged.data_ptr(), len(staged), self._source.block_bytes, device_of(staged))

    def convert(self, staged: Sequence[int], local: Sequence[int], tokens: int) -> None:
        """Convert staging blocks into the `local` blocks of the pool, and write no others. Return when all are written.

        The blocks hold `tokens` tokens; all are full except the last. Runs in the converter thread.
        """
        with torch.inference_mode(), torch.cuda.stream(self._stream):  # a stream of None changes nothing
            for first in range(0, len(staged), self._step):
                blocks = slice(first, first + self._step)
                self._convert(list(staged[blocks]), list(local[blocks]), tokens - first * self._source.block_size)
        if self._stream is not None:
            self._stream.synchronize()

    def _convert(self, staged: list[int], local: list[int], tokens: int) -> None:
        """Convert these blocks at once. `tokens` counts from the first of them on, and may go past the last."""
        tokens = min(tokens, len(staged) * self._source.block_size)
        self._pool[local] = convert_blocks(self._staged[staged], self._source, self._target, tokens)
