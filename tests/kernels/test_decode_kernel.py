"""Decode over a poisoned pool, with any number of splits, against the definition in float64."""

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

from pdserve.engine.kernels.decode import MIN_SPLIT, choose_splits, decode
from pdserve.engine.kernels.shape import KernelShape, grouped
from pdserve.engine.kernels.tiling import Tiling, decode_tiling
from pdserve.engine.kv.paged import KvFormat

TILING = Tiling(rows=16, positions=16, warps=4, stages=1)
PLAIN = KvFormat.PLAIN


def run(
    ends,
    *,
    kv_heads=1,
    group=1,
    dim=64,
    block_size=16,
    window=0,
    kind=PLAIN,
    dtype=torch.float32,
    seed=0,
    splits=1,
    tiling=TILING,
):
    """One token for each of `ends` positions, on every second row of the query. Returns output and definition."""
    tiling = sound(tiling, kind, dtype)
    sequences, written, num_blocks = make_sequences([(end - 1, 1) for end in ends], block_size, window, seed)
    pool = make_pool(written, num_blocks, heads=kv_heads, dim=dim, block_size=block_size, kind=kind, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(2 * len(ends), kv_heads * group, dim, generator=generator).to(dtype).to(DEVICE)
    out = poisoned(*query.shape, dtype=dtype)
    rows = torch.arange(0, 2 * len(ends), 2, dtype=torch.int32, device=DEVICE)
    decode(
        query, out, grouped(pool.kv, kv_heads * group, window), pool.kv.layer(1), tables_tensor(sequences), rows,
        torch.tensor(ends, dtype=torch.int32, device=DEVICE), splits, tiling,
    )  # fmt: skip
    assert out[1::2].isnan().all(), "a row that is not named was written"
    return out[::2], reference_attention(pool.values, 1, query[::2], sequences, window)


def check(ends, *, dtype=torch.float32, **case):
    found, expected = run(ends, dtype=dtype, **case)
    assert (found.double().cpu() - expected).abs().max().item() < tolerance(dtype)


@pytest.mark.quick("80", "256")
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_size_equals_the_definition(dim):
    check([1, 37], dim=dim, group=3, kv_heads=2, splits=2)


@pytest.mark.quick("1", "5", "16")
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16])
def test_every_group_size_equals_the_definition(group):
    check([20], group=group, kv_heads=2)


@pytest.mark.quick("1", "4")
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_any_number_of_splits_equals_the_definition(splits):
    """Up to eight splits of sequences that have one tile and five: some splits are empty, and their sums are not read."""
    check([3, 75, 16, 17], splits=splits, group=2)


def test_empty_splits_leave_poison_where_it_was(monkeypatch):
    """The merge must not read the sums that an empty split did not write."""
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: torch.full(tuple(shape), float("nan"), **kind))
    check([3], splits=8)


def test_nobodys_row_is_zero_and_reads_nothing():
    """Padding of a recorded batch: end 0."""
    for splits in (1, 4):
        pool = make_pool([], 2, heads=1, dim=64, block_size=16)
        query, out = torch.ones(1, 2, 64, device=DEVICE), poisoned(1, 2, 64)
        nobody = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        decode(query, out, grouped(pool.kv, 2), pool.kv.layer(0), nobody.view(1, 1), nobody, nobody, splits, TILING)
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_every_block_size_equals_the_definition(block_size):
    check([block_size, block_size + 1, 2 * block_size - 1], block_size=block_size, splits=2)


@pytest.mark.quick("1-1", "4-16", "1-33", "4-100")
@pytest.mark.parametrize("window", [1, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_window_hides_what_is_older_and_does_not_read_it(window, splits):
    """Tiles of one block, and of several: then blocks that were given away lie in a tile with some that are seen."""
    check([10, 70], window=window, splits=splits, group=2)
    check([10, 70], window=window, splits=splits, group=2, tiling=Tiling(rows=16, positions=64, warps=4, stages=1))


@pytest.mark.quick("20-*")
@pytest.mark.parametrize("kind", [KvFormat.INT8, KvFormat.FP8_E4M3, KvFormat.INT4])
@pytest.mark.parametrize("window", [0, 20])
def test_quantised_numbers_equal_the_definition(kind, window):
    check([40, 5], kind=kind, dim=80, group=2, kv_heads=2, splits=2, window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_its_rounding_only(dtype):
    check([40, 5], dtype=dtype, dim=128, group=4, splits=2)


@pytest.mark.quick("3-128")
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("kind", list(KvFormat))
def test_the_engines_own_tiles_equal_the_definition(kind, dim):
    """More tiles than are on their way at a time, fewer, whole ones and ends of one: compiled, these loops are pipelined."""
    tiling = decode_tiling(KernelShape(8, 2, dim, dim, 16), torch.bfloat16)
    for splits, window in ((2, 0), (1, 150)):
        check(
            [400, 65, 64, 1], kind=kind, dim=dim, group=4, kv_heads=2, dtype=torch.bfloat16, splits=splits, window=window,
            tiling=tiling,
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
    ends = [rng.randrange(1, 100) for _ in range(rng.randrange(1, 5))]
    check(ends, **random_settings(rng, seed), splits=rng.choice([1, 2, 4]))


def test_splits_fill_the_device_and_stay_long_enough():
    assert choose_splits(1, 8, 100, 264) == 1  # too short to cut
    assert choose_splits(1, 8, 8 * MIN_SPLIT, 264) == 8
    assert choose_splits(1, 8, 1 << 20, 264) == 32  # two programs on each of 132 multiprocessors
    assert choose_splits(256, 8, 1 << 20, 264) == 1  # full already
    assert choose_splits(1, 1, 1 << 30, 264) == 128
