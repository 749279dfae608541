"""The kernel gives the bits of the readable checksum: of layouts with scales, of ranks' parts, and of bytes of any length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE

from pdserve.core.kv_layout import DTYPE_BITS, KvGroup, KvShare, Unit
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.kernels.block_sums import KernelSums
from pdserve.engine.kv.checksum import Stripes, stripes_of, sums_in_numpy


def assert_sums_as_numpy(block_bytes: int, stripes: Stripes) -> None:
    blocks = torch.randint(0, 256, (5, block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(block_bytes))
    ids = [4, 0, 3]
    sums = KernelSums(blocks.to(DEVICE), stripes)(torch.tensor(ids, device=DEVICE)).cpu().numpy().view(np.uint64)
    assert tuple(sums.tolist()) == sums_in_numpy(blocks[ids].numpy(), stripes) == BlockSums(blocks, stripes)(ids)


@pytest.mark.parametrize("block_bytes", [4, 12, 4096, 4100, 8192 + 8, 3 * 4096 - 4])
def test_the_kernel_sums_bytes_as_numpy_does(block_bytes):
    assert_sums_as_numpy(block_bytes, Stripes.plain(block_bytes))


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_the_kernel_sums_heads_and_scales_as_numpy_does(dtype):
    """V's heads have other sizes than K's, and more than a stripe in float32; a tile of heads is not full."""
    group = KvGroup((0, 1, 5), ((3, 6), (3, 66)), 16, dtype)
    assert_sums_as_numpy(group.block_bytes, stripes_of(group))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_kernel_sums_a_part_of_what_a_rank_has(dtype):
    group = KvGroup((0, 1, 5), ((4, 64), (4, 64)), 16, dtype)
    stored, share = KvShare(0, range(1, 3), range(1, 4)), KvShare(0, range(2, 3), range(1, 3))
    assert_sums_as_numpy(stored.of(group).block_bytes, Stripes.of(share.units(group, stored)))


@pytest.mark.parametrize(("block_bytes", "unit"), [(64, Unit(2, 8, 0)), (64, Unit(4, 6, 0)), (66, Unit(0, 64, 0))])
def test_the_kernel_refuses_what_is_no_whole_number_of_32_bits(block_bytes, unit):
    assert not KernelSums.takes(torch.zeros(2, block_bytes, dtype=torch.uint8), Stripes.of([unit]))
