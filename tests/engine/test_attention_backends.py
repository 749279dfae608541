"""Every backend against the definition in float64, over random batches on shuffled blocks."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.ids import BlockId
from pdserve.core.kv_layout import gqa_group
from pdserve.engine.attention.api import Scores
from pdserve.engine.attention.bounded import BoundedAttention
from pdserve.engine.attention.fast import PIECE, FastAttention
from pdserve.engine.attention.invariant import InvariantAttention
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.span import Span
from tests.reference_attention import ReferenceAttention

CPU = torch.device("cpu")


def make_case(spans: list[tuple[int, int]], *, block_size: int, kv_heads: int, group: int, dim: int, dtype: str, seed: int):
    """Spans of (start, count) on shuffled blocks of a cache full of noise. Returns cache, spans, query."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-(start + count) // block_size) for start, count in spans]
    layout = gqa_group(2, kv_heads, dim, block_size, dtype)
    kv = KvCache(layout, (sum(needed) + 3) * layout.block_bytes, CPU)
    kv.tensor.copy_(torch.randn(kv.tensor.shape, generator=generator))
    ids = [BlockId(b) for b in rng.sample(range(kv.num_blocks), sum(needed))]
    made, row = [], 0
    for (start, count), blocks in zip(spans, needed, strict=True):
        own, ids = ids[:blocks], ids[blocks:]
        made.append(Span(row, start, count, tuple(own)))
        row += count
    query = torch.randn(row, kv_heads * group, dim, generator=generator).to(kv.tensor.dtype)
    return kv, tuple(made), query


def worst(backend, kv: KvCache, spans: tuple[Span, ...], query: torch.Tensor, scores: Scores | None = None) -> float:
    reference = ReferenceAttention(kv, query.shape[1], scores)
    tested = backend(kv, query.shape[1], scores)
    expected = reference.run(reference.prepare(spans), 1, query)
    found = tested.run(tested.prepare(spans), 1, query)
    assert found.shape == query.shape
    assert found.dtype == query.dtype
    return (found.double() - expected).abs().max().item()


def bounded_fast(kv: KvCache, num_heads: int, scores: Scores | None) -> BoundedAttention:
    return BoundedAttention(FastAttention(kv, num_heads, scores), scores, most_positions=30)


def bounded_invariant(kv: KvCache, num_heads: int, scores: Scores | None) -> BoundedAttention:
    return BoundedAttention(InvariantAttention(kv, num_heads, scores), scores, most_positions=30)


sizes = st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 9, 17]))


@pytest.mark.quick("FastAttention", "InvariantAttention")
@pytest.mark.parametrize("backend", [FastAttention, InvariantAttention, bounded_fast, bounded_invariant])
@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(sizes, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 5, 16, 200]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([8, 16]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
)
def test_random_batches_equal_the_definition(backend, spans, block_size, kv_heads, group, dim, dtype, seed):
    kv, made, query = make_case(spans, block_size=block_size, kv_heads=kv_heads, group=group, dim=dim, dtype=dtype, seed=seed)
    assert worst(backend, kv, made, query) < (1e-5 if dtype == "float32" else 4e-2)


@pytest.mark.quick("FastAttention", "bounded_invariant")
@pytest.mark.parametrize("backend", [FastAttention, InvariantAttention, bounded_fast, bounded_invariant])
@settings(max_examples=20, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 2, 17, 40])), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 5, 16, 200]),
    window=st.sampled_from([1, 2, 7, 16, 63, 64, 65, 100]),
    softcap=st.sampled_from([None, 1.5]),
    scale=st.sampled_from([0.1, 0.6]),
    seed=st.integers(0, 1000),
)
def test_windows_and_bounds_of_scores_equal_the_definition(backend, spans, block_size, window, softcap, scale, seed):
    """All blocks in front of the window hold NaN, and nobody reads them. In invariant mode NaN behind the end is no harm."""
    kv, made, query = make_case(spans, block_size=block_size, kv_heads=2, group=2, dim=8, dtype="float32", seed=seed)
    for span in made:
        dead = max(0, span.start - window + 1) // block_size
        kv.tensor[list(span.block_table[:dead])] = torch.nan
        if backend in (InvariantAttention, bounded_invariant):
            kv.tensor[span.block_table[-1], :, :, :, (span.end - 1) % block_size + 1 :] = torch.nan
    assert worst(backend, kv, made, query, Scores(8, scale, window, softcap)) < 1e-5


