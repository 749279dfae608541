"""The checksum of a block: the same bits from every implementation, and whatever changes by accident changes it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.ids import BlockSum
from pdserve.core.kv_layout import DTYPE_BITS, KvGroup, KvShare, Unit, cover, whole_share
from pdserve.engine.block_sums import BlockSums, load_sums
from pdserve.engine.kv.checksum import STRIPE_BYTES, Stripes, add_sums, stripes_of, sums_in_numpy

sizes = st.one_of(st.integers(1, 300).map(lambda n: 4 * n), st.integers(1, 5).map(lambda n: n * STRIPE_BYTES))
groups = st.builds(
    lambda layers, kv_heads, dims, block_size, dtype: KvGroup(
        layers, tuple((kv_heads, dim) for dim in dims), block_size, dtype
    ),
    layers=st.sampled_from([(0,), (1, 4), (0, 1, 2)]),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    dims=st.lists(st.sampled_from([2, 6, 64, 66]), min_size=1, max_size=2),
    block_size=st.sampled_from([4, 16]),
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
)
GOLDEN_SUM = 0xE76165C10FA82EAD
needs_library = pytest.mark.skipif(load_sums() is None, reason="the compiled kernels were not built")


def block_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def sum_of(block: np.ndarray) -> int:
    return BlockSums(torch.from_numpy(block[None].copy()))([0])[0]


def python_sum(block: np.ndarray, units: Iterable[Unit]) -> int:
    """The definition, word by word, in Python's integers."""

    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    golden, total = 0x9E3779B97F4A7C15, 0
    for offset, nbytes, place in units:
        unit = block[offset : offset + nbytes].tobytes()
        for number in range(-(-nbytes // 4096)):
            stripe, found = unit[number * 4096 : (number + 1) * 4096], 0
            for i in range(-(-len(stripe) // 8)):
                word = int.from_bytes(stripe[8 * i : 8 * i + 8], "little")
                keyed = word ^ (mix((i + 1) * golden % 2**64) | 1)
                found += (word << 32) + (word >> 32) + (keyed % 2**32) * (keyed >> 32)
            total += mix((found + (place * 2**20 + number + 1) * golden) % 2**64)
    return total % 2**64


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, list[Unit]]:
    """A size of blocks, and units anywhere in them."""
    at, units = 0, []
    places = draw(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6, unique=True))
    for place in places:
        offset = at + draw(st.integers(0, 9))
        nbytes = draw(st.one_of(st.just(4), st.integers(1, 20), st.integers(1, 9000), st.sampled_from([64, 512, 2048, 4096])))
        units.append(Unit(offset, nbytes, place))
        at = offset + nbytes
    return at + draw(st.integers(0, 9)), draw(st.permutations(units))


@needs_library
@pytest.mark.parametrize("way", [1, 2, 3], ids=["plain", "AVX2", "AVX-512"])
@settings(max_examples=100, deadline=None)
@given(table=tables(), seed=st.integers(0, 9))
def test_compiled_code_of_any_width_sums_as_numpy_does(way: int, table: tuple[int, list[Unit]], seed: int) -> None:
    size, units = table
    blocks = np.stack([block_of(size, seed), block_of(size, seed + 10), np.full(size, 255, np.uint8)])
    ids, stripes = np.array([2, 0, 1], np.int64), Stripes.of(units)
    compiled = load_sums()
    assert compiled is not None
    sums = compiled(blocks.ctypes.data, size, ids, stripes, way)
    if sums is None:
        pytest.skip("this CPU lacks it")
    assert tuple(sums.tolist()) == sums_in_numpy(blocks[ids], stripes)


@settings(max_examples=30, deadline=None)
@given(table=tables(), seed=st.integers(0, 9))
def test_numpy_sums_as_the_definition_says(table: tuple[int, list[Unit]], seed: int) -> None:
    size, units = table
    blocks = np.stack([block_of(size, seed), np.full(size, 255, np.uint8)])
    assert sums_in_numpy(blocks, Stripes.of(units)) == tuple(python_sum(block, units) for block in blocks)


def test_the_bits_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Two workers of different builds compare them: another formula needs another version of the ticket."""
    block, units = (np.arange(12300) % 251).astype(np.uint8), [Unit(0, 8200, 3), Unit(8204, 4, 1), Unit(8300, 4000, 0)]
    assert python_sum(block, units) == GOLDEN_SUM
    assert sums_in_numpy(block[None], Stripes.of(units)) == (GOLDEN_SUM,)


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
    assert len({sum_of(np.zeros(8 * n, np.uint8)) for n in range(1, 600)}) == 599


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


@pytest.mark.parametrize("unit", [Unit(60, 8, 0), Unit(-4, 8, 0)])
def test_a_stripe_outside_the_block_is_our_bug(unit: Unit) -> None:
    with pytest.raises(AssertionError):
        BlockSums(torch.zeros(5, 64, dtype=torch.uint8), Stripes.of([unit]))


# Parts of a block that ranks store.


def shares_of(group: KvGroup, tp: int, pp: int) -> list[KvShare]:
    """Ranks of `pp` stages of `tp` ranks. Where there are fewer layers or heads, some have none."""

    def cut(count: int, parts: int) -> list[range]:
        return [range(part * count // parts, (part + 1) * count // parts) for part in range(parts)]

    both = [
        (layers, heads) for layers in cut(group.num_layers, pp) for heads in cut(group.num_kv_heads, tp) if layers and heads
    ]
    shares = [KvShare(rank, layers, heads) for rank, (layers, heads) in enumerate(both)]
    assert cover(group, shares)
    return shares


def part_of(block: np.ndarray, group: KvGroup, share: KvShare) -> np.ndarray:
    """The memory of a rank, by slices of tensors rather than by offsets."""
    begin, taken = 0, []
    for layer in range(group.num_layers):
        for heads, dim in group.planes:
            end = begin + heads * group.block_size * dim * DTYPE_BITS[group.dtype] // 8
            if layer in share.layers:
                taken.append(block[begin:end].reshape(heads, -1)[list(share.heads)].reshape(-1))
            begin = end
    if group.quantised:
        scales = block[begin:].reshape(group.num_layers, len(group.planes), group.num_kv_heads, 4)
        taken.append(scales[list(share.layers)][:, :, list(share.heads)].reshape(-1))
    part = np.concatenate(taken)
    assert len(part) == share.of(group).block_bytes
    return part


def sums_of_part(blocks: list[np.ndarray], group: KvGroup, stored: KvShare, share: KvShare) -> tuple[BlockSum, ...]:
    """The checksums of a share of blocks, computed in the memory of a rank that has stored a share around it."""
    memory = torch.from_numpy(np.stack([part_of(block, group, stored) for block in blocks]))
    return BlockSums(memory, Stripes.of(share.units(group, stored)))(range(len(blocks)))


def sum_of_whole(block: np.ndarray, group: KvGroup) -> BlockSum:
    return BlockSums(torch.from_numpy(block[None].copy()), stripes_of(group))([0])[0]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_the_checksums_of_all_ranks_add_up_to_that_of_the_block(dtype: str, kv_heads: int) -> None:
    """Whoever stores what; numbers of K and V have different sizes, and V's heads have more than a stripe in float32."""
    group = KvGroup((0, 2, 3), ((kv_heads, 6), (kv_heads, 66)), 16, dtype)
    blocks = [block_of(group.block_bytes, seed) for seed in range(2)]
    whole = tuple(sum_of_whole(block, group) for block in blocks)
    assert whole == tuple(python_sum(block, whole_share(group).units(group, whole_share(group))) for block in blocks)
    for tp, pp in product((1, 2, 4, 8), (1, 2)):
        parts = [sums_of_part(blocks, group, share, share) for share in shares_of(group, tp, pp)]
        assert add_sums(*parts) == whole


@settings(max_examples=60, deadline=None)
@given(group=groups, degrees=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 4))
def test_what_two_ranks_have_in_common_has_one_checksum_in_both_memories(group: KvGroup, degrees: tuple[int, ...]) -> None:
    """A lender and a reader of other degrees sum what one reads of the other."""
    block = block_of(group.block_bytes)
    found = []
    for their, our in product(shares_of(group, *degrees[:2]), shares_of(group, *degrees[2:])):
        if (both := our.overlap(their)) is not None:
            found.append(sums_of_part([block], group, their, both))
            assert found[-1] == sums_of_part([block], group, our, both)
    assert add_sums(*found) == (sum_of_whole(block, group),)


@settings(max_examples=200, deadline=None)
@given(group=groups, at=st.integers(0, 1 << 30), change=st.integers(1, 255))
def test_every_byte_of_a_block_counts(group: KvGroup, at: int, change: int) -> None:
    block = block_of(group.block_bytes)
    before = sum_of_whole(block, group)
    block[at % len(block)] ^= change
    assert sum_of_whole(block, group) != before


@settings(max_examples=200, deadline=None)
@given(group=groups, data=st.data())
def test_what_was_swapped_between_places_counts(group: KvGroup, data: st.DataObject) -> None:
    """The numbers of two heads of any layers, two scales, or two layers with all that they have."""
    units = list(whole_share(group).units(group, whole_share(group)))
    each = len(group.planes) * group.num_kv_heads  # units of a layer, and as many of its scales
    if data.draw(st.booleans(), label="layers"):
        layers = data.draw(st.lists(st.integers(0, group.num_layers - 1), min_size=2, max_size=2), label="which")
        first, second = ([unit for unit in units if unit.place // each % group.num_layers == layer] for layer in layers)
    else:
        one = data.draw(st.sampled_from(units))
        first, second = [one], [data.draw(st.sampled_from([unit for unit in units if unit.nbytes == one.nbytes]))]
    before = block_of(group.block_bytes)
    block = before.copy()
    for (ours, nbytes, _), (theirs, _, _) in zip(first, second, strict=True):
        block[ours : ours + nbytes], block[theirs : theirs + nbytes] = before[theirs:][:nbytes], before[ours:][:nbytes]
    assert (sum_of_whole(block, group) == sum_of_whole(before, group)) == np.array_equal(block, before)
