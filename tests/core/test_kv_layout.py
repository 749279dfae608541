"""The size of a KV block, and the longest request that model and pool can hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import DTYPE_BITS, QUANTISED, KvLayout, ceil_div, fit_max_model_len

SMOLLM2 = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")


def test_the_default_models_block_is_360_kib():
    assert SMOLLM2.bytes_per_token == 23_040
    assert SMOLLM2.block_bytes == 360 << 10


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
def test_bytes_follow_the_dtype(dtype, bits):
    layout = KvLayout(1, 1, 8, 1, dtype)
    assert layout.data_bytes == 2 * bits  # K and V, 8 numbers of so many bits
    assert layout.block_bytes - layout.data_bytes == (2 * 4 if dtype in QUANTISED else 0)


@pytest.mark.parametrize(("dtype", "share"), [("fp8_e4m3", 2), ("int8", 2), ("int4", 4)])
def test_a_quantised_block_is_a_half_or_a_quarter_and_its_scales(dtype, share):
    quantised = replace(SMOLLM2, dtype=dtype)
    assert quantised.data_bytes == SMOLLM2.block_bytes // share
    assert quantised.scale_bytes == 30 * 2 * 3 * 4


def test_quantised_numbers_that_fill_no_whole_words_are_refused():
    with pytest.raises(ConfigError, match="whole number of words"):
        KvLayout(1, 1, 7, 1, "int4")


def test_only_how_numbers_are_stored_may_differ_between_a_block_and_its_copy():
    assert all(SMOLLM2.holds_the_same_as(replace(SMOLLM2, dtype=dtype)) for dtype in DTYPE_BITS)
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        assert not SMOLLM2.holds_the_same_as(replace(SMOLLM2, **{name: 2}))


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
