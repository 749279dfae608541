"""Prefill over a poisoned pool against the definition in float64."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_cases import (
    DEVICE,
    make_pool,
    make_sequences,
    poisoned,
    random_settings,
    reference_attention,
    sound,
    tables_tensor,
    tolerance,
)

from pdserve.engine.kernels.prefill import cut, prefill, tile_tokens, tiles_tensor
from pdserve.engine.kernels.shape import KernelShape, grouped
from pdserve.engine.kernels.tiling import Tiling, prefill_tiling
from pdserve.engine.kv.paged import KvFormat

TILING = Tiling(rows=16, positions=16, warps=4, stages=1)
PLAIN = KvFormat.PLAIN


def check(
    lengths, *, kv_heads=1, group=1, dim=64, block_size=16, window=0, kind=PLAIN, dtype=torch.float32, seed=0, tiling=TILING,
):  # fmt: skip
    tiling = sound(tiling, kind, dtype)
    sequences, written, num_blocks = make_sequences(lengths, block_size, window, seed)
    pool = make_pool(written, num_blocks, heads=kv_heads, dim=dim, block_size=block_size, kind=kind, dtype=dtype, seed=seed)
    tokens = sum(count for _, count in lengths)
    generator = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(tokens, kv_heads * group, dim, generator=generator).to(dtype).to(DEVICE)
    out = poisoned(tokens + 1, kv_heads * group, dim, dtype=dtype)
    tiles, row = [], 0
    for i, sequence in enumerate(sequences):
        tiles += cut(row, sequence.start, sequence.count, i, tile_tokens(tiling, group))
        row += sequence.count
    shape = grouped(pool.kv, kv_heads * group, window)
    prefill(query, out, shape, pool.kv.layer(1), tables_tensor(sequences), tiles_tensor(tiles).to(DEVICE), tiling)
    expected = reference_attention(pool.values, 1, query, sequences, window)
    assert (out[:-1].double().cpu() - expected).abs().max().item() < tolerance(dtype)
    assert out[-1].isnan().all(), "a row that no tile names was written"


@pytest.mark.quick("80", "256")
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_size_equals_the_definition(dim):
    check([(0, 9), (21, 3)], dim=dim, group=3, kv_heads=2)


@pytest.mark.quick("1", "5", "16")
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16])
def test_every_group_size_equals_the_definition(group):
    check([(14, 5)], group=group)


@pytest.mark.quick("tiling0-16", "tiling1-32", "tiling2-64")
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("tiling", [TILING, Tiling(32, 64, 4, 1), Tiling(64, 32, 4, 1)])
def test_blocks_and_tiles_of_different_sizes_equal_the_definition(block_size, tiling):
    check([(63, 5), (0, 17)], block_size=block_size, tiling=tiling, group=2)


@pytest.mark.quick("lengths0-16", "lengths1-1", "lengths1-33")
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("lengths", [[(0, 40)], [(50, 20)]])
def test_a_window_hides_what_is_older_and_does_not_read_it(window, lengths):
    """Tiles of one block, and of several: then blocks that were given away lie in a tile with some that are seen."""
    check(lengths, window=window, group=2)
    check(lengths, window=window, group=2, tiling=Tiling(rows=32, positions=64, warps=4, stages=1))


@pytest.mark.quick("80-*")
@pytest.mark.parametrize("kind", [KvFormat.INT8, KvFormat.FP8_E4M3, KvFormat.INT4])
@pytest.mark.parametrize("dim", [64, 80])
def test_quantised_numbers_equal_the_definition(kind, dim):
    check([(20, 9), (0, 3)], kind=kind, dim=dim, group=2, kv_heads=2)


@pytest.mark.parametrize("kind", [KvFormat.INT8, KvFormat.FP8_E4M3, KvFormat.INT4])
def test_quantised_numbers_behind_a_window_are_not_read(kind):
    check([(70, 3)], kind=kind, window=20, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_its_rounding_only(dtype):
    check([(20, 9), (0, 20)], dtype=dtype, group=4, dim=128)


@pytest.mark.quick("3-128")
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("kind", list(KvFormat))
def test_the_engines_own_tiles_equal_the_definition(kind, dim):
    """More tiles than are on their way at a time, fewer, whole ones and ends of one: compiled, these loops are pipelined."""
    tiling = prefill_tiling(KernelShape(8, 2, dim, dim, 16), torch.bfloat16)
    for window in (0, 150):
        check(
            [(400, 40), (0, 9), (64, 2)], kind=kind, dim=dim, group=4, dtype=torch.bfloat16, window=window, tiling=tiling,
        )  # fmt: skip


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(6))
def test_ragged_batches_equal_the_definition(seed):
    check_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 30))
def test_many_ragged_batches_equal_the_definition(seed):
    check_random(seed)


def check_random(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [(rng.choice([0, rng.randrange(60)]), rng.randrange(1, 20)) for _ in range(rng.randrange(1, 4))]
    check(lengths, **random_settings(rng, seed), tiling=Tiling(rng.choice([16, 32]), rng.choice([16, 32]), 4, 1))
