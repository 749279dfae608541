"""Staging blocks of a worker: what is converted into its pool, and that nothing else there is touched."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from kvtransfer.staging import STAGING_BLOCKS
from pdserve.checkpoint.card import KV_DTYPES
from pdserve.core.kv_layout import KvSpec, gqa_group
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.kv.pool import KvPool
from pdserve.worker.kv_memory import WorkerKv, most_staged_bytes

LAYOUT = gqa_group(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype="bfloat16")
STAGED, LOCAL = (5, 0, 2), (7, 1, 3)


def worker_pool(dtype: str) -> KvPool:
    """Ten blocks of ones."""
    layout = replace(LAYOUT, dtype=dtype)
    pool = KvPool(KvSpec((layout,)), 10 * layout.block_bytes, torch.device("cpu"), torch.float32)
    pool.caches[0].blocks.fill_(1)
    return pool


@pytest.mark.parametrize(("theirs", "ours"), list(permutations(["float32", "bfloat16", "fp8_e4m3", "int8", "int4"], 2)))
@pytest.mark.parametrize("tokens", [12, 9])
def test_blocks_come_out_as_the_converter_makes_them_all_at_once(theirs: str, ours: str, tokens: int) -> None:
    pool, source = worker_pool(ours), replace(LAYOUT, dtype=theirs)
    kv, staging = pool.caches[0], WorkerKv(pool).stage(source, 6)
    staged = staging.kv._own._staged[0].blocks
    plain = torch.randn(6, LAYOUT.data_bytes // 2, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint8)
    staged.copy_(convert_blocks(plain, LAYOUT, source, 24))
    staging.convert(STAGED, LOCAL, tokens)
    expected = torch.ones_like(kv.blocks)
    expected[list(LOCAL)] = convert_blocks(staged[list(STAGED)], source, kv.layout, tokens)
    assert torch.equal(kv.blocks, expected)


def test_the_transport_sees_blocks_of_the_peers_size() -> None:
    staging = WorkerKv(worker_pool("int8")).stage(LAYOUT, 6)
    assert staging.region.block_bytes == LAYOUT.block_bytes
    assert staging.region.num_blocks == 6
    ((_, memory),) = staging.region.parts
    assert memory.address_of(1) == staging.kv._own._staged[0].blocks[1].data_ptr()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_what_is_set_aside_at_the_start_holds_lanes_for_every_other_dtype(dtype):
    """The check at the start must not be met by less than what peers of all dtypes make a worker take."""
    layout = gqa_group(30, 3, 64, 16, dtype)
    lanes = [replace(layout, dtype=other) for other in KV_DTYPES.values() if other != dtype]
    taken = sum(STAGING_BLOCKS * lane.block_bytes for lane in lanes)
    assert 0.98 * taken < most_staged_bytes(layout) <= taken


def test_another_life_stages_in_the_same_blocks() -> None:
    """Else each flip would take the memory of all foreign layouts once more."""
    kv = WorkerKv(worker_pool("int8"))
    first, other = kv.stage(LAYOUT, 6), kv.stage(replace(LAYOUT, dtype="float32"), 6)
    assert kv.stage(LAYOUT, 6) is first
    assert other.region.parts[0][1].address != first.region.parts[0][1].address
