"""The operations and bytes of steps, against slow sums over single tokens and against published figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.model_spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
)
from pdserve.core.roofline import (
    LayerShape,
    ModelShape,
    StepFlops,
    StepTraffic,
    attended,
    causal_pairs,
    dense_mlp,
    gqa_attention,
    mla_attention,
    moe_mlp,
)

LLAMA_8B = ModelShape(128256, 4096, ((LayerShape(gqa_attention(4096, 32, 8, 128, 128), dense_mlp(4096, 14336)), 32),), False)
LLAMA_70B = ModelShape(128256, 8192, ((LayerShape(gqa_attention(8192, 64, 8, 128, 128), dense_mlp(8192, 28672)), 80),), False)
_MLA = mla_attention(7168, 128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
DEEPSEEK_V3 = ModelShape(
    129280,
    7168,
    (
        (LayerShape(_MLA, dense_mlp(7168, 18432)), 3),
        (LayerShape(_MLA, moe_mlp(7168, 2048, experts=256, experts_per_token=8, shared=2048)), 58),
    ),
    False,
)
WINDOWS = st.none() | st.integers(1, 40)


@given(st.integers(0, 60), st.integers(0, 60), WINDOWS)
def test_pairs_are_the_sum_over_single_tokens(start: int, count: int, window: int | None) -> None:
    slow = sum(min(position + 1, window or position + 1) for position in range(start, start + count))
    assert causal_pairs(start, count, window) == slow
    assert attended(range(start, start + count), window) == slow


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), max_size=5), WINDOWS)
def test_chunks_add_up_to_their_prompt(cuts: list[tuple[int, int]], window: int | None) -> None:
    layer = LayerShape(gqa_attention(64, 4, 2, 16, 16, window=window), dense_mlp(64, 128))
    flops = StepFlops.of(ModelShape(100, 64, ((layer, 3),), True))
    start, parts = 0, 0.0
    for _, count in cuts:
        parts += flops.chunk(start, count)
        start += count
    assert parts == flops.chunk(0, start)


@given(st.lists(st.integers(0, 1000), max_size=20), WINDOWS)
def test_a_step_of_decodes_is_the_sum_of_its_sequences(starts: list[int], window: int | None) -> None:
    layer = LayerShape(gqa_attention(64, 4, 2, 16, 16, window=window), dense_mlp(64, 128))
    shape = ModelShape(100, 64, ((layer, 3),), True)
    flops, traffic = StepFlops.of(shape), StepTraffic.of(shape, weight_bits=16, kv_bits=8)
    assert flops.decodes(starts) == sum(flops.chunk(start, 1, 1) for start in starts)
    assert traffic.decodes(starts) == traffic.fixed + sum(traffic.kv([start]) for start in starts)


def test_parameters_are_those_that_are_published() -> None:
    assert LLAMA_8B.numbers == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_70B.numbers == pytest.approx(70.55e9, rel=1e-3)
    assert DEEPSEEK_V3.numbers == pytest.approx(671e9, rel=1e-3)
    assert DEEPSEEK_V3.active_layer_numbers + DEEPSEEK_V3.head_numbers == pytest.approx(37e9, rel=0.02)


def test_kv_of_a_token() -> None:
    assert LLAMA_70B.kv_numbers * 2 == 327_680
    assert DEEPSEEK_V3.kv_numbers * 2 == 70_272


def test_a_window_bounds_the_kv_of_a_sequence_and_its_reads() -> None:
    windowed = LayerShape(gqa_attention(64, 4, 2, 16, 16, window=10), dense_mlp(64, 128))
    whole = LayerShape(gqa_attention(64, 4, 2, 16, 16), dense_mlp(64, 128))
    shape = ModelShape(100, 64, ((windowed, 5), (whole, 1)), True)
    assert shape.kv_numbers_of(100) == 64 * (5 * 10 + 100)
    assert StepTraffic.of(shape, weight_bits=16, kv_bits=8).kv([99]) == 64 * (5 * 10 + 100)


def test_a_prompt_costs_two_operations_for_each_number_and_token() -> None:
    assert StepFlops.of(LLAMA_70B).token == pytest.approx(2 * 68.45e9, rel=1e-3)
    assert StepFlops.of(LLAMA_70B).chunk(0, 1) == StepFlops.of(LLAMA_70B).token + 80 * 2 * 64 * 256


def test_a_decode_step_reads_all_weights_once_and_experts_as_tokens_choose_them() -> None:
    assert StepTraffic.of(LLAMA_70B, weight_bits=16, kv_bits=16).decodes([]) == pytest.approx(139e9, rel=0.01)
    moe = StepTraffic.of(DEEPSEEK_V3, weight_bits=8, kv_bits=16)
    assert moe.weights(1) == pytest.approx(DEEPSEEK_V3.active_layer_numbers + DEEPSEEK_V3.head_numbers)
    assert moe.weights(1) < moe.weights(64) < moe.weights(10_000) <= DEEPSEEK_V3.numbers
    assert moe.weights(10_000) == pytest.approx(DEEPSEEK_V3.layer_numbers + DEEPSEEK_V3.head_numbers)


def test_a_spec_and_its_shape_agree() -> None:
    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(AttentionSpec(9, 3, 64, 64, RopeSpec(1e4), window=window), DenseSpec(1536), NormSpec(1e-5))

    spec = ModelSpec(49152, 576, (layer(None), layer(512), layer(None)), NormSpec(1e-5), 8192, True)
    shape = ModelShape.of(spec)
    assert (shape.num_layers, len(shape.layers)) == (3, 2)
    assert (shape.numbers, shape.layer_numbers) == (spec.numbers, spec.layer_numbers)
    assert shape.kv_numbers * 2 == spec.kv_spec(16, "bfloat16").bytes_per_token


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 50), st.integers(0, 50), st.booleans(), st.none() | st.integers(1, 40)
)
def test_a_mixture_of_experts_and_latent_attention_have_the_numbers_of_their_spec(
    experts: int, chosen: int, width: int, shared: int, shared_gate: bool, q_rank: int | None
) -> None:
    norm = NormSpec(1e-6)
    attention = MlaSpec(4, 32, 16, 8, 12, RopeSpec(1e4), norm, q_rank=q_rank)
    mlp = MoeSpec(experts, min(chosen, experts), width, shared=shared, shared_gate=shared_gate)
    first = LayerSpec(attention, DenseSpec(70), norm)
    spec = ModelSpec(300, 48, (first, *[LayerSpec(attention, mlp, norm)] * 3), norm, 64, False)
    shape = ModelShape.of(spec)
    assert (shape.numbers, shape.layer_numbers) == (spec.numbers, spec.layer_numbers)
    unused = 3 * (mlp.experts - mlp.experts_per_token) * 3 * 48 * width
    assert shape.active_layer_numbers == spec.layer_numbers - unused
    assert StepFlops.of(shape).token == 2 * shape.active_layer_numbers
    assert StepTraffic.of(shape, weight_bits=8, kv_bits=8).weights(1) == pytest.approx(
        shape.active_layer_numbers + shape.head_numbers
    )
