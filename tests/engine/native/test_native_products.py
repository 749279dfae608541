"""Products of compiled code, each set's: rows in any company, sums of parts, and the numbers themselves."""

from __future__ import annotations

import ctypes
from ctypes import c_long, c_void_p
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import NATIVE, build, compiler, harness_sets
from numpy.typing import NDArray

pytestmark = pytest.mark.skipif(not harness_sets(), reason="this CPU lacks AVX2")

HERE = Path(__file__).parent
PLAIN = "avx2 without avx_vnni"
SETS = [*harness_sets(), PLAIN]
SHAPES = [(40, 512), (64, 1024), (96, 192)]  # n, k


def halves(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bfloat16 numbers as their bits: float32, cut off."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def address(array: NDArray[np.generic]) -> c_void_p:
    return c_void_p(array.ctypes.data)


class Products:
    """The products of one set."""

    def __init__(self, path: Path, isa: str) -> None:
        self.isa = isa
        self._library = ctypes.CDLL(str(path))

    def __call__(
        self, x: NDArray[np.uint16], w: NDArray[np.uint16], bits: int = 16, parts: int = 1, first: int = 0
    ) -> NDArray[np.float32]:
        x, w = np.ascontiguousarray(x), np.ascontiguousarray(w)
        found = np.full((len(x), len(w)), np.nan, np.float32)
        sizes = map(c_long, (parts, first, len(x), len(w), x.shape[1]))
        self._library.multiply_rows(self.isa == "amx_emulated", bits, *sizes, address(x), address(w), address(found))
        return found


@pytest.fixture(scope="session")
def products(tmp_path_factory) -> dict[str, Products]:
    """Those of each set that this CPU can compute, by its name."""
    directory, sources = tmp_path_factory.mktemp("products"), [str(HERE / "products_check.cpp")]
    found = {}
    for isa in SETS:
        own = ["-DPDSERVE_AMX"] if isa.startswith("amx") else ["-DPDSERVE_NO_AVX_VNNI"] if isa == PLAIN else []
        path = directory / f"{isa}.so"
        build(
            compiler("g++"), path, f"-I{NATIVE}", "-O1", *own, isa=isa.split(" ")[0].removesuffix("_emulated"), sources=sources
        )
        found[isa] = Products(path, isa)
    return found


def operands(rows: int, n: int, k: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    numbers = np.random.default_rng(rows * n + k)
    return (halves(numbers.normal(size=(count, k)).astype(np.float32)) for count in (rows, n))  # type: ignore[return-value]


def combinations(n: int, k: int) -> list[tuple[int, int]]:
    """The bits and parts that a weight may have."""
    return [(bits, parts) for bits in (16, 8, 4) for parts in (1, 2, 4, 8) if k % (64 * parts) == 0]


@pytest.mark.parametrize("isa", SETS)
@given(rows=st.integers(1, 80), first=st.integers(0, 79), shape=st.sampled_from([*SHAPES, (50, 176)]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_company(isa, products, rows, first, shape, data):
    bits, parts = data.draw(st.sampled_from(combinations(*shape) if shape[1] % 64 == 0 else [(16, 1)]))
    x, w = operands(80, *shape)
    first %= rows
    whole = products[isa](x, w, bits, parts)
    assert np.array_equal(products[isa](x[:rows], w, bits, parts, first)[first:], whole[first:rows])


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_are_the_products_of_slices_added_as_a_tree(isa, bits, parts, products):
    """A rank that holds some neighbouring parts adds them up as a single rank does. An integer column has one scale."""
    x, w = operands(37, 40, 1024)
    multiply, width = products[isa], 1024 // parts
    sums = [multiply(x[:, at : at + width], w[:, at : at + width], bits) for at in range(0, 1024, width)]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    assert np.array_equal(multiply(x, w, bits, parts), sums[0])
    assert not np.array_equal(multiply(x, w, bits), sums[0])


def chains(x: NDArray[np.float32], w: NDArray[np.float32], depth: int) -> NDArray[np.float32]:
    """What tiles compute: for `depth` words at a time, even and odd products in two chains. float64 holds each step exactly."""
    total = np.zeros((len(x), len(w)), np.float32)
    for begin in range(0, x.shape[1], 2 * depth):
        chain = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(begin, min(begin + 2 * depth, x.shape[1])):
            exact = np.outer(x[:, k].astype(np.float64), w[:, k].astype(np.float64)) + chain[k % 2]
            chain[k % 2] = exact.astype(np.float32)
        total = total + (chain[0] + chain[1])
    return total


def test_tiles_add_up_even_and_odd_products_of_32_numbers(products):
    if "amx_emulated" not in products:
        pytest.skip("this CPU lacks avx512_bf16")
    x, w = operands(19, 50, 176)
    assert np.array_equal(products["amx_emulated"](x, w), chains(widened(x), widened(w), 16))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(("bits", "bound"), [(16, 1e-5), (8, 0.05), (4, 0.2)])
def test_products_are_those_of_the_numbers(isa, bits, bound, products):
    """bound: of the error beside the size of what is added up."""
    x, w = operands(37, 40, 1024)
    wide_x, wide_w = widened(x).astype(np.float64), widened(w).astype(np.float64)
    error = np.abs(products[isa](x, w, bits, 4) - wide_x @ wide_w.T)
    assert (error <= bound * np.linalg.norm(wide_x, axis=1)[:, None] * np.linalg.norm(wide_w, axis=1) / np.sqrt(40)).all()


@pytest.mark.parametrize("isa", SETS)
def test_integers_have_the_same_bits_in_every_set(isa, products):
    x, w = operands(37, 40, 1024)
    assert np.array_equal(products[isa](x, w, 8, 4), products["avx2"](x, w, 8, 4))
