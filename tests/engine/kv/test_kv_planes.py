"""Groups of any planes: each plane lies where a loop says, and is what it would be in a group of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.core.ids import BlockId
from pdserve.core.kv_layout import DTYPE_BITS, QUANTISED, KvGroup
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.kv.paged import TORCH_DTYPES
from pdserve.engine.kv.span import Span

CPU = torch.device("cpu")
BLOCKS = 7
TABLES = ((BlockId(5), BlockId(1), BlockId(6)), (BlockId(0), BlockId(3)))
planes = st.builds(
    lambda heads, dims: tuple((heads, dim) for dim in dims),
    st.integers(1, 3),
    st.lists(st.sampled_from([2, 4, 6, 8, 10]), min_size=1, max_size=4),
)
groups = st.builds(
    KvGroup,
    layers=st.sampled_from([(0,), (1, 4), (0, 1, 2)]),
    planes=planes,
    block_size=st.sampled_from([4, 8]),
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
)
"""Each block is a whole number of words in every dtype."""


def tokens_of(group: KvGroup, count: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(count, heads, dim, generator=random) for heads, dim in group.planes]


def written(group: KvGroup, tokens: list[Tensor], layer: int, cuts: tuple[int, ...]) -> KvCache:
    """A pool of bytes 0x2B in which the first table holds the tokens, a piece of them in each call beside another sequence."""
    kv = KvCache(group, BLOCKS * group.block_bytes, CPU, torch.float32)
    kv.blocks.fill_(0x2B)
    for start, end in zip((0, *cuts), (*cuts, len(tokens[0])), strict=True):
        if start < end:
            spans = [Span(0, 0, 2, TABLES[1]), Span(2, start, end - start, TABLES[0])]
            kv.write(layer, kv.slots(spans), *(torch.cat((plane[:2], plane[start:end])) for plane in tokens))
    return kv


def alone(group: KvGroup, plane: int) -> KvGroup:
    return replace(group, planes=(group.planes[plane],))


def plane_bytes(blocks: Tensor, group: KvGroup, plane: int) -> Tensor:
    """The bytes of blocks that belong to one plane, numbers and then scales, by counting from the start of a block."""
    bits, found = DTYPE_BITS[group.dtype], []
    for scales in (False, True) if group.quantised else (False,):
        at = group.data_bytes if scales else 0
        for _ in group.layers:
            for index, (heads, dim) in enumerate(group.planes):
                size = heads * 4 if scales else heads * group.block_size * dim * bits // 8
                if index == plane:
                    found.append(blocks[:, at : at + size])
                at += size
    return torch.cat(found, 1)


@settings(max_examples=60, deadline=None)
@given(group=groups, seed=st.integers(0, 99), data=st.data())
def test_each_plane_is_stored_and_gathered_as_it_would_be_alone(group, seed, data):
    length = data.draw(st.integers(2, 3 * group.block_size))
    cuts = tuple(sorted(data.draw(st.lists(st.integers(1, length), max_size=3))))
    layer = data.draw(st.integers(0, group.num_layers - 1))
    tokens = tokens_of(group, length, seed)
    kv = written(group, tokens, layer, cuts)
    table = torch.tensor([TABLES[0], TABLES[1] + TABLES[0][:1]])
    found = kv.gather(layer, kv.gather_rows(table), 2)
    assert [tuple(x.shape) for x in found] == [(2, heads, 3 * group.block_size, dim) for heads, dim in group.planes]
    for plane, of_plane in enumerate(tokens):
        one = written(alone(group, plane), [of_plane], layer, cuts)
        assert torch.equal(plane_bytes(kv.blocks, group, plane), one.blocks)
        (gathered,) = one.gather(layer, one.gather_rows(table), 2)
        assert torch.equal(found[plane], gathered)


@settings(max_examples=40, deadline=None)
@given(group=groups, seed=st.integers(0, 99), data=st.data())
def test_plain_numbers_lie_where_a_loop_says_and_nothing_else_is_written(group, seed, data):
    group = replace(group, dtype=data.draw(st.sampled_from(sorted(TORCH_DTYPES))))
    length, layer = data.draw(st.integers(2, 3 * group.block_size)), data.draw(st.integers(0, group.num_layers - 1))
    tokens = tokens_of(group, length, seed)
    kv = written(group, tokens, layer, (1,) if length > 1 else ())
    expected = torch.full_like(kv.blocks, 0x2B).view(TORCH_DTYPES[group.dtype])
    width = sum(heads * dim for heads, dim in group.planes)
    for table, count in ((TABLES[1], 2), (TABLES[0], length)):
        for token in range(count):
            at = layer * width * group.block_size
            for (heads, dim), of_plane in zip(group.planes, tokens, strict=True):
                for head in range(heads):
                    begin = at + (head * group.block_size + token % group.block_size) * dim
                    expected[table[token // group.block_size], begin : begin + dim] = of_plane[token, head]
                at += heads * group.block_size * dim
    assert torch.equal(kv.blocks, expected.view(torch.uint8))
    found = kv.gather(layer, kv.gather_rows(torch.tensor([TABLES[0]])), 1)
    for got, of_plane in zip(found, tokens, strict=True):
        stored = of_plane.to(TORCH_DTYPES[group.dtype]).float()
        assert torch.equal(got[0, :, :length].transpose(0, 1), stored)


@settings(max_examples=60, deadline=None)
@given(group=groups, target=st.sampled_from(sorted(DTYPE_BITS)), seed=st.integers(0, 99), data=st.data())
def test_each_plane_is_converted_as_it_would_be_alone(group, target, seed, data):
    length = data.draw(st.integers(2, 3 * group.block_size))
    kv = written(group, tokens_of(group, length, seed), 0, ())
    blocks = kv.blocks[list(TABLES[0][: group.blocks_for(length)])]
    for part in kv.parts:
        if part.scales is not None:
            part.scales[:, 1:] = 1.0  # layers that nothing was written to
    found = convert_blocks(blocks, group, replace(group, dtype=target), length)
    for plane in range(len(group.planes)):
        source, sink = alone(group, plane), replace(alone(group, plane), dtype=target)
        own = plane_bytes(blocks, group, plane).contiguous()
        expected = convert_blocks(own, source, sink, length)
        assert torch.equal(plane_bytes(found, replace(group, dtype=target), plane), expected)


@settings(max_examples=30, deadline=None)
@given(group=groups, seed=st.integers(0, 99), data=st.data())
def test_a_token_changes_the_checksum_of_its_block_alone_and_bytes_that_moved_keep_theirs(group, seed, data):
    """Each plane counts: the token is written once with one plane changed, and once as it is."""
    changed = data.draw(st.integers(0, len(group.planes) - 1))
    tokens = tokens_of(group, 2, seed)
    others = [plane + 1 if index == changed else plane for index, plane in enumerate(tokens)]
    pools = [written(group, one, 0, ()) for one in (tokens, others)]
    before, after = (BlockSums(kv.blocks)(range(BLOCKS)) for kv in pools)
    assert {block for block in range(BLOCKS) if before[block] != after[block]} == {TABLES[0][0], TABLES[1][0]}
    pools[1].blocks[:] = pools[0].blocks.flip(0)
    assert BlockSums(pools[1].blocks)(range(BLOCKS)) == before[::-1]


def test_the_latent_plane_of_deepseek_v3_has_576_numbers_a_layer():
    group = KvGroup((0, 1), ((1, 512 + 64),), 16, "bfloat16")
    assert group.bytes_per_token == 2 * 576 * 2
    kv = KvCache(group, 3 * group.block_bytes, CPU)
    assert kv.tensor.shape == (3, 2, 1, 1, 16, 576)
    assert kv.slots([Span(0, 0, 5, (BlockId(1),))]).shape == (5, 1)
    for dtype in QUANTISED:
        quantised = replace(group, dtype=dtype)
        assert quantised.block_bytes == group.block_bytes * DTYPE_BITS[dtype] // 16 + 2 * 4


@settings(max_examples=40)
@given(data=st.data())
def test_ranks_write_and_read_their_heads_where_one_process_does(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 5))
    dims = data.draw(st.lists(st.sampled_from([2, 4, 6, 8]), min_size=1, max_size=3))
    group = KvGroup((0, 1), tuple((heads, dim) for dim in dims), 8, data.draw(st.sampled_from(sorted(DTYPE_BITS))))
    cut = data.draw(st.integers(0, heads))
    tokens, layer = tokens_of(group, 19, 1), 1
    whole = written(group, tokens, layer, (5,))
    shared = KvCache(group, BLOCKS * group.block_bytes, CPU, torch.float32)
    shared.blocks.fill_(0x2B)
    tables = torch.tensor([TABLES[0]])
    for own in filter(None, (range(cut), range(cut, heads))):
        view = shared.of_heads(own)
        for start, end in ((0, 5), (5, 19)):
            spans = [Span(0, 0, 2, TABLES[1]), Span(2, start, end - start, TABLES[0])]
            planes = (torch.cat((plane[:2], plane[start:end]))[:, own.start : own.stop] for plane in tokens)
            view.write(layer, view.slots(spans), *planes)
        found = view.gather(layer, view.gather_rows(tables), 1)
        expected = whole.gather(layer, whole.gather_rows(tables), 1)
        assert all(torch.equal(a, b[:, own.start : own.stop]) for a, b in zip(found, expected, strict=True))
    assert torch.equal(shared.blocks, whole.blocks)
