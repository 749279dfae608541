"""Norm, SiLU and rotary embedding against float64 and against what the CPU engine computes."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, NAN, make_pool

from pdserve.engine.kernels.activation import gelu_and_mul, silu_and_mul
from pdserve.engine.kernels.norm import add_rms_norm, rms_norm
from pdserve.engine.kernels.rope import rotate_and_write
from pdserve.engine.kv.paged import KvFormat, LayerKv, plain_kv
from pdserve.engine.layers import elementwise
from pdserve.engine.layers.rope import rotate
from pdserve.engine.norms import HeadNorms, Norm

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_is_added_to_the_weight_and_only_the_result_is_rounded(dtype):
    x, weight = random(3, 96, dtype=dtype), random(96, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1)
    assert close(rms_norm(x, weight, 1e-5, 1.0), expected, dtype)
    factor = 1 if DEVICE.type == "cpu" else 2  # a GPU sums in another order, and its reciprocal root may be off by its last bit
    assert close(rms_norm(x, weight, 1e-5, 1.0), elementwise.rms_norm(x, weight, 1e-5, 1.0), dtype, factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_branch_is_normed_before_it_is_added(dtype, offset):
    x, branch = random(3, 100, dtype=dtype), random(3, 100, dtype=dtype, seed=1) * 7
    weight, post = random(100, dtype=dtype, seed=2), Norm(random(100, dtype=dtype, seed=3), 1e-3, offset)
    summed, normed = add_rms_norm(x, branch, weight, 1e-5, 1.0, post)
    assert (summed.double() - x.double() - elementwise.rms_norm(branch.double(), *post)).abs().max() < 16 * STEP[dtype]
    assert close(normed, elementwise.rms_norm(summed, weight, 1e-5, 1.0), dtype)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_equals_the_definition(dtype):
    """The largest gates are past the ends of the tangent hyperbolic."""
    gate_up = random(3, 16, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, -1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert close(gelu_and_mul(gate_up), expected, dtype, factor=16)


@pytest.mark.quick("1-dtype0-64", "3-dtype1-80", "16-dtype2-256")
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

    heads = projected.clone().view(4, -1, dim)

    queries = rotate_and_write(projected, table_rows, pool.kv, pool.kv.layer(1), slots)

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


def rotations(tokens: int, dim: int) -> torch.Tensor:
    """Rows of a table of rotations, [tokens, 2, dim]."""
    angles = random(tokens, dim // 2, dtype=torch.float32, seed=9) * 3
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


@pytest.mark.parametrize("kind", [KvFormat.PLAIN, KvFormat.INT8])
@pytest.mark.parametrize(("turned", "offset"), [(64, 0.0), (64, 1.0), (24, 0.0), (48, None)])
def test_heads_are_normed_and_a_part_of_them_is_rotated(turned, offset, kind):
    """In a quantised pool the keys change in place; values never change. An offset of None stands for no norms."""
    dim, group, kv_heads, dtype = 64, 3, 2, torch.float32
    pool = make_pool([], 2, heads=kv_heads, dim=dim, block_size=16, kind=kind, dtype=dtype)
    projected, table_rows = random(2, (group + 2) * kv_heads * dim, dtype=dtype), rotations(2, turned)
    slots = torch.tensor([1, pool.kv.data[0].numel() // dim + 3], device=DEVICE)
    norms = None
    heads = projected.clone().view(2, -1, dim)
    normed = heads.clone()
    if offset is not None:
        norms = HeadNorms(*(Norm(random(dim, dtype=dtype, seed=seed), 1e-3, offset) for seed in (1, 2)))
        for part, norm in zip((slice(0, 6), slice(6, 8)), norms, strict=True):
            normed[:, part] = elementwise.rms_norm(heads[:, part], *norm)
    expected = rotate(normed, table_rows)

    queries = rotate_and_write(projected, table_rows, pool.kv, pool.kv.layer(0), slots, norms)

    assert close(queries, expected[:, :6], dtype, factor=16)
    if kind is KvFormat.PLAIN:
        for token, (block, at) in enumerate([(0, 1), (1, 3)]):
            found = pool.kv.data[block, 0, :, :, at]
            assert close(found[0], expected[token, 6:8], dtype, factor=16)
            assert torch.equal(found[1], heads[token, 8:])
    else:
        assert close(projected.view(2, -1, dim)[:, 6:8], expected[:, 6:8], dtype, factor=16)
        assert torch.equal(projected.view(2, -1, dim)[:, 8:], heads[:, 8:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_numbers_of_latent_heads_are_rotated_and_the_rest_stays(dtype):
    """A pool of one plane: the key is stored whole, and there is no value behind it."""
    rank, turned, heads = 40, 8, 5
    dim = rank + turned
    data = torch.full((2, 1, 1, 1, 16, dim), NAN, dtype=dtype, device=DEVICE)
    kv, plane = plain_kv(data), data[:, 0, 0]
    layer = LayerKv(plane, plane, plane, plane, data.stride(0), data.stride(3), 0)
    projected, table_rows = random(3, (heads + 1) * dim, dtype=dtype), rotations(3, turned)
    before = projected.clone().view(3, -1, dim)
    expected = torch.cat((before[..., :rank], rotate(before[..., rank:], table_rows)), -1)

    queries = rotate_and_write(projected, table_rows, kv, layer, torch.tensor([16, -1, 2], device=DEVICE))

    assert close(queries, expected[:, :heads], dtype)
    assert torch.equal(queries[..., :rank], before[:, :heads, :rank])
    stored = kv.data.view(-1, dim)
    assert close(stored[[16, 2]], expected[[0, 2], heads], dtype)
    assert stored.isnan().all(1).sum() == 30
