"""The checksum of a block: the same bits from every implementation, and whatever changes by accident changes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.block_sums import BlockSums, load_sums
from pdserve.engine.kv.checksum import STRIPE_WORDS, sums_in_numpy

STRIPE_BYTES = STRIPE_WORDS * 8
sizes = st.one_of(st.integers(1, 300).map(lambda n: 4 * n), st.integers(1, 5).map(lambda n: n * STRIPE_BYTES))
needs_library = pytest.mark.skipif(load_sums() is None, reason="the compiled kernels were not built")


def block_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def sum_of(block: np.ndarray) -> int:
    return BlockSums(torch.from_numpy(block[None].copy()))([0])[0]


@needs_library
@pytest.mark.parametrize("way", [1, 2, 3], ids=["plain", "AVX2", "AVX-512"])
@settings(max_examples=60, deadline=None)
@given(size=sizes, seed=st.integers(0, 9))
def test_compiled_code_of_any_width_sums_as_numpy_does(way: int, size: int, seed: int) -> None:
    blocks = np.stack([block_of(size, seed), block_of(size, seed + 10), np.full(size, 255, np.uint8)])
    ids, sums = np.array([2, 0, 1], np.int64), np.empty(3, np.uint64)
    compiled = load_sums()
    assert compiled is not None
    if not compiled(blocks.ctypes.data, size, ids.ctypes.data, 3, sums.ctypes.data, way):
        pytest.skip("this CPU lacks it")
    assert tuple(sums.tolist()) == sums_in_numpy(blocks[ids])


def test_the_bits_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Two workers of different builds compare them: another formula needs another version of the ticket."""
    assert sums_in_numpy((np.arange(12300) % 251).astype(np.uint8)[None]) == (0x89A76FDEF610908E,)


@settings(max_examples=200, deadline=None)
@given(size=sizes, at=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_every_single_bit_counts(size: int, at: int, bit: int) -> None:
    block = block_of(size)
    before = sum_of(block)
    block[at % size] ^= 1 << bit
    assert sum_of(block) != before


@settings(max_examples=200, deadline=None)
@given(first=st.integers(0, 2047), second=st.integers(0, 2047), bit=st.integers(0, 63), zeros=st.booleans())
def test_the_same_bit_of_two_words_does_not_cancel(first: int, second: int, bit: int, zeros: bool) -> None:
    """A plain sum of products loses the highest bits of two words against each other."""
    words = np.zeros(2048, np.uint64) if zeros else block_of(2048 * 8).view(np.uint64)
    before = sum_of(words.view(np.uint8))
    words[[first, second]] ^= np.uint64(1 << bit)
    if first != second:
        assert sum_of(words.view(np.uint8)) != before


@settings(max_examples=200, deadline=None)
@given(first=st.integers(0, 2047), second=st.integers(0, 2047), length=st.sampled_from([1, 8, 512]))
def test_what_stands_in_another_place_counts(first: int, second: int, length: int) -> None:
    """Words, cache lines and stripes that were swapped."""
    first, second = (index // length * length for index in (first, second))
    words = block_of(2048 * 8).view(np.uint64)
    before = sum_of(words.view(np.uint8))
    kept = words[first : first + length].copy()
    words[first : first + length] = words[second : second + length]
    words[second : second + length] = kept
    assert (sum_of(words.view(np.uint8)) == before) == (first == second)


def test_zeros_of_different_lengths_differ() -> None:
    assert len({sum_of(np.zeros(4 * n, np.uint8)) for n in range(1, 1200)}) == 1199


def test_random_blocks_do_not_collide() -> None:
    blocks = np.random.default_rng(3).integers(0, 4, (20_000, 64), dtype=np.uint8)
    distinct = np.unique(blocks, axis=0)
    assert len(set(BlockSums(torch.from_numpy(distinct))(range(len(distinct))))) == len(distinct)


def test_only_the_blocks_that_are_asked_for_count_and_in_their_order() -> None:
    blocks = torch.from_numpy(np.stack([block_of(4096, seed) for seed in range(5)]))
    sums = BlockSums(blocks)
    assert sums([]) == ()
    assert sums([3, 1]) == (sums([3])[0], sums([1])[0])


@pytest.mark.parametrize("block_ids", [[5], [-1], [0, 7]])
def test_a_block_outside_the_pool_is_our_bug(block_ids: list[int]) -> None:
    with pytest.raises(AssertionError):
        BlockSums(torch.zeros(5, 64, dtype=torch.uint8))(block_ids)
