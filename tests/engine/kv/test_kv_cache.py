"""Where KV lies in memory: the contract with transfers and with attention."""

from __future__ import annotations

import mmap

import pytest
import torch

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import gqa_group
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.span import Span

LAYOUT = gqa_group(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
CPU = torch.device("cpu")


def make(blocks: int = 5) -> KvCache:
    return KvCache(LAYOUT, blocks * LAYOUT.block_bytes + 7, CPU)


def test_the_pool_is_zeroed_page_aligned_and_sized_by_whole_blocks():
    kv = make()
    assert kv.num_blocks == 5
    assert kv.nbytes == 5 * LAYOUT.block_bytes
    assert kv.address % mmap.PAGESIZE == 0
    assert not kv.tensor.any()


def test_memory_below_one_block_is_refused_by_name():
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        KvCache(LAYOUT, LAYOUT.block_bytes - 1, CPU)


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 70])
def test_memory_that_no_machine_has_is_refused_by_name(nbytes):
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        KvCache(LAYOUT, nbytes, CPU)


def test_a_block_is_one_run_of_bytes():
    kv = make()
    assert kv.tensor[3].is_contiguous()
    assert kv.tensor[3].data_ptr() == kv.address + 3 * LAYOUT.block_bytes
    assert kv.tensor[3].nbytes == LAYOUT.block_bytes


def test_written_tokens_are_found_at_their_place_and_gathered_in_order():
    kv = make()
    table, tokens = [4, 1, 2], 10
    key, value = torch.randn(2, tokens, 2, 8).unbind(0)
    kv.write(1, kv.slots([Span(0, 0, tokens, tuple(table))]), key, value)
    assert torch.equal(kv.tensor[2, 1, 0, 1, 1], key[9, 1])
    assert torch.equal(kv.tensor[4, 1, 1, 0, 3], value[3, 0])
    assert not kv.tensor[:, 0].any()
    assert not kv.tensor[:, 2].any()
    found_key, found_value = kv.gather(1, kv.gather_rows(torch.tensor([table])), 1)
    assert found_key.shape == (1, 2, 12, 8)
    assert torch.equal(found_key[0, :, :tokens], key.transpose(0, 1))
    assert torch.equal(found_value[0, :, :tokens], value.transpose(0, 1))
