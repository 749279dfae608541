"""Tokens into quantised blocks, however they arrive, against what a block may lose."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_cases import DEVICE, LAYERS, make_pool, stored_values

from pdserve.core.kv_layout import gqa_group
from pdserve.engine.kernels.quantise import quantise_write
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.format import from_numbers
from pdserve.engine.kv.paged import KvFormat, quantised_block_bytes, quantised_kv, touched_blocks, touched_tensor
from pdserve.engine.kv.span import Span

KINDS = [KvFormat.INT8, KvFormat.FP8_E4M3, KvFormat.INT4]


def half_step(kind: KvFormat, values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The most that one rounding to nearest may be off, for values of a block whose largest magnitude is `largest`."""
    if kind is KvFormat.FP8_E4M3:  # three bits behind the point: 1/16 of a number, or half the smallest step, 2^-9 of 1
        return torch.maximum(values.abs() / 16, largest / 448 * 2.0**-10)
    return (largest / kind.largest / 2).expand_as(values)


def write(kv, tokens: torch.Tensor, start: int, count: int, table: tuple[int, ...]) -> None:
    """tokens: [2, all tokens, heads, dim], layer 1; writes [start, start + count), from a row further on."""
    part = torch.nn.functional.pad(tokens[:, start : start + count], (0, 0, 0, 0, 2, 1), value=float("nan")).to(DEVICE)
    touched = touched_tensor(touched_blocks(2, start, count, table, kv.block_size)).to(DEVICE)
    quantise_write(kv, kv.layer(1), part[0], part[1], touched)


def stored_tokens(kv, table: tuple[int, ...], count: int) -> torch.Tensor:
    """[2, count, heads, dim] float64 of layer 1."""
    found = stored_values(kv)[list(table), 1]
    return found.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :count]


def largest_so_far(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """For each token, the largest magnitude of its block and head: [2, tokens, heads, 1]."""
    blocks = [part.abs().amax((1, 3), keepdim=True).expand_as(part) for part in tokens.split(block_size, 1)]
    return torch.cat(blocks, 1)[..., :1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "dtype", "block_size"), [(64, torch.float32, 16), (80, torch.bfloat16, 32)])
