"""Published configurations of every family, in their older and newer spelling, and what is refused by name."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.checkpoint.families.registry import FAMILIES, REFUSED, family_of
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import LinearScaling, Llama3Scaling, MlaSpec, MoeSpec, NormSpec, RopeSpec, YarnScaling

ROOT = Path(__file__).resolve().parents[2]
V3_ROPE = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
    "moe_layer_freq": 1, "rope_theta": 10000, "attention_bias": False,
}  # fmt: skip


def config(hidden, ffn, layers, heads, kv_heads, vocab, **others):
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, **others,
    }  # fmt: skip


PUBLISHED = {
    "llama 2 7B": ("LlamaForCausalLM", 6.74, config(4096, 11008, 32, 32, 32, 32000, rope_scaling=None, pretraining_tp=1)),
    "mistral 7B": ("MistralForCausalLM", 7.24, config(4096, 14336, 32, 32, 8, 32000, sliding_window=4096)),
    "phi 3 mini": ("Phi3ForCausalLM", 3.82, config(3072, 8192, 32, 32, 32, 32064, sliding_window=2047, rope_scaling=None)),
    "qwen 2.5 7B": ("Qwen2ForCausalLM", 7.62, config(
        3584, 18944, 28, 28, 4, 152064, use_sliding_window=False, sliding_window=131072, max_window_layers=28)),
    "qwen 3 8B": ("Qwen3ForCausalLM", 8.19, config(4096, 12288, 36, 32, 8, 151936, head_dim=128, attention_bias=False)),
    "mixtral 8x7B": ("MixtralForCausalLM", 46.7, config(
        4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)),
    "qwen 1.5 moe": ("Qwen2MoeForCausalLM", 14.3, config(
        2048, 5632, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, decoder_sparse_step=1, norm_topk_prob=False, use_sliding_window=False,
        sliding_window=32768)),
    "qwen 3 30B": ("Qwen3MoeForCausalLM", 30.5, config(
        2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, sliding_window=None)),
    "gemma 2 2B": ("Gemma2ForCausalLM", 2.61, config(
        2304, 9216, 26, 8, 4, 256000, head_dim=256, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=256, sliding_window=4096)),
    "gemma 3 1B": ("Gemma3ForCausalLM", 1.00, config(
        1152, 6912, 26, 4, 1, 262144, head_dim=256, hidden_activation="gelu_pytorch_tanh", rope_local_base_freq=10000,
        rope_theta=1000000, sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=256,
        attn_logit_softcapping=None, final_logit_softcapping=None)),
    "gemma 3 4B": ("Gemma3ForConditionalGeneration", 3.88, {
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
        "mm_tokens_per_image": 256, "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }),
    "deepseek v2 lite": ("DeepseekV2ForCausalLM", 15.7, config(
        2048, 10944, 27, 16, 16, 102400, **LATENT, q_lora_rank=None, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, topk_method="greedy", n_group=1,
        topk_group=1, routed_scaling_factor=1.0, scoring_func="softmax", norm_topk_prob=False,
        rope_scaling={**V3_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707})),
    "deepseek v3": ("DeepseekV3ForCausalLM", 671.0, config(
        7168, 18432, 61, 128, 128, 129280, **LATENT, q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, topk_method="noaux_tc", n_group=8,
        topk_group=4, routed_scaling_factor=2.5, scoring_func="sigmoid", norm_topk_prob=True, num_nextn_predict_layers=1,
        rope_scaling=V3_ROPE)),
}  # fmt: skip
"""The architecture, the published number of parameters in billions, and the settings that matter."""


def read(name, *without, **changes):
    architecture, _, published = PUBLISHED[name]
    return family_of(architecture).read({key: v for key, v in {**published, **changes}.items() if key not in without})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_size(name):
    """Names and shapes have it too, which differ from matrices by norms and biases alone."""
    spec, (architecture, billions, _) = read(name), PUBLISHED[name]
    assert spec.numbers / 1e9 == pytest.approx(billions, rel=0.002 if billions > 1 else 0.005)
    stored = sum(math.prod(shape) for shape in family_of(architecture).tensors.shapes(spec).values())
    assert spec.numbers <= stored <= 1.001 * spec.numbers


def test_a_window_is_that_of_the_layers_that_have_it():
    def windows(name, *without, **changes):
        return [layer.attention.window for layer in read(name, *without, **{"num_hidden_layers": 4, **changes}).layers]

    assert windows("mistral 7B", "sliding_window") == windows("mistral 7B") == [4096] * 4
    assert windows("mistral 7B", sliding_window=None) == windows("mixtral 8x7B") == windows("qwen 2.5 7B") == [None] * 4
    assert windows("phi 3 mini") == [2047] * 4
    used = {"use_sliding_window": True, "sliding_window": 64}
    assert windows("qwen 2.5 7B", **used, max_window_layers=3) == [None, None, None, 64]
    assert windows("qwen 3 8B", **used, max_window_layers=0) == [64] * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows("qwen 2.5 7B", **used, layer_types=kinds) == [None, 64, None, 64]
    assert windows("gemma 2 2B") == [4096, None] * 2
    assert windows("gemma 3 1B", num_hidden_layers=7) == [512] * 5 + [None, 512]
    assert windows("gemma 3 1B", sliding_window_pattern=2) == [512, None] * 2
    assert windows("gemma 3 1B", "sliding_window_pattern", layer_types=kinds) == [None, 512] * 2


def test_gemma_has_two_thetas_in_either_spelling():
    old = read("gemma 3 1B", rope_scaling={"rope_type": "linear", "factor": 8.0})
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    new = read("gemma 3 1B", "rope_theta", "rope_local_base_freq", rope_parameters={
        "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    })  # fmt: skip
    assert old == new
    assert old.layers[0].attention.rope == RopeSpec(1e4)
    assert old.layers[5].attention.rope == RopeSpec(1e6, LinearScaling(8.0))
    assert old.layers[0].norms == NormSpec(1e-6, offset=1.0) == old.norm == old.layers[0].attention.qk_norm
    assert (old.embedding_scale, old.tied_head, old.layers[0].post_norms) == (1152**0.5, True, True)
    with pytest.raises(ConfigError, match="rope_parameters must have an object for each of full_attention"):
        read("gemma 3 1B", rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def test_thetas_outside_of_the_newer_spelling_count_where_it_has_none():
    plain = {"rope_type": "default"}
    rope = {"full_attention": plain, "sliding_attention": plain}
    found = read("gemma 3 1B", rope_theta=3e5, rope_local_base_freq=2e4, rope_parameters=rope)
    assert (found.layers[5].attention.rope, found.layers[0].attention.rope) == (RopeSpec(3e5), RopeSpec(2e4))
    with pytest.raises(ConfigError, match=r"rope_local_base_freq is 10000, and 5\.0 in rope_parameters"):
        read("gemma 3 1B", rope_parameters={**rope, "sliding_attention": {**plain, "rope_theta": 5.0}})


def test_scores_of_deepseek_are_enlarged_by_yarn():
    attention = read("deepseek v3").layers[0].attention
    assert isinstance(attention, MlaSpec)
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert attention.rope == RopeSpec(1e4, YarnScaling(40.0, 4096), neighbours=True)
    assert (attention.norm, attention.q_rank) == (NormSpec(1e-6), 1536)
    unscaled = read("deepseek v3", rope_scaling=None, rope_interleave=False, rms_norm_eps=1e-3).layers[0].attention
    assert unscaled == replace(attention, scale=None, rope=RopeSpec(1e4))
    uneven = read("deepseek v2 lite", rope_scaling={**V3_ROPE, "mscale": 0.5, "mscale_all_dim": 2.0}).layers[0].attention
    size = (0.05 * math.log(40) + 1) / (0.2 * math.log(40) + 1)
    assert uneven.rope.scaling.attention_factor == pytest.approx(size)
    assert uneven.scale == pytest.approx(192**-0.5 * (0.2 * math.log(40) + 1) ** 2)


def test_the_mixtures_route_as_published():
    assert read("mixtral 8x7B").layers[0].mlp == MoeSpec(8, 2, 14336)
    assert read("qwen 3 30B").layers[0].mlp == MoeSpec(128, 8, 768)
    assert read("qwen 3 30B", "norm_topk_prob").layers[0].mlp == MoeSpec(128, 8, 768, renormalise=False)
    shared = MoeSpec(60, 4, 1408, renormalise=False, shared=5632, shared_gate=True)
    assert read("qwen 1.5 moe").layers[0].mlp == shared
    assert read("deepseek v2 lite").layers[1].mlp == MoeSpec(64, 6, 1408, renormalise=False, shared=2816)
    grouped = read("deepseek v2 lite", topk_method="group_limited_greedy", n_group=8, topk_group=3).layers[1].mlp
    assert (grouped.groups, grouped.top_groups, grouped.group_score) == (8, 3, "best")
    third = MoeSpec(256, 8, 2048, "sigmoid", True, 2.5, True, 8, 4, "best_two", 2048)
    assert read("deepseek v3").layers[3].mlp == third
    assert [isinstance(layer.mlp, MoeSpec) for layer in read("deepseek v3").layers[:4]] == [False, False, False, True]
    sparse = read("qwen 3 30B", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]).layers
    assert [isinstance(layer.mlp, MoeSpec) for layer in sparse] == [False, True, False, False]


def test_the_number_of_experts_has_two_names():
    new = read("qwen 3 30B", "num_experts", num_local_experts=128)
    assert new == read("qwen 3 30B") == read("qwen 3 30B", num_local_experts=128)
    with pytest.raises(ConfigError, match="num_experts is 128 and num_local_experts 64"):
        read("qwen 3 30B", num_local_experts=64)


def test_biases_are_those_of_the_family():
    def biases(name, **changes):
        attention = read(name, num_hidden_layers=1, **changes).layers[0].attention
        return attention.bias, attention.out_bias

    assert biases("llama 2 7B") == biases("qwen 3 8B") == biases("qwen 1.5 moe", qkv_bias=False) == (False, False)
    assert biases("qwen 2.5 7B") == biases("qwen 1.5 moe") == (True, False)
    assert biases("llama 2 7B", attention_bias=True) == biases("qwen 3 8B", attention_bias=True) == (True, True)


def test_a_part_of_a_head_is_rotated_by_phi():
    assert read("phi 3 mini", partial_rotary_factor=0.75).layers[0].attention.rope == RopeSpec(1e4, dim=72)
    nested = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert read("phi 3 mini", rope_parameters=nested).layers[0].attention.rope == RopeSpec(1e4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_scalings_of_positions():
    def rope(**changes):
        return read("qwen 3 8B", num_hidden_layers=1, **changes).layers[0].attention.rope

    yarn = RopeSpec(1e4, YarnScaling(4.0, 32768, attention_factor=0.1 * math.log(4) + 1))
    assert rope(rope_scaling=YARN) == rope(rope_parameters={**YARN, "rope_theta": 1e4}) == yarn
    assert rope(rope_scaling={**YARN, "attention_factor": 1.5}).scaling.attention_factor == 1.5
    assert rope(rope_scaling={**YARN, "factor": None, "attention_factor": None}, max_position_embeddings=131072) == yarn
    assert rope(rope_scaling={"type": "linear", "factor": 2}) == RopeSpec(1e4, LinearScaling(2.0))
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert rope(rope_scaling={"rope_type": "llama3", **llama3}).scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


REFUSALS = [
    ("llama 2 7B", {"mlp_bias": True}, "mlp_bias is not supported"),
    ("llama 2 7B", {"sliding_window": 4096}, "sliding_window is not supported"),
    ("llama 2 7B", {"layer_types": ["sliding_attention"]}, "layer_types other than 'full_attention'"),
    ("llama 2 7B", {"layer_types": ["chunked_attention"]}, "layer_types must be a list of"),
    ("llama 2 7B", {"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
    ("llama 2 7B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("llama 2 7B", {"embedding_multiplier": 12.0}, "embedding_multiplier is not supported"),
    ("llama 2 7B", {"attention_multiplier": 0.5}, "attention_multiplier is not supported"),
    ("llama 2 7B", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
    ("llama 2 7B", {"rope_scaling": {**YARN, "finetuned": True}}, "rope setting finetuned is not supported with .*'yarn'"),
    ("llama 2 7B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn rope scaling lacks original_max_position"),
    ("llama 2 7B", {"rope_scaling": YARN, "original_max_position_embeddings": 8}, "is 8, and 32768 in the rope scaling"),
    ("llama 2 7B", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta must be above 1"),
    ("llama 2 7B", {"rope_scaling": {**YARN, "truncate": 1}}, "truncate must be true or false"),
    ("llama 2 7B", {"rope_scaling": {**YARN, "beta_slow": 5e-324}}, "beta_slow must be at least 1e-09, got 4.94066e-324"),
    ("llama 2 7B", {"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_fast must be at least beta_slow 1, got 0.5"),
    ("mistral 7B", {"layer_types": ["full_attention"] * 32}, "layer_types is not supported"),
    ("mistral 7B", {"sliding_window": 0}, "sliding_window must be an integer from 1"),
    (
        "llama 2 7B",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        "factor is 4.0 and 2.0 in two spellings",
    ),
    (
        "llama 2 7B",
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "rope_type is 'linear' and 'yarn'",
    ),
    ("llama 2 7B", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000.0 and 10000.0 in two"),
    (
        "gemma 3 1B",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"rope_type": "default"},
            },
        },
        "rope_type is 'default' and 'linear' in two spellings",
    ),
    ("mistral 7B", {"text_config": {"hidden_size": 8}}, "text_config is not supported"),
    ("phi 3 mini", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "rope scaling 'longrope'"),
    ("phi 3 mini", {"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 rotates 0 of 96"),
    ("qwen 2.5 7B", {"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_config is not supported"),
    ("qwen 2.5 7B", {"layer_types": ["full_attention"]}, "layer_types has 1 names for 28 layers"),
    ("qwen 2.5 7B", {"layer_types": ["sliding_attention"] * 28}, "sliding_window must be an integer"),
    (
        "qwen 2.5 7B",
        {"use_sliding_window": True, "max_window_layers": -1},
        "max_window_layers must be an integer of at least 0",
    ),
    ("qwen 1.5 moe", {"use_sliding_window": True}, "use_sliding_window is not supported"),
    ("qwen 3 30B", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size 8 is not supported"),
    ("qwen 3 30B", {"mlp_only_layers": [48]}, "mlp_only_layers must be a list of numbers of the 48 layers"),
    ("qwen 3 30B", {"num_experts_per_tok": 129}, "experts_per_token 129 is more than the experts"),
    ("mixtral 8x7B", {"num_local_experts": 2**31 - 1}, "have 68719476704 experts together, over the limit of 65536"),
    ("deepseek v3", {"n_routed_experts": 2**30}, "experts together, over the limit of 65536"),
    ("mixtral 8x7B", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
    ("gemma 3 1B", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ("gemma 3 1B", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ("gemma 3 1B", {"hidden_activation": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("gemma 3 1B", {"final_logit_softcapping": -1.0}, "final_logit_softcapping must be a finite number above 0"),
    ("gemma 3 4B", {"text_config": None}, "text_config must be an object, got None"),
    ("gemma 3 4B", {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping is not supported"),
    ("gemma 3 4B", {"text_config": {"attn_logit_softcapping": 50.0}}, "attn_logit_softcapping is not supported"),
    ("gemma 3 4B", {"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
    ("deepseek v2 lite", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
    ("deepseek v2 lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; supported: 'greedy'"),
    ("deepseek v2 lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    ("deepseek v3", {"attention_bias": True}, "attention_bias is not supported"),
    ("deepseek v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
    ("deepseek v3", {"num_key_value_heads": 64}, "num_key_value_heads 64 is not supported; supported: 128"),
    ("deepseek v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
    ("deepseek v3", {"first_k_dense_replace": 62}, "first_k_dense_replace must be an integer from 0 to 61"),
    ("deepseek v3", {"n_group": 7}, "4 of 7 groups of 256 experts cannot be chosen"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSALS)
def test_a_setting_that_would_change_numbers_is_refused_by_name(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        read(name, **changes)


def test_an_architecture_that_no_backend_computes_is_refused_with_the_reason():
    for architecture in REFUSED:
        assert architecture not in FAMILIES
        with pytest.raises(ConfigError, match=f"architecture {architecture} is not supported: its attention has sinks"):
            family_of(architecture)


def test_every_family_is_known_by_its_own_architecture():
    assert {family_of(architecture).architecture for architecture in FAMILIES} == set(FAMILIES)


def test_the_page_of_models_has_a_row_for_every_architecture():
    rows = re.findall(r"^\| `(\w+For\w+)` \|", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(FAMILIES)


def test_a_language_model_that_leaves_sizes_out_has_those_of_the_reference():
    """Published models with images write only the sizes that differ from the defaults of transformers."""
    transformers = pytest.importorskip("transformers")
    whole = transformers.Gemma3TextConfig().to_dict()
    assert read("gemma 3 4B", text_config={}) == family_of("Gemma3ForCausalLM").read(whole)
