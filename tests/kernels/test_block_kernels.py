"""Tokens out of one pool and into another of a different layout."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, LAYERS, make_pool, stored_values

from pdserve.engine.kernels.blocks import gather_tokens, scatter_tokens
from pdserve.engine.kv.paged import KvFormat

KINDS = list(KvFormat)


def tokens_of(values: torch.Tensor, table: tuple[int, ...], tokens: int) -> torch.Tensor:
    """[LAYERS, 2, heads, tokens, dim] of a pool's values, by indexing."""
    return values[list(table)].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :tokens]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "block_size", "tokens"), [(64, 16, 33), (80, 32, 32)])
def test_gathered_tokens_are_the_pools(kind, dim, block_size, tokens):
    table = (3, 1, 0)[: -(-tokens // block_size)]
    written = [(block, min(block_size, tokens - i * block_size)) for i, block in enumerate(table)]
    pool = make_pool(written, 4, heads=2, dim=dim, block_size=block_size, kind=kind)
    found = gather_tokens(pool.kv, torch.tensor(table, dtype=torch.int32, device=DEVICE), tokens, torch.float32)
    expected = tokens_of(pool.values, table, tokens).float()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_becomes_one_of_larger_blocks_bit_for_bit(dtype):
    source = make_pool([(4, 16), (0, 16), (2, 5)], 5, heads=2, dim=80, block_size=16, dtype=dtype)
    target = make_pool([], 3, heads=2, dim=80, block_size=32, dtype=dtype)
    staged = gather_tokens(source.kv, torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE), 37, dtype)
    scatter_tokens(staged, target.kv, (1, 2))
    found = stored_values(target.kv)
    assert torch.equal(tokens_of(found, (1, 2), 37), tokens_of(source.values, (4, 0, 2), 37))
    assert found[0].isnan().all()
    assert found[2, :, :, :, 5:].isnan().all()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_plain_pool_becomes_a_quantised_one(kind):
    source = make_pool([(1, 16), (0, 9)], 2, heads=2, dim=64, block_size=16, dtype=torch.bfloat16)
    target = make_pool([], 1, heads=2, dim=64, block_size=32, kind=kind)
    staged = gather_tokens(source.kv, torch.tensor([1, 0], dtype=torch.int32, device=DEVICE), 25, torch.bfloat16)
    scatter_tokens(staged, target.kv, (0,))
    expected = tokens_of(source.values, (1, 0), 25)
    largest = expected.abs().amax((3, 4), keepdim=True)
    assert ((tokens_of(stored_values(target.kv), (0,), 25) - expected).abs() <= largest / 14 * 1.001).all()
    assert not target.kv.scales.isnan().any()
    assert target.kv.scales.shape == (1, LAYERS, 2, 2)
