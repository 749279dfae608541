"""The memory of a worker's KV as transfers use it: regions, checksums, and staging, over all ranks that have a part of it.

`RankKv` is the part that lies in one process. Rank 0 has one, and so has each other rank of a gang whose ranks have KV pools of
their own, where it serves a line (`pdserve.engine.gang.line`). `WorkerKv` asks them all at once and joins their answers: the
checksum of a block is the sum of those of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvtransfer.api import DeviceKind, KvRegion, Region, TransferDevice
from kvtransfer.staging import STAGING_BLOCKS
from pdserve.checkpoint.card import KV_DTYPES
from pdserve.core.blocks import SumBlocks
from pdserve.core.ids import BlockSum
from pdserve.core.kv_layout import DTYPE_BITS, KvGroup, KvShare
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.gang.line import RankLine, RankLines
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.checksum import Stripes, add_sums
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.kv.pool import KvPool

MOST_ASKED: Final = 4096
"""Rank 0 names so many blocks in a question at most. Question and answer then fit into the buffer of a socket, so that nobody
waits for a rank that does not read."""
Parts = Mapping[int, tuple[KvShare, Region]]
"""The share and the region of each KV group that one process has a part of, by the number of the group."""


class RankKv:
    """The part of the KV that lies in this process, as one rank of a gang or as the only one."""

    def __init__(self, pool: KvPool) -> None:
        """Serve a pool. Its groups are known by their numbers."""
        self._spec = pool.spec
        self._caches = pool.caches
        self._shares = pool.shares
        self._sums: dict[tuple[int, bool], BlockSums] = {}
        self._staged: dict[int, _Staged] = {}

    def parts(self) -> Parts:
        """Return the share and the region of each group."""
        found = enumerate(zip(self._shares, self._caches, strict=True))
        return {group: (share, region_of(kv.blocks)) for group, (share, kv) in found if share is not None}

    def sums(self, group: int, beside: bool, blocks: Sequence[int]) -> tuple[BlockSum, ...]:
        """Return the checksums of this part of blocks. beside: as `BlockSums` takes it."""
        return self.sums_of(group, beside)(blocks)

    def sums_of(self, group: int, beside: bool) -> BlockSums:
        """Return the function that sums this part of blocks."""
        key = group, beside
        if key not in self._sums:
            stripes = self._stripes(group, self._spec.groups[group])
            self._sums[key] = BlockSums(self._caches[group].blocks, stripes, beside=beside)
        return self._sums[key]

    def stage(self, number: int, group: int, layout: KvGroup, count: int) -> Region:
        """Make `count` staging blocks of a peer's layout of a group, as far as this part goes. `number` names them."""
        share = self._shares[group]
        assert share is not None
        own, device = share.of(layout), self._caches[group].device
        blocks = torch.empty(count, own.block_bytes, dtype=torch.uint8, device=device)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        sums = BlockSums(blocks, self._stripes(group, layout), beside=True)
        self._staged[number] = _Staged(own, self._caches[group], blocks, sums, stream)
        return region_of(blocks)

    def staged_sums(self, number: int, staged: Sequence[int]) -> tuple[BlockSum, ...]:
        """Return the checksums of this part of staging blocks."""
        return self._staged[number].sums(staged)

    def convert(self, number: int, staged: Sequence[int], local: Sequence[int], tokens: int) -> None:
        """Convert this part of staging blocks into the `local` blocks of the pool, and write no others.

        The blocks hold `tokens` tokens; all are full except the last. Returns when all are written.
        """
        one = self._staged[number]
        size = one.layout.block_size
        # One block fits a CPU's cache, so the conversion of one block after the other is up to 5 times as fast (bf16 to int8).
        step = 1 if one.stream is None else len(staged)
        with torch.inference_mode(), torch.cuda.stream(one.stream):  # a stream of None changes nothing
            for first in range(0, len(staged), step):
                ours, theirs = list(local[first : first + step]), list(staged[first : first + step])
                left = min(tokens - first * size, len(theirs) * size)
                one.kv.blocks[ours] = convert_blocks(one.blocks[theirs], one.layout, one.kv.layout, left)
        if one.stream is not None:
            one.stream.synchronize()

    def _stripes(self, group: int, layout: KvGroup) -> Stripes:
        share = self._shares[group]
        assert share is not None
        return Stripes.of(share.units(layout, share))


@dataclass(frozen=True, slots=True)
class _Staged:
    """Staging blocks [n, block_bytes] uint8 of the parts of a peer's blocks, which are converted into the blocks of `kv`."""

    layout: KvGroup
    kv: KvCache
    blocks: Tensor
    sums: BlockSums
    stream: torch.cuda.Stream | None


