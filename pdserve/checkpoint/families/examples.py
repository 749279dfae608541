"""A small configuration of each architecture, with the features of its published models, for `pdserve models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
_LATENT: Final = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "hidden_act": "silu",
}  # fmt: skip
_EXPERTS: Final = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "LlamaForCausalLM": {},
    "DeciLMForCausalLM": {"num_key_value_heads_per_layer": [4, 1]},
    "MistralForCausalLM": {"sliding_window": 64},
    "Phi3ForCausalLM": {"sliding_window": 64},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen2MoeForCausalLM": {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 64},
    "Qwen3MoeForCausalLM": _EXPERTS,
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "Gemma2ForCausalLM": {"sliding_window": 64, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "Gemma3ForCausalLM": {
        "sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": {**_SIZES, "sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
        "tie_word_embeddings": True,
    },
    "DeepseekV2ForCausalLM": {**_LATENT, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    "DeepseekV3ForCausalLM": {**_LATENT, "norm_topk_prob": True},
}  # fmt: skip


def example(architecture: str) -> Mapping[str, Any]:
    """Return the configuration. Raises `KeyError` for an architecture without an example."""
    return {**_SIZES, **_OWN[architecture], "architectures": [architecture]}
