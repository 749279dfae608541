"""The shares of ranks: together they are the model, and each KV head is stored once and read by those who need it."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from pdserve.core.shards import PANEL, Degrees, RankShare, shares_evenly

NORM, ROPE = NormSpec(1e-5), RopeSpec(10000.0)


def spec_of(heads: int, kv_heads: int, mlp: DenseSpec | MoeSpec | None = None, layers: int = 5, vocab: int = 1000) -> ModelSpec:
    attention = AttentionSpec(heads, kv_heads, 64, 64, ROPE)
    layer = LayerSpec(attention, mlp or DenseSpec(64 * 24), NORM)
    return ModelSpec(vocab, 256, (layer,) * layers, NORM, 4096, tied_head=False)


def ranks_of(spec: ModelSpec, degrees: Degrees) -> list[RankShare]:
    return [RankShare(spec, degrees, number) for number in range(degrees.ranks)]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize(("tensor", "pipeline"), list(product([1, 2, 4, 8], [1, 2])))
def test_each_kv_head_of_each_layer_is_stored_once_and_read_by_its_queries(kv_heads: int, tensor: int, pipeline: int) -> None:
    spec, degrees = spec_of(24, kv_heads), Degrees(tensor, pipeline)
    if not shares_evenly(spec, tensor):
        assert kv_heads == 3
        assert tensor > 1
        with pytest.raises(
            ConfigError, match=f"tensor_parallel_size {tensor} does not divide.*24 query heads and 3 KV heads.*use 1 or 3 or 6$"
        ):
            degrees.check(spec)
        return
    degrees.check(spec)
    stored: Counter[tuple[int, int]] = Counter()
    for share in ranks_of(spec, degrees):
        for layer in share.layers:
            attention = spec.layers[layer].attention
            heads, own = share.heads(attention), share.kv_heads(attention)
            each = attention.heads // attention.kv_heads
            assert {head // each for head in heads} == set(own)
            assert len(heads) % len(own) == 0  # a kernel has as many queries for each of its KV heads
            assert not len(own) > 1 or heads.start % each == 0
            if share.stores_kv(attention):
                stored.update((layer, head) for head in own)
    assert stored == Counter({(layer, head): 1 for layer in range(5) for head in range(kv_heads)})


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(4), Degrees(8, 5), Degrees(2, 3), Degrees(1, 4)], ids=str)
def test_the_shares_of_all_ranks_are_the_model(degrees: Degrees) -> None:
    spec = spec_of(8, 4, MoeSpec(16, 2, 512, shared=512))
    degrees.check(spec)
    shares = ranks_of(spec, degrees)
    for stage in range(degrees.pipeline):
        ranks = [share for share in shares if share.stage == stage]
        assert [share.rank for share in ranks] == list(range(degrees.tensor))
        assert {share.layers for share in ranks} == {ranks[0].layers}
        for count, of in ((1000, lambda share: share.token_ids), (8, lambda s: s.heads(spec.layers[0].attention)),
                          (512, lambda share: share.intermediate(spec.layers[0]))):  # fmt: skip
            assert [number for share in ranks for number in of(share)] == list(range(count))
        assert all(share.token_ids.start % PANEL == 0 for share in ranks)
    assert [layer for share in shares if share.rank == 0 for layer in share.layers] == list(range(5))
    assert {share.parts * degrees.tensor for share in shares} == {spec.parts}


@pytest.mark.parametrize(("tensor", "heads", "kv_heads"), [(3, 9, 3), (5, 15, 5), (6, 12, 3)])
def test_ranks_that_share_no_sums_have_columns_of_every_product(tensor: int, heads: int, kv_heads: int) -> None:
    spec = spec_of(heads, kv_heads, DenseSpec(16 * tensor * 5))
    degrees = Degrees(tensor)
    degrees.check(spec)
    shares = ranks_of(spec, degrees)
    assert all(share.gathers and share.parts == spec.parts for share in shares)
    assert [column for share in shares for column in share.columns] == list(range(spec.hidden_size))
    assert all(len(share.columns) > 0 and share.columns.start % PANEL == 0 for share in shares)
    assert {len(share.intermediate(spec.layers[0])) for share in shares} == {16 * 5}


def test_ranks_have_whole_experts_or_a_part_of_each() -> None:
    mlp = MoeSpec(16, 2, 512, shared=512)
    spec = spec_of(8, 4, mlp)
    parts, whole = (ranks_of(spec, Degrees(4, 1, experts)) for experts in (False, True))
    assert [list(share.experts(mlp)) for share in whole] == [list(range(4 * rank, 4 * rank + 4)) for rank in range(4)]
    assert {share.intermediate(spec.layers[0]) for share in whole} == {range(512)}
    assert {share.experts(mlp) for share in parts} == {range(16)}
    assert [share.intermediate(spec.layers[0]).start for share in parts] == [0, 128, 256, 384]


def test_latent_attention_has_one_plane_that_one_rank_stores() -> None:
    attention = MlaSpec(8, 64, 48, 32, 64, ROPE, NORM)
    spec = ModelSpec(1000, 256, (LayerSpec(attention, DenseSpec(512), NORM),), NORM, 4096, tied_head=False)
    shares = ranks_of(spec, Degrees(4))
    assert [share.kv_heads(attention) for share in shares] == [range(1)] * 4
    assert [share.stores_kv(attention) for share in shares] == [True, False, False, False]
    assert not RankShare(spec).shares_kv(attention)


@pytest.mark.parametrize(
    ("degrees", "spec", "words"),
    [
        (Degrees(2), spec_of(9, 3), "tensor_parallel_size 2 does not divide.*9 query heads and 3 KV heads.*use 1 or 3$"),
        (Degrees(3), spec_of(9, 3, MoeSpec(8, 2, 192)), "tensor_parallel_size 3 does not divide.*use 1$"),
        (Degrees(16), spec_of(32, 8), "tensor_parallel_size 16 .* use 1 or 2 or 4 or 8$"),
        (Degrees(0), spec_of(8, 8), "tensor_parallel_size 0"),
        (Degrees(1, 6), spec_of(8, 8), "pipeline_parallel_size 6 is not possible with 5 layers: use 1 to 5"),
        (Degrees(2, 1, True), spec_of(8, 8), "enable_expert_parallel is for mixtures of experts"),
        (Degrees(4, 1, True), spec_of(8, 8, MoeSpec(6, 2, 512)), "6 experts cannot be shared among 4 ranks"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_by_name(degrees: Degrees, spec: ModelSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        degrees.check(spec)


def test_degrees_are_said_as_operators_set_them() -> None:
    assert str(Degrees(2, 4, True)) == "tensor_parallel_size 2, pipeline_parallel_size 4, enable_expert_parallel"
    assert str(Degrees()) == "one rank"
