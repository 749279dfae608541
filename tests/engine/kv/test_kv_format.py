"""The numbers of quantised KV, each against the definition in float64."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.core.kv_layout import QUANTISED
from pdserve.engine.kv.format import LARGEST, dequantise, from_numbers, quantise, stored_dim, to_numbers


def every_number(dtype: str) -> torch.Tensor:
    """All bytes that `dtype` may hold, as one row."""
    if dtype == "int8":
        return torch.tensor([[b for b in range(256) if b != 0x80]], dtype=torch.uint8)
    if dtype == "fp8_e4m3":
        return torch.tensor([[b for b in range(256) if b & 0x7F != 0x7F]], dtype=torch.uint8)
    return torch.tensor([[low | high << 4 for low in range(1, 16) for high in range(1, 16)]], dtype=torch.uint8)


def meaning(byte: int, dtype: str) -> list[float]:
    if dtype == "int8":
        return [float(byte - 256 if byte > 127 else byte)]
    if dtype == "int4":
        return [float((byte & 15) - 8), float((byte >> 4) - 8)]
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return [-size if sign else size]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_number_means_what_the_format_says_and_survives_a_round_trip(dtype):
    numbers = every_number(dtype)
    values = from_numbers(numbers, dtype)
    assert values.tolist() == [[v for byte in numbers[0].tolist() for v in meaning(byte, dtype)]]
    assert torch.equal(values.bfloat16().float(), values), "not exact in bfloat16"
    again = to_numbers(values, torch.tensor(1.0), dtype)
    assert torch.equal(from_numbers(again, dtype), values)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_block_loses_half_a_step_of_its_own_scale(dtype):
    values = torch.randn(5, 2, 3, 16, 64, generator=torch.Generator().manual_seed(0))
    values *= torch.logspace(-3, 3, 5 * 2 * 3).view(5, 2, 3, 1, 1)  # heads differ in size, and each keeps its precision
    numbers, scales = quantise(values, dtype)
    assert numbers.shape == (5, 2, 3, 16, stored_dim(64, dtype))
    assert numbers.dtype is torch.uint8
    largest = values.abs().amax((-1, -2))
    torch.testing.assert_close(scales, largest / LARGEST[dtype])
    lost = (dequantise(numbers, scales, dtype) - values).abs()
    step = scales[..., None, None]
    allowed = torch.maximum(values.abs() / 16, step * 2.0**-10) if dtype == "fp8_e4m3" else step / 2
    assert (lost <= allowed * 1.0001).all()
    assert (lost.amax((-1, -2)) > allowed.amax((-1, -2)) / 4).all(), "finer than the format can be"


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-31])
def test_nothing_and_almost_nothing_is_zero(dtype, size):
    numbers, scales = quantise(torch.full((2, 4, 8), size), dtype)
    assert not scales.any()
    assert not dequantise(numbers, scales, dtype).any()


def test_halves_are_rounded_as_the_kernels_do():
    halves = torch.tensor([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]])
    one = torch.tensor(1.0)
    for dtype in ("int8", "int4"):
        assert from_numbers(to_numbers(halves, one, dtype), dtype).tolist() == [[-2, -1, 0, 1, 2, 3]]
    fp8 = torch.tensor([[17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 448.0]])
    assert from_numbers(to_numbers(fp8, one, "fp8_e4m3"), "fp8_e4m3").tolist() == [[16, 20, 0, 2 * 2.0**-9, 448]]
