"""Staging blocks of a worker: what is converted into its pool, and that nothing else there is touched."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from kvtransfer.staging import STAGING_BLOCKS
from pdserve.checkpoint.card import KV_DTYPES
from pdserve.core.kv_layout import gqa_group
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.convert import convert_blocks
from pdserve.worker.own_engine import StagedKv, most_staged_bytes

LAYOUT = gqa_group(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype="bfloat16")
STAGED, LOCAL = (5, 0, 2), (7, 1, 3)


def worker_pool(dtype: str) -> KvCache:
    """Ten blocks of ones."""
    layout = replace(LAYOUT, dtype=dtype)
    kv = KvCache(layout, 10 * layout.block_bytes, torch.device("cpu"), torch.float32)
    kv.blocks.fill_(1)
    return kv


@pytest.mark.parametrize(("theirs", "ours"), list(permutations(["float32", "bfloat16", "fp8_e4m3", "int8", "int4"], 2)))
@pytest.mark.parametrize("tokens", [12, 9])
def test_blocks_come_out_as_the_converter_makes_them_all_at_once(theirs: str, ours: str, tokens: int) -> None:
    kv, source = worker_pool(ours), replace(LAYOUT, dtype=theirs)
    staging = StagedKv(source, 6, kv)
    plain = torch.randn(6, LAYOUT.data_bytes // 2, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint8)
    staging._staged.copy_(convert_blocks(plain, LAYOUT, source, 24))
    staging.convert(STAGED, LOCAL, tokens)
    expected = torch.ones_like(kv.blocks)
    expected[list(LOCAL)] = convert_blocks(staging._staged[list(STAGED)], source, kv.layout, tokens)
    assert torch.equal(kv.blocks, expected)


def test_the_transport_sees_blocks_of_the_peers_size() -> None:
    kv = worker_pool("int8")
    staging = StagedKv(LAYOUT, 6, kv)
    assert staging.region.block_bytes == LAYOUT.block_bytes
    assert staging.region.num_blocks == 6
    assert staging.region.address_of(1) == staging._staged[1].data_ptr()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_what_is_set_aside_at_the_start_holds_lanes_for_every_other_dtype(dtype):
    """The check at the start must not be met by less than what peers of all dtypes make a worker take."""
    layout = gqa_group(30, 3, 64, 16, dtype)
    lanes = [replace(layout, dtype=other) for other in KV_DTYPES.values() if other != dtype]
    taken = sum(STAGING_BLOCKS * lane.block_bytes for lane in lanes)
    assert 0.98 * taken < most_staged_bytes(layout) <= taken
