"""Attention other than Llama's, against the definition: softcaps, scales, latent keys, more heads than a tile has rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from kernel_cases import DEVICE, make_pool, make_sequences, poisoned, reference_attention, sound, tables_tensor, tolerance

from pdserve.core.model_spec import AttentionSpec, MlaSpec, NormSpec, RopeSpec
from pdserve.engine.kernels.decode import decode
from pdserve.engine.kernels.prefill import cut, prefill, tile_tokens, tiles_tensor
from pdserve.engine.kernels.shape import KernelShape, shape_of
from pdserve.engine.kernels.tiling import Tiling, decode_tiling, prefill_tiling
from pdserve.engine.kv.paged import KvFormat, LayerKv

TILING = Tiling(rows=16, positions=16, warps=4, stages=1)
PLAIN = KvFormat.PLAIN


def latent_shape(heads: int, rank: int, rope: int, **changed) -> KernelShape:
    return KernelShape(heads, 1, rank + rope, rank, 16, latent=True, **changed)


def difference(
    shape: KernelShape, lengths: list[tuple[int, int]], *, splits: int = 1, tiling: Tiling = TILING,
    dtype: torch.dtype = torch.float32, seed: int = 0, size: float = 1.0,
) -> float:  # fmt: skip
    """The largest difference to the definition. Single tokens go to decode, all others to prefill."""
    sequences, written, num_blocks = make_sequences(lengths, shape.block_size, shape.window, seed)
    pool = make_pool(
        written, num_blocks, heads=shape.kv_heads, dim=shape.qk_dim, block_size=shape.block_size, kind=shape.format,
        dtype=dtype, seed=seed,
    )  # fmt: skip
    layer = pool.kv.layer(1)
    if shape.latent:
        layer = replace(layer, value=layer.key, value_scales=layer.key_scales)
    tokens = sum(count for _, count in lengths)
    query = torch.randn(tokens, shape.heads, shape.qk_dim, generator=torch.Generator().manual_seed(seed + 1)) * size
    query = query.to(dtype).to(DEVICE)
    out = poisoned(tokens + 1, shape.heads, shape.v_dim, dtype=dtype)
    run(shape, layer, query, out, sequences, splits, sound(tiling, shape.format, dtype))
    expected = reference_attention(
        pool.values, 1, query, sequences, shape.window, scale=shape.scale, softcap=shape.softcap,
        latent=shape.v_dim if shape.latent else 0,
    )  # fmt: skip
    assert out[-1].isnan().all(), "a row that nobody names was written"
    return (out[:-1].double().cpu() - expected).abs().max().item()


def run(shape: KernelShape, layer: LayerKv, query, out, sequences, splits: int, tiling: Tiling) -> None:
    tables, row, rows, ends, tiles = tables_tensor(sequences), 0, [], [], []
    for i, sequence in enumerate(sequences):
        if sequence.count == 1:
            rows.append((row, i))
            ends.append(sequence.end)
        else:
            tiles += cut(row, sequence.start, sequence.count, i, tile_tokens(tiling, shape.group))
        row += sequence.count
    if tiles:
        prefill(query, out, shape, layer, tables, tiles_tensor(tiles).to(DEVICE), tiling)
    if rows:
        at, own = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in zip(*rows, strict=True))
        decode(
            query, out, shape, layer, tables[own.long()].contiguous(), at, torch.tensor(ends, dtype=torch.int32, device=DEVICE),
            splits, tiling,
        )  # fmt: skip


MIXED = [(36, 1), (0, 5), (21, 3), (2, 1)]


@pytest.mark.parametrize(
    ("rank", "rope", "splits"), [(24, 8, 4), *(pytest.param(64, 16, splits, marks=pytest.mark.slow) for splits in (1, 4))]
)
def test_latent_keys_are_values_as_well(rank, rope, splits):
    assert difference(latent_shape(5, rank, rope), MIXED, splits=splits) < 2e-5


@pytest.mark.parametrize("heads", [17, pytest.param(48, marks=pytest.mark.slow)])
def test_more_heads_than_rows_are_several_tiles(heads):
    """Some rows of the last tile have no head."""
    assert difference(latent_shape(heads, 32, 16), [(17, 1), (3, 2)], splits=2) < 2e-5


def test_groups_of_more_heads_than_rows_keep_to_their_kv_head():
    shape = KernelShape(40, 2, 32, 32, 16)
    assert difference(shape, [(20, 1), (3, 2)], splits=2) < 2e-5


@pytest.mark.parametrize(
    "kind", [KvFormat.INT4, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (KvFormat.INT8, KvFormat.FP8_E4M3))]
)
def test_quantised_latent_keys_equal_the_definition(kind):
    assert difference(latent_shape(4, 32, 16, format=kind), MIXED, splits=2) < 2e-5


@pytest.mark.parametrize(("window", "size"), [(20, 30.0), pytest.param(0, 1.0, marks=pytest.mark.slow)])
def test_a_softcap_bounds_scaled_scores(window, size):
    """Large queries make scores far beyond the bound, where the tangent is flat."""
    shape = KernelShape(4, 2, 64, 64, 16, window=window, scale=0.2, softcap=5.0)
    assert difference(shape, MIXED, splits=2, size=size) < 2e-5


def test_an_own_scale_replaces_that_of_the_dimensions():
    shape = KernelShape(4, 2, 64, 64, 16, scale=0.3)
    assert difference(shape, [(20, 1), (3, 2)]) < 2e-5


def test_a_value_may_have_other_dimensions_than_its_key():
    """Planes of unequal dimensions lie behind each other in a layer of a block."""
    kv_heads, qk_dim, v_dim, size = 2, 48, 80, 16
    sequences, written, num_blocks = make_sequences(MIXED, size, 0, seed=3)
    keys, values = (
        make_pool(written, num_blocks, heads=kv_heads, dim=dim, block_size=size, seed=dim).values[:, 1, which]
        for which, dim in ((0, qk_dim), (1, v_dim))
    )
    flat = torch.cat([keys.flatten(1), values.flatten(1)], 1).float().to(DEVICE)
    cut_at = kv_heads * size * qk_dim
    layer = LayerKv(flat[:, :cut_at], flat[:, cut_at:], flat, flat, flat.shape[1], size * qk_dim, 0)
    shape = KernelShape(6, kv_heads, qk_dim, v_dim, size)
    query = torch.randn(10, 6, qk_dim, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    out = poisoned(10, 6, v_dim)
    run(shape, layer, query, out, sequences, 2, TILING)
    both = torch.zeros(num_blocks, 1, 2, kv_heads, size, v_dim, dtype=torch.float64)
    both[:, 0, 0, ..., :qk_dim], both[:, 0, 1] = keys, values
    padded = torch.nn.functional.pad(query, (0, v_dim - qk_dim))
    expected = reference_attention(both, 0, padded, sequences, scale=qk_dim**-0.5)
    assert (out.double().cpu() - expected).abs().max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kind", [PLAIN, KvFormat.FP8_E4M3])
def test_the_engines_own_tiles_of_deepseek_equal_the_definition(heads, kind):
    shape = latent_shape(heads, 512, 64, format=kind, scale=0.1)
    dtype = torch.bfloat16
    assert difference(shape, [(70, 1)], splits=2, tiling=decode_tiling(shape, dtype), dtype=dtype) < tolerance(dtype)
    assert difference(shape, [(33, 2)], tiling=prefill_tiling(shape, dtype), dtype=dtype) < tolerance(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_equal_the_definition(seed):
    rng = random.Random(seed)
    latent = rng.random() < 0.5
    rank, rope = rng.choice([16, 24, 40, 64]), rng.choice([2, 8, 16, 24])
    kv_heads = 1 if latent else rng.choice([1, 2])
    shape = KernelShape(
        kv_heads * rng.choice([1, 3, 4, 16, 20]), kv_heads, rank + rope, rank if latent else rank + rope,
        rng.choice([16, 32]), rng.choice(list(KvFormat)), latent, window=rng.choice([0, rng.randrange(1, 50)]),
        scale=rng.choice([None, 0.2]), softcap=rng.choice([None, 3.0]),
    )  # fmt: skip
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    lengths = [(rng.randrange(60), rng.choice([1, 1, rng.randrange(2, 20)])) for _ in range(rng.randrange(1, 4))]
    tiling = Tiling(rng.choice([16, 32]), rng.choice([16, 32]), 4, 1)
    assert difference(shape, lengths, splits=rng.choice([1, 4]), tiling=tiling, dtype=dtype, seed=seed) < tolerance(dtype)


def test_a_spec_gives_the_shape():
    """The factor of latent attention is that of expanded heads, not of the latent vector."""
    mla = MlaSpec(128, 512, 128, 64, 128, RopeSpec(1e4), NormSpec(1e-6))
    found = shape_of(mla, 16, PLAIN)
    assert (found.heads, found.kv_heads, found.qk_dim, found.v_dim, found.latent) == (128, 1, 576, 512, True)
    assert found.scale == pytest.approx(192**-0.5)
    assert shape_of(replace(mla, scale=0.5), 16, PLAIN).scale == 0.5
    gqa = AttentionSpec(8, 2, 64, 32, RopeSpec(1e4), window=7, softcap=50.0, scale=0.1)
    assert shape_of(gqa, 16, PLAIN) == KernelShape(8, 2, 64, 32, 16, window=7, softcap=50.0, scale=0.1)
