"""The kernel gives the bits of the readable checksum, also where a block is no whole number of stripes or of words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE

from pdserve.engine.kernels.block_sums import stripe_sums
from pdserve.engine.kv.checksum import combine, sums_in_numpy


@pytest.mark.parametrize("block_bytes", [4, 12, 4096, 4100, 8192 + 8, 3 * 4096 - 4])
def test_the_kernel_sums_as_numpy_does(block_bytes):
    blocks = torch.randint(0, 256, (5, block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(block_bytes))
    ids = torch.tensor([4, 0, 3])
    stripes = stripe_sums(blocks.to(DEVICE), ids.to(DEVICE)).cpu().numpy().view(np.uint64)
    assert combine(stripes, block_bytes) == sums_in_numpy(blocks[ids].numpy())
