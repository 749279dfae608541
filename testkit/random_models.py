"""Tiny checkpoints of every family, made by transformers, in which every parameter is random: for tests.

What an initialisation leaves at zero or one (biases, norms, the bias that corrects the choice of experts) would hide that it
is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from pdserve.checkpoint.tiny import write_tiny

_SEED: Final = 20170612
_BASE: Final[Mapping[str, Any]] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-2, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
"""The sizes of all models. The eps is large, so that another one changes the logits."""
_HEAD: Final = {"head_dim": 32}
"""A size of a head other than hidden_size / num_attention_heads."""
_EXPERTS: Final = {"num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
_GEMMA: Final = {
    **_HEAD, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 12, "query_pre_attn_scalar": 40,
    "final_logit_softcapping": 4.0, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA3: Final = {
    **_GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
    },
}  # fmt: skip
_YARN: Final = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
_LATENT: Final = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_routed_experts": 8, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "rope_parameters": _YARN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model to make: the name of its class in transformers, and settings on top of those of all models. vision: settings of
    the part that reads images. None: the model has none."""

    architecture: str
    settings: Mapping[str, Any]
    vision: Mapping[str, Any] | None = None

    def config(self, config_class: Any, settings: Mapping[str, Any]) -> Any:
        """Make the configuration. settings: more settings, of the language model."""
        all_settings = {**_BASE, **self.settings, **settings}
        if self.vision is None:
            return config_class(**all_settings)
        tied = all_settings["tie_word_embeddings"]
        return config_class(text_config=all_settings, vision_config=dict(self.vision), tie_word_embeddings=tied)


RANDOM_MODELS: Final[Mapping[str, RandomModel]] = {
    "llama": RandomModel("LlamaForCausalLM", {**_HEAD, "num_key_value_heads": 1}),
    "llama-biased": RandomModel("LlamaForCausalLM", {
        **_HEAD, "num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }),
    "mistral": RandomModel("MistralForCausalLM", {"head_dim": None, "sliding_window": 13}),
    "phi3": RandomModel("Phi3ForCausalLM", {
        "sliding_window": 21,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    }),
    "qwen2": RandomModel("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": RandomModel("Qwen3ForCausalLM", {
        **_HEAD, "rope_parameters": {**_YARN, "rope_theta": 1e6, "mscale": None, "mscale_all_dim": None},
    }),
    "mixtral": RandomModel("MixtralForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2-moe": RandomModel("Qwen2MoeForCausalLM", {
        **_EXPERTS, "num_experts": 6, "norm_topk_prob": False, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1],
    }),
    "qwen3-moe": RandomModel("Qwen3MoeForCausalLM", {**_EXPERTS, **_HEAD, "num_experts": 8, "decoder_sparse_step": 2}),
    "gemma2": RandomModel("Gemma2ForCausalLM", {**_GEMMA, "attn_logit_softcapping": 1.5}),
    "gemma3": RandomModel("Gemma3ForCausalLM", _GEMMA3),
    "gemma3-images": RandomModel("Gemma3ForConditionalGeneration", {**_GEMMA3, "final_logit_softcapping": None}, {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }),
    "deepseek-v2": RandomModel("DeepseekV2ForCausalLM", {**_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek-v2-lite": RandomModel("DeepseekV2ForCausalLM", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3": RandomModel("DeepseekV3ForCausalLM", {**_LATENT, "norm_topk_prob": True}),
}  # fmt: skip
"""The models by name. Together they have every feature of every family."""


def write_random(directory: Path, name: str, **settings: Any) -> Any:
    """Write a model of `RANDOM_MODELS` with the tiny model's tokenizer into the empty `directory`. Return transformers' model.

    settings: settings of the configuration on top of the model's own. The model returned computes in float64.
    """
    import transformers

    model_of = getattr(transformers, RANDOM_MODELS[name].architecture)
    config = RANDOM_MODELS[name].config(model_of.config_class, settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the other ways refuse float64
    model = model_of(config).eval()
    with torch.no_grad():
        _randomise(model, plus_one="gemma" in name)
    write_tiny(directory)
    for old in ("config.json", "generation_config.json", "model.safetensors"):
        (directory / old).unlink()
    model.save_pretrained(directory)
    return model.double()


def reference_logits(model: Any, ids: list[int]) -> Tensor:
    """Return the logits of every token of one sequence: [tokens, vocab] float64."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def _randomise(model: torch.nn.Module, plus_one: bool) -> None:
    """Draw every parameter, and the buffers that a checkpoint stores. plus_one: norms add one to their weights."""
    random = torch.Generator().manual_seed(_SEED)
    for name, tensor in model.state_dict().items():
        tensor.copy_(_drawn(name, tensor.shape, random, plus_one))


def _drawn(name: str, shape: torch.Size, random: torch.Generator, plus_one: bool) -> Tensor:
    """Draw a tensor. The scales keep the residual stream at a few units and attention neither flat nor on a single token."""
    unit = torch.rand(shape, generator=random) * 2 - 1
    if "norm" in name:
        return unit * 0.25 + (0 if plus_one else 1)
    if name.endswith("bias"):
        return unit * 0.3
    if "embed" in name:
        return unit * (0.25 if plus_one else 1.0)
    return unit * (0.4 if "gate.weight" in name or "lm_head" in name else 0.3)
