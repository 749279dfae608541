"""Norm, SiLU and rotary embedding against float64 and against what the CPU engine computes."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, NAN, make_pool

from pdserve.engine.kernels.activation import silu_and_mul
from pdserve.engine.kernels.norm import add_rms_norm, rms_norm
from pdserve.engine.kernels.rope import rotate_and_write
from pdserve.engine.kv.paged import KvFormat
from pdserve.engine.layers import elementwise
from pdserve.engine.layers.rope import rotate

STEP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # of a number near 1, twice rounded
DTYPES = list(STEP)


@pytest.fixture(autouse=True)
def _poison_new_tensors(monkeypatch):
    """Whatever a kernel does not write is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: empty(shape, **kind).fill_(0x7F if "uint8" in str(kind) else NAN))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, NAN))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 4) -> bool:
    expected = expected.double()
    return bool(((found.double() - expected).abs() <= factor * STEP[dtype] * expected.abs().clamp(min=0.1)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 576, 1000])
def test_norm_equals_the_definition(dtype, hidden):
    x, weight = random(3, hidden, dtype=dtype), random(hidden, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    assert close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_added_and_normed_equals_the_two_apart(dtype):
    x, branch = random(3, 96, dtype=dtype), random(3, 96, dtype=dtype, seed=1)
    weight = random(96, dtype=dtype, seed=2)
    summed, normed = add_rms_norm(x, branch, weight, 1e-5)
    assert close(summed, x.double() + branch.double(), dtype)
    assert close(normed, elementwise.rms_norm(summed, weight, 1e-5), dtype)


def test_no_rows_are_no_launch():
    empty = random(0, 96, dtype=torch.float32)
    assert rms_norm(empty, random(96, dtype=torch.float32), 1e-5).shape == (0, 96)
    assert silu_and_mul(empty).shape == (0, 48)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 1500])
def test_silu_equals_the_definition(dtype, width):
    gate_up = random(3, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    found = silu_and_mul(gate_up)
    assert found.shape == (3, width)
    assert close(found, gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("group", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (16, torch.float16)])
def test_rotated_queries_and_written_kv_equal_the_engines(dim, group, dtype):
    """Two tokens of one block, one of another, and one that is written nowhere."""
    kv_heads, size = 2, 16
    pool = make_pool([], 3, heads=kv_heads, dim=dim, block_size=size, dtype=dtype)
    where = [(2, 0), (2, 1), (0, 15), None]
    projected = random(4, (group + 2) * kv_heads * dim, dtype=dtype)
    table_rows = random(4, 2, dim, dtype=torch.float32, seed=1)
    table_rows[:, 0, dim // 2 :] = table_rows[:, 0, : dim // 2]
    table_rows[:, 1, : dim // 2] = -table_rows[:, 1, dim // 2 :]
    rows_a_block = pool.kv.data[0].numel() // dim
    slots = torch.tensor([-1 if at is None else at[0] * rows_a_block + at[1] for at in where], device=DEVICE)

    queries = rotate_and_write(projected, table_rows, pool.kv, pool.kv.layer(1), slots)

    heads = projected.view(4, -1, dim)
    rotated = rotate(heads[:, : (group + 1) * kv_heads], table_rows)
    assert close(queries, rotated[:, : group * kv_heads], dtype)
    written = torch.zeros(pool.kv.data.shape[:5], dtype=torch.bool)
    for token, at in enumerate(where):
        if at is not None:
            found = pool.kv.data[at[0], 1, :, :, at[1]]
            assert close(found[0], rotated[token, group * kv_heads :], dtype)
            assert torch.equal(found[1], heads[token, (group + 1) * kv_heads :])
            written[at[0], 1, :, :, at[1]] = True
    assert pool.kv.data.cpu()[~written].isnan().all(), "a slot that is nobody's was written"


def test_a_quantised_pool_gets_its_keys_rotated_in_place():
    pool = make_pool([], 1, heads=1, dim=64, block_size=16, kind=KvFormat.INT8)
    before = pool.kv.data.clone()
    projected = random(1, 4 * 64, dtype=torch.bfloat16)
    original = projected.clone().view(1, 4, 64)
    table_rows = torch.cat((torch.zeros(1, 1, 64), torch.tensor([-1.0, 1.0]).repeat_interleave(32).view(1, 1, 64)), 1).to(
        DEVICE
    )
    queries = rotate_and_write(
        projected, table_rows, pool.kv, pool.kv.layer(0), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    )
    turned = rotate(original, table_rows)
    assert torch.equal(queries, turned[:, :2])
    assert torch.equal(projected.view(1, 4, 64)[:, 2], turned[:, 2])
    assert torch.equal(projected.view(1, 4, 64)[:, 3], original[:, 3])
    assert torch.equal(pool.kv.data, before)
