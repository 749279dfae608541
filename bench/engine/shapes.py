"""Models of named shapes with random weights, for measurements of speed: families whose published weights are not at hand.

A shape is a published configuration. Its directory is written once, into the cache: bfloat16 weights in Hugging Face layout,
which every engine reads, and the tokenizer of the tiny model. Text is noise, and the time of a step does not depend on it;
only the experts that tokens choose are more even than in a trained model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from pdserve.checkpoint.cache import build_once, default_cache_dir
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.origin import write_origin
from pdserve.checkpoint.tiny import write_tiny
from pdserve.engine.loading.dummy import DummyTensors

VERSION: Final = 2  # raise it when the files of a shape change
_ALL: Final[Mapping[str, Any]] = {
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "rope_theta": 1e6, "tie_word_embeddings": True, "use_sliding_window": False,
    },
    "moe-1b": {  # 8 of 64 experts; 0.9 billion numbers, 0.2 of them for each token
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": 1024,
        "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 64, "rope_theta": 1e6, "tie_word_embeddings": False, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mla-small": {  # DeepSeek-V2-Lite's attention with half of its heads; no layer has experts
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 32000, "hidden_size": 1024,
        "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 8,
        "rope_theta": 1e4, "tie_word_embeddings": False, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 16, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "norm_topk_prob": False,
    },
}  # fmt: skip


def shape_directory(name: str) -> Path:
    """Return the directory of a shape of `SHAPES`. It is written once, into the cache."""
    return build_once(default_cache_dir() / "shapes" / f"{name}-{VERSION}", lambda scratch: _write(scratch, name))


def _write(directory: Path, name: str) -> None:
    write_tiny(directory)
    for old in ("config.json", "model.safetensors"):
        (directory / old).unlink()
    (directory / "config.json").write_text(json.dumps({**_ALL, **SHAPES[name]}, indent=2) + "\n")
    write_origin(directory, name=name, source=f"random weights of this shape, version {VERSION}")
    card = ModelCard.load(directory, load_format="dummy")
    shapes = card.tensors.shapes(card.spec)
    norms = {tensor for tensor, shape in shapes.items() if len(shape) == 1 and "norm" in tensor}
    tensors = {tensor: torch.empty(shape, dtype=torch.bfloat16) for tensor, shape in shapes.items()}
    with DummyTensors(norms, offset=card.spec.norm.offset).opened() as copy:
        for tensor, into in tensors.items():
            copy(tensor, into)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
