"""Ranks with memory of their own: each head of each layer of each block has one place on a side, and is read once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.kv_layout import DTYPE_BITS, KvGroup, KvShare, KvSpec, cover, gqa_group, join, whole_share
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from pdserve.core.shards import Degrees, kv_shares, shares_of_rank

LAYERS, TP, PP, KV_HEADS = 5, (1, 2, 4, 8), (1, 2), (1, 2, 3, 8)


def model(kv_heads: int, windows: tuple[int | None, ...] = (None,) * LAYERS) -> ModelSpec:
    norm = NormSpec(1e-5)
    layers = [
        LayerSpec(AttentionSpec(2 * kv_heads, kv_heads, 8, 8, RopeSpec(1e4), window=window), DenseSpec(64), norm)
        for window in windows
    ]
    return ModelSpec(256, 64, tuple(layers), norm, max_position=64, tied_head=False)


def bytes_of(group: KvGroup, shares: tuple[KvShare, ...]) -> dict[tuple[int, int], int]:
    """What each byte of each rank's part of a block is: a place among all bytes of a whole block."""
    whole = whole_share(group)
    begins = {unit.place: unit.offset for unit in whole.units(group, whole)}
    return {
        (share.rank, unit.offset + i): begins[unit.place] + i
        for share in shares
        for unit in share.units(group, share)
        for i in range(unit.nbytes)
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_each_byte_of_a_block_is_read_once_between_all_degrees(kv_heads: int, dtype: str) -> None:
    """By the bytes of a real block: what arrives in a rank is what one process would have there."""
    group = gqa_group(LAYERS, kv_heads, 8, 4, dtype)
    spec = model(kv_heads)
    sides = {(tp, pp): kv_shares(spec, Degrees(tp, pp), group) for tp, pp in product(TP, PP)}
    meaning = {degrees: bytes_of(group, shares) for degrees, shares in sides.items()}
    for shares, known in zip(sides.values(), meaning.values(), strict=True):
        assert cover(group, shares)
        assert sorted(known.values()) == list(range(group.block_bytes))
        assert Counter(rank for rank, _ in known) == {share.rank: share.of(group).block_bytes for share in shares}
    for theirs, ours in product(sides, sides):
        read: Counter[int] = Counter()
        for route in join(group, sides[theirs], sides[ours]):
            for piece in route.pieces:
                for i in range(piece.nbytes):
                    arrived = meaning[ours][route.ours.rank, piece.ours + i]
                    assert arrived == meaning[theirs][route.theirs.rank, piece.theirs + i]
                    read[arrived] += 1
        assert read == Counter(range(group.block_bytes)), (theirs, ours)


def test_equal_degrees_read_whole_blocks_and_others_the_fewest_runs() -> None:
    """A run is a descriptor of a read: a layer and plane each, or all layers of a stage."""
    group, spec = gqa_group(LAYERS, 8, 8, 4, "bfloat16"), model(8)
    one, two, stages = (kv_shares(spec, Degrees(*degrees), group) for degrees in ((1, 1), (2, 1), (1, 2)))
    assert [[len(route.pieces) for route in join(group, side, side)] for side in (one, two, stages)] == [[1], [1, 1], [1, 1]]
    assert [len(route.pieces) for route in join(group, one, two)] == [2 * LAYERS, 2 * LAYERS]
    assert [len(route.pieces) for route in join(group, stages, one)] == [1, 1]


def test_a_rank_without_a_head_or_a_layer_has_no_share() -> None:
    """Two KV heads in eight ranks, and a group of layers that the first stage does not have."""
    spec = model(2, (None, None, None, 8, 8))
    kv = spec.kv_spec(4, "float32")
    assert [group.layers for group in kv.groups] == [(0, 1, 2), (3, 4)]
    assert [share.rank for share in kv_shares(spec, Degrees(8), kv.groups[0])] == [3, 7]
    of_stages = [shares_of_rank(spec, Degrees(1, 2), kv, rank) for rank in range(2)]
    assert of_stages[0] == (KvShare(0, range(2), range(2)), None)
    assert of_stages[1] == (KvShare(1, range(2, 3), range(2)), KvShare(1, range(2), range(2)))


def test_a_latent_plane_has_one_owner() -> None:
    group = KvGroup((0, 1), ((1, 24),), 4, "float32")
    shares = (KvShare(3, range(2), range(1)),)
    assert cover(group, shares)
    ((theirs, ours, pieces),) = join(group, (whole_share(group),), shares)
    assert (theirs.rank, ours.rank) == (0, 3)
    assert [tuple(piece) for piece in pieces] == [(0, 0, group.block_bytes)]


@settings(deadline=None, max_examples=300)
@given(
    st.builds(
        gqa_group, st.integers(1, 4), st.integers(1, 4), st.sampled_from([2, 6]), st.just(4), st.sampled_from([*DTYPE_BITS])
    ),
    st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=5),
)  # fmt: skip
def test_shares_cover_a_group_or_they_do_not(group: KvGroup, cuts: list[tuple[int, int, int, int]]) -> None:
    shares = tuple(KvShare(rank, range(a, b), range(c, d)) for rank, (a, b, c, d) in enumerate(cuts))
    had = Counter((layer, head) for share in shares for layer in share.layers for head in share.heads)
    everything = Counter(product(range(group.num_layers), range(group.num_kv_heads)))
    empty = any(not share.layers or not share.heads for share in shares)
    assert cover(group, shares) == (had == everything and not empty)
    assert not cover(group, tuple(replace(share, rank=0) for share in shares)) or len(shares) == 1


def test_groups_keep_their_layers_by_stage() -> None:
    """A stage has neighbouring layers of the model, so it has neighbouring layers of each group."""
    spec = model(3, (None, 8, None, 8, None))
    kv: KvSpec = spec.kv_spec(4, "bfloat16")
    for pipeline in range(1, LAYERS + 1):
        for group in kv.groups:
            shares = kv_shares(spec, Degrees(1, pipeline), group)
            assert cover(group, shares)
            assert [layer for share in shares for layer in share.of(group).layers] == list(group.layers)