@pytest.mark.parametrize("backend", [FastAttention, InvariantAttention])
def test_a_window_bounds_what_is_gathered(backend):
    """A context of 8,192 tokens with a window of 512 gathers no more than the window, a tile or a block."""
    kv, made, _ = make_case([(8191, 1), (8100, 92)], block_size=16, kv_heads=1, group=2, dim=8, dtype="float32", seed=1)
    gathered = []
    kv.gather_rows = lambda tables: gathered.append(tables.numel() * 16)  # type: ignore[method-assign]
    tested = backend(kv, 2, Scores(8, 1.0, window=512))
    for span in made:
        tested.prepare((Span(0, span.start, span.count, span.block_table),))
    assert gathered[0] <= 512 + 64
    assert sum(gathered[1:]) <= 512 + 92 + 2 * 64


def test_a_turn_counts_what_its_sequences_gather():
    """Sixteen sequences of 1,000 positions and a window of 100 are one turn of 1,600 positions, not ten turns."""
    kv, (one,), _ = make_case([(999, 1)], block_size=16, kv_heads=1, group=2, dim=8, dtype="float32", seed=1)
    spans = tuple(Span(row, one.start, 1, one.block_table) for row in range(16))
    scores = Scores(8, 1.0, window=100)
    turns = BoundedAttention(FastAttention(kv, 2, scores), scores, most_positions=1600).prepare(spans)
    assert [(turn.begin, turn.end) for turn in turns] == [(0, 16)]


@pytest.mark.parametrize("backend", [FastAttention, InvariantAttention])
def test_prompts_over_several_tiles_equal_the_definition(backend):
    spans = [(0, PIECE + 3), (PIECE - 1, 2), (300, 1), (120, 20)]
    kv, made, query = make_case(spans, block_size=16, kv_heads=1, group=2, dim=8, dtype="float32", seed=7)
    assert worst(backend, kv, made, query) < 1e-5


@pytest.mark.parametrize("backend", [FastAttention, InvariantAttention])
def test_a_layer_reads_its_own_kv_only(backend):
    kv, made, query = make_case([(3, 2)], block_size=4, kv_heads=2, group=1, dim=8, dtype="float32", seed=8)
    tested = backend(kv, 2)
    before = tested.run(tested.prepare(made), 0, query)
    kv.tensor[:, 1] = 99.0
    assert torch.equal(tested.run(tested.prepare(made), 0, query), before)


def test_sequences_that_share_their_beginning_are_not_gathered_all_at_once():
    """64 that look at the same 1,000 tokens wanted room for 64,000."""
    seen: list[int] = []

    class Counting(FastAttention):
        def prepare(self, spans):
            seen.append(sum(span.end for span in spans))
            assert spans[0].row == 0
            return super().prepare(spans)

    kv, (one,), query = make_case([(999, 1)], block_size=16, kv_heads=1, group=2, dim=8, dtype="float32", seed=1)
    spans = tuple(Span(row, one.start, 1, one.block_table) for row in range(64))
    many = query.expand(64, -1, -1)
    bounded = BoundedAttention(Counting(kv, 2), most_positions=3000)
    out = bounded.run(bounded.prepare(spans), 1, many)
    assert seen == [3000] * 21 + [1000]
    alone = FastAttention(kv, 2)
    assert torch.allclose(out, alone.run(alone.prepare((one,)), 1, query).expand(64, -1, -1), atol=1e-6)