def test_a_prompt_written_at_once_loses_half_a_step(kind, dim, dtype, block_size):
    tokens = torch.randn(2, block_size + 5, 2, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    pool = make_pool([], 3, heads=2, dim=dim, block_size=block_size, kind=kind)
    write(pool.kv, tokens, 0, tokens.shape[1], (2, 0))
    found = stored_tokens(pool.kv, (2, 0), tokens.shape[1])
    wide = tokens.double()
    allowed = half_step(kind, wide, largest_so_far(wide, block_size)) * 1.001
    assert ((found - wide).abs() <= allowed).all()


@pytest.mark.quick("1-*")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_tokens_in_any_pieces_lose_half_a_step_a_growth_of_the_scale(kind, seed):
    """Older tokens are quantised again when a larger one comes: as often as the running maximum of the pieces grows."""
    rng = random.Random(seed)
    size, count = 16, 21
    tokens = torch.randn(2, count, 1, 64, generator=torch.Generator().manual_seed(seed))
    pool = make_pool([], 2, heads=1, dim=64, block_size=size, kind=kind)
    done, roundings = 0, torch.zeros(2, 2)  # K or V, block
    peak = torch.zeros(2, 2)
    while done < count:
        piece = min(rng.choice([1, 1, 2, 7]), count - done)
        write(pool.kv, tokens, done, piece, (1, 0))
        for block in {done // size, (done + piece - 1) // size}:
            mine = tokens[:, max(done, block * size) : min(done + piece, (block + 1) * size)].abs().amax((1, 2, 3))
            roundings[:, block] += mine > peak[:, block]
            peak[:, block] = torch.maximum(peak[:, block], mine)
        done += piece
    found = stored_tokens(pool.kv, (1, 0), count)
    wide = tokens.double()
    times = torch.cat([roundings[:, i : i + 1].expand(-1, n) for i, n in ((0, size), (1, count - size))], 1)[..., None, None]
    # A value rounded before may lie half a step further out, where the next rounding of fp8 is coarser.
    allowed = half_step(kind, wide, largest_so_far(wide, size)) * times * 1.25
    assert roundings.max() > 1, "nothing was quantised twice"
    assert ((found - wide).abs() <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
def test_older_tokens_keep_their_bits_while_the_scale_stays(kind):
    tokens = torch.randn(2, 9, 2, 64, generator=torch.Generator().manual_seed(3))
    tokens[:, 0] *= 10  # the first token has the largest values of all
    pool = make_pool([], 1, heads=2, dim=64, block_size=16, kind=kind)
    write(pool.kv, tokens, 0, 5, (0,))
    before, scales = pool.kv.data[0, 1, :, :, :5].clone(), pool.kv.scales.clone()
    write(pool.kv, tokens, 5, 4, (0,))
    assert torch.equal(pool.kv.data[0, 1, :, :, :5], before)
    assert torch.equal(pool.kv.scales[0, 1], scales[0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_tokens_layer_and_block_are_written(kind):
    """The pool is poison: NaN scales, and a former owner's numbers behind the tokens."""
    tokens = torch.randn(2, 3, 1, 64, generator=torch.Generator().manual_seed(4))
    pool = make_pool([], 2, heads=1, dim=64, block_size=16, kind=kind)
    before = pool.kv.data.clone()
    write(pool.kv, tokens, 0, 3, (1,))
    same = pool.kv.data == before
    assert same[0].all()
    assert same[:, 0].all()
    assert same[1, 1, :, :, 3:].all()
    assert not same[1, 1, :, :, :3].all()
    assert pool.kv.scales.isnan().sum() == 2 * LAYERS * 2 - 2


@pytest.mark.quick("1.0-*")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1.0, 1e-33])
def test_the_kernel_and_torch_store_the_same(kind, size):
    """Pieces of any length; 1e-33 is too small for a scale. On a GPU a quotient may be off by its last bit."""
    tokens = size * torch.randn(2, 21, 2, 64, generator=torch.Generator().manual_seed(5))
    pool = make_pool([], 2, heads=2, dim=64, block_size=16, kind=kind)
    layout = gqa_group(LAYERS, 2, 64, 16, kind.name.lower())
    torchs = KvCache(layout, 2 * layout.block_bytes, torch.device("cpu"), torch.float32)
    for start, end in ((0, 5), (5, 6), (6, 20), (20, 21)):
        write(pool.kv, tokens, start, end - start, (1, 0))
        torchs.write(1, torchs.slots([Span(0, start, end - start, (1, 0))]), *tokens[:, start:end])
    torch.testing.assert_close(pool.kv.scales[:, 1].cpu(), torchs.scales[:, 1])
    found, expected = (from_numbers(x, layout.dtype) for x in (pool.kv.data[:, 1].cpu(), torchs.tensor[:, 1]))  # -0 is 0
    same = (found == expected)[..., :5, :]  # block 0 has 5 tokens
    assert same.double().mean() > (1.0 if DEVICE.type == "cpu" else 0.99) - 1e-9


def test_rows_that_are_nobodys_write_nothing():
    pool = make_pool([], 1, heads=1, dim=64, block_size=16, kind=KvFormat.INT8)
    before = pool.kv.data.clone()
    nobody = torch.full((2, 4), -1, dtype=torch.int32, device=DEVICE)
    new = torch.ones(2, 1, 64, device=DEVICE)
    quantise_write(pool.kv, pool.kv.layer(1), new, new, nobody)
    assert torch.equal(pool.kv.data, before)
    assert pool.kv.scales.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind):
    pool = make_pool([], 1, heads=1, dim=64, block_size=16, kind=kind)
    write(pool.kv, torch.zeros(2, 2, 1, 64), 0, 2, (0,))
    assert torch.equal(stored_tokens(pool.kv, (0,), 2), torch.zeros(2, 2, 1, 64, dtype=torch.float64))


def test_a_quantised_block_is_one_run_of_bytes():
    """Numbers, then scales; int8 about half of bfloat16's bytes, int4 about a quarter."""
    kind = KvFormat.INT8
    block_bytes = quantised_block_bytes(2, 3, 16, 80, kind)
    assert block_bytes == 2 * 2 * 3 * (16 * 80 + 4)
    assert quantised_block_bytes(2, 3, 16, 80, KvFormat.INT4) == 2 * 2 * 3 * (16 * 40 + 4)
    memory = torch.zeros(2 * block_bytes + 7, dtype=torch.uint8)
    kv = quantised_kv(memory, num_layers=2, num_kv_heads=3, block_size=16, head_dim=80, kind=kind)
    assert kv.data.shape == (2, 2, 2, 3, 16, 80)
    kv.data[1] = 1
    kv.scales[1] = float("nan")
    assert (memory[:block_bytes] == 0).all()
    assert (memory[block_bytes : block_bytes + 2 * 2 * 3 * 16 * 80] == 1).all()
    assert (memory[2 * block_bytes :] == 0).all()
