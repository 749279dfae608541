"""A model as data: what a spec accepts, how layers become KV groups, and what is beyond Llama."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import (
    UNEQUAL_HEADS,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
)

ATTENTION = AttentionSpec(heads=4, kv_heads=2, qk_dim=16, v_dim=16, rope=RopeSpec(10000.0))
LAYER = LayerSpec(ATTENTION, DenseSpec(128), NormSpec(1e-5))
MODEL = ModelSpec(512, 64, (LAYER,) * 4, NormSpec(1e-5), max_position=2048, tied_head=False)
BEYOND = {
    "a v_dim other than qk_dim": {"v_dim": 8}, "window": {"window": 128}, "bias": {"bias": True},
    "out_bias": {"out_bias": True}, "qk_norm": {"qk_norm": NormSpec(1e-6)},
    "softcap": {"softcap": 50.0}, "scale": {"scale": 0.1}, "rope of a part of a head": {"rope": RopeSpec(10000.0, dim=8)},
    "rope of neighbours": {"rope": RopeSpec(10000.0, neighbours=True)},
}  # fmt: skip


def model_of(*attentions: AttentionSpec) -> ModelSpec:
    return replace(MODEL, layers=tuple(replace(LAYER, attention=one) for one in attentions))


@pytest.mark.parametrize("field", ["heads", "kv_heads", "qk_dim", "v_dim", "window"])
@pytest.mark.parametrize("value", [0, -1])
def test_attention_of_no_size_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"^{field} must be at least 1, got {value}$"):
        replace(ATTENTION, **{field: value})


def test_query_heads_share_kv_heads_evenly():
    with pytest.raises(ConfigError, match=r"^heads 4 is not a multiple of kv_heads 3$"):
        replace(ATTENTION, kv_heads=3)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"vocab_size": 0}, "vocab_size"), ({"hidden_size": 0}, "hidden_size"), ({"layers": ()}, "layers"),
     ({"max_position": 0}, "max_position")],
)  # fmt: skip
def test_a_model_of_no_size_is_refused(change, field):
    with pytest.raises(ConfigError, match=f"^{field} must be at least 1, got 0$"):
        replace(MODEL, **change)
    with pytest.raises(ConfigError, match=r"^intermediate must be at least 1, got 0$"):
        DenseSpec(0)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([None, 128])), min_size=1, max_size=12))
def test_layers_of_equal_kv_form_a_group(kinds):
    """(1) Groups cover all layers, in order of first appearance. (2) Layers are together exactly when their KV is equal."""
    spec = model_of(*(replace(ATTENTION, kv_heads=heads, window=window) for heads, window in kinds))
    groups = spec.kv_groups
    assert sorted(layer for group in groups for layer in group) == list(range(len(kinds)))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for a in range(len(kinds)):
        for b in range(len(kinds)):
            assert (spec.places[a][0] == spec.places[b][0]) == (kinds[a] == kinds[b])
    assert all(groups[group][at] == layer for layer, (group, at) in enumerate(spec.places))
    kv = spec.kv_spec(16, "bfloat16")
    assert [group.layers for group in kv.groups] == list(groups)
    assert [(group.num_kv_heads, group.window) for group in kv.groups] == [kinds[group[0]] for group in groups]


def test_numbers_are_counted_once():
    layer = 64 * (4 * 16 + 2 * 2 * 16 + 4 * 16 + 3 * 128)
    assert MODEL.layer_numbers == 4 * layer
    assert (MODEL.numbers, replace(MODEL, tied_head=True).numbers) == (4 * layer + 2 * 512 * 64, 4 * layer + 512 * 64)


def test_what_is_beyond_llama_has_a_name():
    assert MODEL.beyond() is None
    for name, change in BEYOND.items():
        spec = model_of(ATTENTION, replace(ATTENTION, **change))
        assert spec.beyond() == name
        assert spec.beyond({name}) is None
    assert model_of(ATTENTION, replace(ATTENTION, heads=2)).beyond() == UNEQUAL_HEADS
    assert model_of(ATTENTION, replace(ATTENTION, heads=2, kv_heads=1)).beyond() is None


LATENT = MlaSpec(heads=4, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=12, rope=RopeSpec(10000.0), norm=NormSpec(1e-6), q_rank=24)


def test_latent_attention_stores_one_plane():
    spec = replace(MODEL, layers=(replace(LAYER, attention=LATENT),))
    assert spec.kv_spec(16, "bfloat16").groups[0].planes == ((1, 40),)
    assert spec.beyond() == "latent attention"
    projections = 64 * 24 + 24 * 4 * 24 + 64 * 40 + 32 * 4 * (16 + 12) + 4 * 12 * 64
    assert spec.layer_numbers == projections + 3 * 64 * 128
    assert LATENT.numbers(64) - replace(LATENT, q_rank=None).numbers(64) == 64 * 24 + 24 * 4 * 24 - 64 * 4 * 24


def test_a_mixture_counts_all_experts():
    spec = replace(MODEL, layers=(replace(LAYER, mlp=MoeSpec(8, 2, 32, shared=16, shared_gate=True)),))
    assert spec.beyond() == "a mixture of experts"
    assert spec.layer_numbers == ATTENTION.numbers(64) + 64 * (8 + 8 * 3 * 32 + 3 * 16 + 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"groups": 3}, "1 of 3 groups of 8 experts"), ({"groups": 2, "top_groups": 3}, "3 of 2 groups"),
     ({"experts_per_token": 9}, "experts_per_token 9"), ({"groups": 4, "experts_per_token": 3}, "experts_per_token 3"),
     ({"groups": 8, "top_groups": 2, "group_score": "best_two"}, "groups of one expert have no best two")],
)  # fmt: skip
def test_experts_that_cannot_be_chosen_are_refused(change, why):
    with pytest.raises(ConfigError, match=why):
        replace(MoeSpec(8, 2, 32), **change)


def test_what_a_whole_model_has_beyond_llama_has_a_name():
    assert replace(MODEL, norm=NormSpec(1e-5, 1.0)).beyond() == "an offset of norms"
    assert replace(MODEL, embedding_scale=8.0).beyond() == "embedding_scale"
    assert replace(MODEL, softcap=30.0).beyond() == "a softcap of logits"
    assert replace(MODEL, layers=(replace(LAYER, post_norms=True),)).beyond() == "post_norms"
    assert replace(MODEL, layers=(replace(LAYER, mlp=DenseSpec(128, "gelu_tanh")),)).beyond() == "gelu_tanh"


@pytest.mark.parametrize(
    ("heads", "head_dim", "intermediate", "expected"),
    [(32, 128, 14336, 8), (9, 64, 1536, 1), (14, 64, 4864, 2), (16, 64, 128 * 5, 2), (4, 64, 4096, 4), (8, 8, 4096, 1)],
)
def test_a_product_has_as_many_parts_as_all_layers_could_have_ranks(
    heads: int, head_dim: int, intermediate: int, expected: int
) -> None:
    """Ranks get whole heads and whole groups of 64 numbers. 9 heads are SmolLM2's, 32 are Llama-3-8B's."""
    attention = replace(ATTENTION, heads=heads, kv_heads=1, qk_dim=head_dim, v_dim=head_dim)
    layer = replace(LAYER, attention=attention, mlp=DenseSpec(intermediate))
    whole = replace(LAYER, attention=replace(attention, heads=32, qk_dim=128, v_dim=128), mlp=DenseSpec(64 * 128))
    assert replace(MODEL, layers=(whole, layer)).parts == expected
    mixture = MoeSpec(experts=4, experts_per_token=2, intermediate=64 * 8, shared=64 * 3)
    assert replace(MODEL, layers=(replace(whole, mlp=mixture),)).parts == 1
