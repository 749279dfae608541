"""The KV of a worker whose ranks have pools of their own: one answer is made of those of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe

import pytest
import torch

from pdserve.core.kv_layout import KvGroup, KvShare, KvSpec, gqa_group, whole_share
from pdserve.engine.gang.line import RankLine, serve
from pdserve.engine.kv.pool import KvPool
from pdserve.worker.kv_memory import RankKv, WorkerKv

GROUP = gqa_group(num_layers=3, num_kv_heads=3, head_dim=8, block_size=4, dtype="int8")
BLOCKS = 10
SHARES = (KvShare(0, range(3), range(1)), KvShare(1, range(3), range(1, 3)))


def pool(*shares: KvShare) -> KvPool:
    return KvPool(KvSpec((GROUP,)), BLOCKS * GROUP.block_bytes, torch.device("cpu"), torch.float32, shares=shares)


def whole() -> KvPool:
    """Random numbers, with scales that are finite."""
    kv = pool()
    random = torch.Generator().manual_seed(1)
    kv.caches[0].blocks.random_(0, 120, generator=random)
    kv.caches[0].parts[0].scales.uniform_(0.01, 1.0, generator=random)  # type: ignore[union-attr]
    return kv


def cut(blocks: torch.Tensor, group: KvGroup, share: KvShare, part: torch.Tensor) -> None:
    """Fill the part of blocks [n, block_bytes] that a rank stores."""
    for ours, theirs in zip(share.units(group, share), share.units(group, whole_share(group)), strict=True):
        part[:, ours.offset :][:, : ours.nbytes] = blocks[:, theirs.offset :][:, : theirs.nbytes]


@contextmanager
def two_ranks(kv: KvPool) -> Iterator[tuple[WorkerKv, list[RankKv], list[KvPool]]]:
    """Rank 0 and a rank that serves a line in a thread, with the parts of these blocks."""
    pools = [pool(share) for share in SHARES]
    for share, own in zip(SHARES, pools, strict=True):
        cut(kv.caches[0].blocks, GROUP, share, own.caches[0].blocks)
    ours, theirs = Pipe()
    line, other = RankLine(1, ours), RankKv(pools[1])
    thread = threading.Thread(target=serve, args=(theirs, other))
    thread.start()
    try:
        worker = WorkerKv(pools[0], {1: line})
        yield worker, [worker._own, other], pools
    finally:
        line.close()
        thread.join()
        theirs.close()


@pytest.mark.parametrize("most", [3, 4096])
def test_the_checksums_of_parts_are_those_of_whole_blocks_however_many_are_asked_for(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.worker.kv_memory.MOST_ASKED", most)
    kv = whole()
    expected = WorkerKv(kv).sums_of(0, beside=False)(range(7))
    with two_ranks(kv) as (worker, _, pools):
        assert worker.sums_of(0, beside=False)(range(7)) == expected
        assert worker.sums_of(0, beside=True)([]) == ()
        pools[1].caches[0].blocks[4, 5] ^= 1
        changed = worker.sums_of(0, beside=False)(range(7))
    assert [i for i, (was, now) in enumerate(zip(expected, changed, strict=True)) if was != now] == [4]


def test_each_rank_sums_and_converts_its_part_of_staged_blocks() -> None:
    """They come out as in a worker of one process, cut into the parts of the ranks."""
    kv, peer = whole(), replace(GROUP, dtype="float32")
    numbers = torch.randn(4, peer.block_bytes // 4, generator=torch.Generator().manual_seed(2)).view(torch.uint8)
    with two_ranks(kv) as (worker, ranks, pools):
        alone, staged = WorkerKv(kv).stage(peer, 4), worker.stage(peer, 4)
        alone.kv._own._staged[0].blocks.copy_(numbers)
        for share, rank in zip(SHARES, ranks, strict=True):
            cut(numbers, peer, share, rank._staged[0].blocks)
        assert [memory.block_bytes for _, memory in staged.region.parts] == [share.of(peer).block_bytes for share in SHARES]
        assert staged.sums(range(4)) == alone.sums(range(4))
        for one in (alone, staged):
            one.convert((3, 1), (0, 8), 7)
        for share, own in zip(SHARES, pools, strict=True):
            expected = torch.empty_like(own.caches[0].blocks)
            cut(kv.caches[0].blocks, GROUP, share, expected)
            assert torch.equal(own.caches[0].blocks, expected)
