"""The memory of several KV groups."""

import pytest
import torch

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvGroup, KvSpec
from pdserve.engine.kv.pool import KvPool

WIDE = KvGroup((0, 2), ((2, 8), (2, 8)), 4, "float32")
NARROW = KvGroup((1,), ((1, 8), (1, 8)), 4, "int8")
SPEC = KvSpec((WIDE, NARROW))
CPU = torch.device("cpu")


def test_every_group_has_the_same_number_of_blocks():
    pool = KvPool(SPEC, 5 * SPEC.block_bytes + SPEC.block_bytes - 1, CPU, torch.float32)
    assert pool.num_blocks == 5
    assert [(cache.layout, cache.num_blocks) for cache in pool.caches] == [(WIDE, 5), (NARROW, 5)]
    assert pool.nbytes == 5 * SPEC.block_bytes
    assert (pool.device, pool.dtype) == (CPU, torch.float32)


def test_memory_for_less_than_a_block_of_each_group_is_refused():
    with pytest.raises(ConfigError, match=f"less than one block of {SPEC.block_bytes} B"):
        KvPool(SPEC, SPEC.block_bytes - 1, CPU)
