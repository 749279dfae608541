"""The size of a KV block, and the longest request that model and pool can hold."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import DTYPE_BITS, QUANTISED, KvGroup, KvSpec, ceil_div, fit_max_model_len, gqa_group

SMOLLM2 = gqa_group(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")


def test_the_default_models_block_is_360_kib():
    assert SMOLLM2.bytes_per_token == 23_040
    assert SMOLLM2.block_bytes == 360 << 10


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
def test_bytes_follow_the_dtype(dtype, bits):
    layout = gqa_group(1, 1, 8, 1, dtype)
    assert layout.data_bytes == 2 * bits  # K and V, 8 numbers of so many bits
    assert layout.block_bytes - layout.data_bytes == (2 * 4 if dtype in QUANTISED else 0)


@pytest.mark.parametrize(("dtype", "share"), [("fp8_e4m3", 2), ("int8", 2), ("int4", 4)])
def test_a_quantised_block_is_a_half_or_a_quarter_and_its_scales(dtype, share):
    quantised = replace(SMOLLM2, dtype=dtype)
    assert quantised.data_bytes == SMOLLM2.block_bytes // share
    assert quantised.scale_bytes == 30 * 2 * 3 * 4


def test_quantised_numbers_that_fill_no_whole_words_are_refused():
    with pytest.raises(ConfigError, match="whole number of words"):
        gqa_group(1, 1, 7, 1, "int4")


def test_only_how_numbers_are_stored_may_differ_between_a_block_and_its_copy():
    assert all(SMOLLM2.holds_the_same_as(replace(SMOLLM2, dtype=dtype)) for dtype in DTYPE_BITS)
    others = {"layers": (0, 1), "planes": ((3, 64),), "block_size": 2, "window": 128}
    assert others.keys() | {"dtype"} == {field.name for field in fields(KvGroup)}
    assert not any(SMOLLM2.holds_the_same_as(replace(SMOLLM2, **{name: value})) for name, value in others.items())


def test_planes_may_have_different_shapes():
    latent = KvGroup((0, 1), ((1, 512), (1, 64)), 16, "bfloat16")
    assert latent.block_bytes == 2 * (512 + 64) * 16 * 2
    assert replace(latent, dtype="int8").scale_bytes == 2 * 2 * 4


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0)])
def test_a_group_lists_its_layers_in_order(layers):
    with pytest.raises(ConfigError, match="layers in ascending order"):
        KvGroup(layers, ((1, 8),), 16, "bfloat16")


WIDE = KvGroup((0, 2), ((4, 64), (4, 64)), 16, "bfloat16")
NARROW = KvGroup((1,), ((1, 16),), 16, "int8", window=128)


def test_a_spec_adds_up_its_groups():
    spec = KvSpec((WIDE, NARROW))
    assert spec.block_bytes == WIDE.block_bytes + NARROW.block_bytes
    assert spec.bytes_per_token == ceil_div(spec.block_bytes, 16)
    assert (spec.block_size, spec.blocks_for(17), spec.quantised) == (16, 2, True)


def test_a_spec_names_the_dtypes_of_its_groups():
    assert KvSpec((WIDE,)).dtype == KvSpec((WIDE, replace(NARROW, dtype="bfloat16"))).dtype == "bfloat16"
    assert KvSpec((WIDE, NARROW)).dtype == "bfloat16+int8"


def test_specs_hold_the_same_when_each_group_does():
    spec = KvSpec((WIDE, NARROW))
    assert spec.holds_the_same_as(KvSpec((replace(WIDE, dtype="int8"), NARROW)))
    assert not spec.holds_the_same_as(KvSpec((WIDE,)))
    assert not spec.holds_the_same_as(KvSpec((NARROW, WIDE)))


def test_groups_share_one_block_size_and_no_layer():
    with pytest.raises(ConfigError, match="one block size"):
        KvSpec((WIDE, replace(NARROW, block_size=8)))
    with pytest.raises(ConfigError, match="each layer belongs to one"):
        KvSpec((WIDE, WIDE))
    for groups in ((), tuple(replace(NARROW, layers=(i,)) for i in range(17))):
        with pytest.raises(ConfigError, match="1 to 16 KV groups"):
            KvSpec(groups)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_the_last_block_may_be_partly_filled(tokens, blocks):
    assert SMOLLM2.blocks_for(tokens) == blocks


@given(a=st.integers(0, 1 << 70), b=st.integers(1, 1 << 40))
def test_ceil_div_is_exact_for_any_size(a, b):
    quotient = ceil_div(a, b)
    assert (quotient - 1) * b < a <= quotient * b


def test_unset_the_longest_request_is_what_model_and_pool_both_hold():
    assert fit_max_model_len(None, 8192, 11_648) == 8192
    assert fit_max_model_len(None, 8192, 1024) == 1024
    assert fit_max_model_len(1000, 8192, 1024) == 1000


def test_asking_for_too_much_names_the_knob():
    with pytest.raises(ConfigError, match=r"max_model_len 8193 is over the model's own limit of 8192"):
        fit_max_model_len(8193, 8192, 1 << 20)
    with pytest.raises(ConfigError, match=r"raise kv_cache_memory or lower max_model_len"):
        fit_max_model_len(8192, 8192, 8191)


def test_requests_of_any_length_fit_pools_whose_layers_all_have_windows():
    """A group that keeps all tokens, and one whose pool is too small for its window, bound the longest request."""
    narrow, wide = (KvGroup((layer,), ((1, 8),), 16, "float32", window) for layer, window in ((0, 13), (1, 64)))
    both, mixed = KvSpec((narrow, wide)), KvSpec((narrow, KvGroup((2,), ((1, 8),), 16, "float32"), wide))
    assert (narrow.least_pool, wide.least_pool) == (6, 15)
    assert both.longest_tokens((15, 15)) is None
    assert both.longest_tokens((15, 14)) == 14 * 16
    assert both.pool_tokens((20, 15)) == 15 * 16
    assert both.held_tokens((15, 15)) == wide.least_promise * 16 == 6 * 16
    assert both.held_tokens((15, 14)) == 0
    assert mixed.longest_tokens((6, 40, 15)) == 40 * 16
    assert mixed.held_tokens((6, 40, 15)) == 0
    assert fit_max_model_len(None, 8192, None) == fit_max_model_len(8192, 8192, None) == 8192
    with pytest.raises(ConfigError, match=r"max_model_len 8193 is over the model's own limit"):
        fit_max_model_len(8193, 8192, None)