class WorkerKv:
    """The KV of a worker over all of its ranks. Any thread may use it."""

    def __init__(self, pool: KvPool, lines: Mapping[int, RankLine] | None = None) -> None:
        """Join the pool of this process, rank 0, with the parts of the other ranks. lines: those that a `RankKv` serves."""
        lines = lines or {}
        self._own = RankKv(pool)
        self._parts: dict[int, Parts] = {0: self._own.parts()} | {rank: line.call("parts") for rank, line in lines.items()}
        self._lines = RankLines(lines)
        self._groups = pool.spec.groups
        self._staged: dict[tuple[KvGroup, int], StagedKv] = {}

    @property
    def regions(self) -> tuple[KvRegion, ...]:
        """The region of each KV group, which a ticket describes."""
        return tuple(
            KvRegion(of_group, tuple(self._parts[rank][group] for rank in self._ranks(group)))
            for group, of_group in enumerate(self._groups)
        )

    def regions_of(self, rank: int) -> list[Region]:
        """Return the regions of one rank."""
        return [region for _, region in self._parts.get(rank, {}).values()]

    def sums_of(self, group: int, *, beside: bool) -> SumBlocks:
        """Return the function that sums blocks of one group. beside: as `BlockSums` takes it."""
        if self._ranks(group) == [0]:
            return self._own.sums_of(group, beside)

        def sum_blocks(blocks: Sequence[int], /) -> tuple[BlockSum, ...]:
            sums: list[BlockSum] = []
            for first in range(0, len(blocks), MOST_ASKED):
                sums += add_sums(*self.each(group, "sums", group, beside, tuple(blocks[first : first + MOST_ASKED])))
            return tuple(sums)

        return sum_blocks

    def stage(self, layout: KvGroup, num_blocks: int) -> StagedKv:
        """Return staging blocks of a peer's layout in each rank that has a part of the group which holds the same.

        They are made once, and serve each life of the worker: no read of an earlier life goes on in a later one.
        """
        staged = self._staged.get((layout, num_blocks))
        if staged is None:
            group = next(at for at, ours in enumerate(self._groups) if ours.holds_the_same_as(layout))
            number = len(self._staged)
            regions = self.each(group, "stage", number, group, layout, num_blocks)
            shares = [self._parts[rank][group][0] for rank in self._ranks(group)]
            staged = StagedKv(self, group, number, KvRegion(layout, tuple(zip(shares, regions, strict=True))))
            self._staged[layout, num_blocks] = staged
        return staged

    def each(self, group: int, name: str, *args: Any) -> list[Any]:
        """Return what a method of `RankKv` returns in each rank that has a part of a group. All of them work at once."""
        ranks = self._ranks(group)

        def own() -> list[Any]:
            return [getattr(self._own, name)(*args)] if 0 in ranks else []

        mine, theirs = self._lines.ask_each({rank: (name, *args) for rank in ranks if rank}, own)
        return mine + theirs

    def _ranks(self, group: int) -> list[int]:
        return sorted(rank for rank, parts in self._parts.items() if group in parts)


@dataclass(frozen=True, slots=True)
class StagedKv:
    """Staging blocks of a peer's layout of one KV group. See `kvtransfer.staging.StagingBlocks`."""

    kv: WorkerKv
    group: int
    number: int
    region: KvRegion

    def sums(self, staged: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return the checksums of these staging blocks, in order. Runs in the converter thread."""
        return add_sums(*self.kv.each(self.group, "staged_sums", self.number, tuple(staged)))

    def convert(self, staged: Sequence[int], local: Sequence[int], tokens: int) -> None:
        """Convert staging blocks into the `local` blocks of the pool. Runs in the converter thread."""
        self.kv.each(self.group, "convert", self.number, tuple(staged), tuple(local), tokens)


def region_of(blocks: Tensor) -> Region:
    """Return the region of blocks [n, block_bytes] uint8, as a transport registers it."""
    kind: DeviceKind = "cuda" if blocks.device.type == "cuda" else "cpu"
    count, nbytes = blocks.shape
    return Region(blocks.data_ptr(), count, nbytes, TransferDevice(kind, blocks.device.index or 0))


def most_staged_bytes(layout: KvGroup) -> int:
    """Return the bytes that staging takes in a worker with such a pool once peers of all other dtypes have come. Scales, which
    are a hundredth of the bytes, are left out."""
    numbers = layout.data_bytes * 8 // DTYPE_BITS[layout.dtype]
    bits = sum(DTYPE_BITS[dtype] for dtype in KV_DTYPES.values() if dtype != layout.dtype)
    return STAGING_BLOCKS * numbers * bits // 8
