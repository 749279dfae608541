"""Blocks between formats: each number against a loop in float64, and what a round trip keeps."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.checkpoint.card import KV_DTYPES
from pdserve.config import KV_CACHE_DTYPES
from pdserve.core.kv_layout import DTYPE_BITS, QUANTISED, KvGroup, gqa_group
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.kv.paged import TORCH_DTYPES, KvFormat
from pdserve.engine.models.native_decoder import KV_FORMATS

LAYOUT = gqa_group(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
LARGEST = {"int8": 127, "fp8_e4m3": 448, "int4": 7}
PAIRS = list(product(DTYPE_BITS, DTYPE_BITS))
SMALLEST_NORMAL = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}
HALF_STEP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative, of a normal number."""


def layout_of(dtype: str) -> KvGroup:
    return replace(LAYOUT, dtype=dtype)


def blocks_of(values: Tensor, dtype: str) -> Tensor:
    """values: [n, layers, 2, heads, block_size, head_dim] float32."""
    n = len(values)
    return convert_blocks(values.flatten(1).view(torch.uint8), LAYOUT, layout_of(dtype), n * LAYOUT.block_size)


def number_at(data: bytes, index: int, dtype: str) -> float:
    """The loop's own reading of stored number `index`."""
    if dtype == "float32":
        return struct.unpack_from("<f", data, 4 * index)[0]
    if dtype == "bfloat16":
        return struct.unpack("<f", b"\0\0" + data[2 * index : 2 * index + 2])[0]
    if dtype == "float16":
        return struct.unpack_from("<e", data, 2 * index)[0]
    if dtype == "int8":
        return float(struct.unpack_from("<b", data, index)[0])
    if dtype == "int4":
        return float((data[index // 2] >> 4 * (index % 2) & 15) - 8)
    byte = data[index]
    size = math.ldexp(byte & 7, -9) if byte >> 3 & 15 == 0 else math.ldexp(8 + (byte & 7), (byte >> 3 & 15) - 10)
    return -size if byte >> 7 else size


def heads_of(block: Tensor, dtype: str) -> list[tuple[list[float], float]]:
    """For each layer, K or V, and head: its numbers in float64, and its scale (1 where there is none)."""
    layout, data = layout_of(dtype), bytes(block.tolist())
    count = LAYOUT.block_size * LAYOUT.head_dim
    found = []
    for head in range(LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads):
        scale = struct.unpack_from("<f", data, layout.data_bytes + 4 * head)[0] if layout.quantised else 1.0
        found.append(([number_at(data, head * count + i, dtype) for i in range(count)], scale))
    return found


def check_head(before: list[float], after: list[float], scale: float, dtype: str) -> None:
    """`before`: values in float64. The scale is the largest over the format's, and each number is a nearest one."""
    if dtype not in QUANTISED:
        for value, stored in zip(before, after, strict=True):
            assert abs(stored - value) <= HALF_STEP[dtype] * max(abs(value), SMALLEST_NORMAL[dtype])
        return
    largest = max(abs(value) for value in before)
    assert scale == pytest.approx(largest / LARGEST[dtype], rel=1e-6)
    for value, stored in zip(before, after, strict=True):
        wanted = value / scale if scale else 0.0
        step = 1.0 if dtype != "fp8_e4m3" else 2.0 ** (max(math.floor(math.log2(max(abs(wanted), 2.0**-6))), -6) - 3)
        assert abs(stored - wanted) <= step * 0.5001


def random_values(seed: int, n: int) -> Tensor:
    values = torch.randn(n, 2, 2, 2, 4, 4, generator=torch.Generator().manual_seed(seed))
    sizes = torch.logspace(-2, 2, n * 8).view(n, 2, 2, 2, 1, 1)  # within float16
    return values * sizes


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_number_is_the_nearest_that_the_target_can_say(source: str, target: str) -> None:
    blocks = blocks_of(random_values(1, 3), source)
    converted = convert_blocks(blocks, layout_of(source), layout_of(target), 12)
    assert converted.shape == (3, layout_of(target).block_bytes)
    for before, after in zip(blocks, converted, strict=True):
        for (numbers, scale), (stored, own) in zip(heads_of(before, source), heads_of(after, target), strict=True):
            if source == target:
                assert (numbers, scale) == (stored, own)
            else:
                check_head([scale * number for number in numbers], stored, own, target)


@given(seed=st.integers(0, 1 << 30), tokens=st.integers(1, 12), pair=st.sampled_from(PAIRS), poison=st.integers(0, 255))
def test_what_lies_behind_the_prompt_changes_nothing(seed: int, tokens: int, pair: tuple[str, str], poison: int) -> None:
    """Any byte, so also NaN and infinity where the source has them."""
    source, target = layout_of(pair[0]), layout_of(pair[1])
    n = source.blocks_for(tokens)
    values = random_values(seed, n)
    values[-1, ..., tokens - 4 * (n - 1) :, :] = 0
    clean = blocks_of(values, source.dtype)
    dirty = clean.clone()
    numbers = dirty[-1, : source.data_bytes].view(8, 4, -1)  # heads, tokens, bytes of a token
    numbers[:, tokens - 4 * (n - 1) :] = poison
    if source == target:
        assert torch.equal(convert_blocks(dirty, source, target, tokens), dirty), "a copy"
    else:
        expected = convert_blocks(clean, source, target, tokens)
        assert torch.equal(convert_blocks(dirty, source, target, tokens), expected)


def test_a_pool_full_of_nan_becomes_the_numbers_of_its_prompt() -> None:
    """The worst former owner: every unused byte is 0xFF, NaN in all floating formats."""
    source = blocks_of(random_values(5, 1), "bfloat16")
    source.view(torch.bfloat16).view(8, 4, 4)[:, 1:] = math.nan
    for numbers, scale in heads_of(convert_blocks(source, layout_of("bfloat16"), layout_of("int8"), 1)[0], "int8"):
        assert math.isfinite(scale)
        assert scale > 0
        assert max(map(abs, numbers[:4])) == 127
        assert not any(numbers[4:])


TRIPS = [(q, plain) for q in QUANTISED for plain in TORCH_DTYPES if (q, plain) != ("int8", "bfloat16")]


def round_trip(blocks: Tensor, dtype: str, through: str) -> tuple[Tensor, Tensor]:
    """Numbers and scales that come back."""
    there = convert_blocks(blocks, layout_of(dtype), layout_of(through), 4 * len(blocks))
    back = convert_blocks(there, layout_of(through), layout_of(dtype), 4 * len(blocks))
    return parts(back, dtype)


def parts(blocks: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    size = layout_of(dtype).data_bytes
    return blocks[:, :size], blocks[:, size:].view(torch.float32)


@pytest.mark.parametrize(("quantised", "through"), TRIPS)
def test_quantised_numbers_survive_a_trip_through_a_wider_format(quantised: str, through: str) -> None:
    """All of them: the two roundings, of a value and of the largest, are together less than half a step. The scale comes
    back to within one."""
    blocks = blocks_of(random_values(2, 4), quantised)
    numbers, scales = round_trip(blocks, quantised, through)
    zero = 0x80 if quantised == "fp8_e4m3" else None  # minus zero may lose its sign
    assert torch.equal(_unsigned_zero(numbers, zero), _unsigned_zero(parts(blocks, quantised)[0], zero))
    torch.testing.assert_close(scales, parts(blocks, quantised)[1], rtol=1.01 * HALF_STEP[through] + 1e-6, atol=0)


def test_int8_through_bf16_moves_a_number_by_one_step_at_most() -> None:
    """bf16 has a bit less than the two roundings of a number near 127 take; numbers up to 63 stay."""
    blocks = blocks_of(random_values(2, 64), "int8")
    before = parts(blocks, "int8")[0].view(torch.int8).int()
    after = round_trip(blocks, "int8", "bfloat16")[0].view(torch.int8).int()
    moved = (after - before).abs()
    assert moved.max() == 1, "if none moves, the docstring is too modest"
    assert not moved[before.abs() <= 63].any()


@pytest.mark.parametrize("quantised", QUANTISED)
def test_where_scales_are_powers_of_two_a_trip_through_bf16_changes_no_byte(quantised: str) -> None:
    values = random_values(6, 4)
    largest = values.abs().amax((-1, -2), keepdim=True)
    numbers = values * (LARGEST[quantised] / largest)
    numbers = numbers.to(torch.float8_e4m3fn).float() if quantised == "fp8_e4m3" else numbers.round()
    values = numbers * torch.exp2(largest.log2().floor())
    blocks = blocks_of(values, quantised)
    scales = parts(blocks, quantised)[1]
    assert torch.equal(scales, torch.exp2(scales.log2().round()))
    again, back = round_trip(blocks, quantised, "bfloat16")
    assert torch.equal(back, scales)
    assert torch.equal(again, parts(blocks, quantised)[0])


def _unsigned_zero(numbers: Tensor, zero: int | None) -> Tensor:
    return numbers if zero is None else torch.where(numbers == zero, 0, numbers)


@pytest.mark.parametrize(("narrow", "wide"), [("bfloat16", "float32"), ("float16", "float32")])
def test_widening_loses_no_bit(narrow: str, wide: str) -> None:
    blocks = blocks_of(random_values(3, 4), narrow)
    there = convert_blocks(blocks, layout_of(narrow), layout_of(wide), 16)
    assert torch.equal(convert_blocks(there, layout_of(wide), layout_of(narrow), 16), blocks)


@pytest.mark.parametrize("target", [dtype for dtype in DTYPE_BITS if dtype != "float32"])
def test_the_source_is_left_alone(target: str) -> None:
    blocks = random_values(4, 2).flatten(1).view(torch.uint8)
    before = blocks.clone()
    convert_blocks(blocks, LAYOUT, layout_of(target), 5)
    assert torch.equal(blocks, before)


def test_heads_of_zeros_stay_zeros() -> None:
    zeros = torch.zeros(2, LAYOUT.block_bytes, dtype=torch.uint8)
    for source, target in PAIRS:
        first = convert_blocks(zeros, LAYOUT, layout_of(source), 8)
        second = convert_blocks(first, layout_of(source), layout_of(target), 8)
        assert not convert_blocks(second, layout_of(target), LAYOUT, 8).any(), (source, target)


def test_a_number_of_blocks_that_does_not_fit_the_tokens_is_our_bug() -> None:
    blocks = torch.zeros(2, LAYOUT.block_bytes, dtype=torch.uint8)
    for tokens in (4, 9):
        with pytest.raises(AssertionError):
            convert_blocks(blocks, LAYOUT, layout_of("int8"), tokens)


def test_tables_here_name_every_format() -> None:
    assert {*HALF_STEP, *LARGEST} == {*DTYPE_BITS}
    assert {*HALF_STEP} == {*TORCH_DTYPES} & {*DTYPE_BITS} - {*QUANTISED}


def test_every_dtype_of_kv_has_a_name_in_settings_and_cards_and_a_format_in_compiled_code_and_in_triton() -> None:
    stored = {*KV_DTYPES.values()}
    assert stored == {*DTYPE_BITS} - {"float16"}, "KV is never stored in float16"
    assert {*KV_CACHE_DTYPES} == {*KV_DTYPES, "auto", "fp8"}
    assert {*KV_FORMATS} == stored
    assert {kind.name.lower() for kind in KvFormat if kind is not KvFormat.PLAIN} == {*QUANTISED}


def test_planes_of_different_dimensions_are_converted_each_for_itself():
    """One layer after the other: a latent plane, then a rope plane. Each is what it would be alone."""
    latent = KvGroup((0, 1), ((2, 8), (2, 4)), 4, "float32")
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(3, 2, 2 * 4 * 8 + 2 * 4 * 4, generator=generator)
    tokens = 10
    for dtype in ("bfloat16", "int8", "int4", "float32"):
        stored = convert_blocks(values.flatten(1).view(torch.uint8), latent, replace(latent, dtype=dtype), tokens)
        back = convert_blocks(stored, replace(latent, dtype=dtype), latent, tokens).view(torch.float32).view(3, 2, -1)
        for part, plane in ((slice(0, 64), (2, 8)), (slice(64, 96), (2, 4))):
            alone = KvGroup((0, 1), (plane,), 4, "float32")
            there = convert_blocks(values[..., part].flatten(1).view(torch.uint8), alone, replace(alone, dtype=dtype), tokens)
            expected = convert_blocks(there, replace(alone, dtype=dtype), alone, tokens)
            assert torch.equal(back[..., part].flatten(1), expected.view(torch.float32))
