"""GGUF files for llama.cpp, made of a checkpoint: the weights of the other engines, rounded to a named format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors import safe_open

from bench.engine.peers.install import NotInstalled
from pdserve.checkpoint.cache import build_once, default_cache_dir
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import llama_layers
from pdserve.checkpoint.layout import weight_files

_NAMES: Final = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTER: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_file(directory: Path, card: ModelCard, kind: str) -> Path:
    """Return the GGUF file of a checkpoint. It is written once, into the cache.

    kind: a name of `GGMLQuantizationType`, such as Q8_0. Raises `NotInstalled` for models other than Llama.
    """
    if card.architecture != "LlamaForCausalLM":
        raise NotInstalled(f"GGUF files are made for LlamaForCausalLM only, not for {card.architecture}")
    folder = default_cache_dir() / "peers" / f"gguf-{directory.name}-{kind}"
    return build_once(folder, lambda scratch: _write(directory, card, kind, scratch / "model.gguf")) / "model.gguf"


def _write(directory: Path, card: ModelCard, kind: str, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, card)
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name == "lm_head.weight" and card.spec.tied_head:
                    continue
                _add(writer, card, name.removesuffix(".weight"), tensors.get_tensor(name), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, card: ModelCard) -> None:
    """Write the model's description, without a tokenizer: the benchmark uses token ids."""
    writer.add_context_length(card.max_position)
    attention, mlp = next(llama_layers(card.spec))
    writer.add_embedding_length(card.spec.hidden_size)
    writer.add_block_count(len(card.spec.layers))
    writer.add_feed_forward_length(mlp.intermediate)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.qk_dim)
    writer.add_value_length(attention.v_dim)
    writer.add_rope_dimension_count(attention.qk_dim)
    writer.add_rope_freq_base(attention.rope.theta)
    writer.add_layer_norm_rms_eps(card.spec.norm.eps)
    writer.add_vocab_size(card.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _add(writer: Any, card: ModelCard, name: str, weight: torch.Tensor, kind: str) -> None:
    data = weight.float().numpy()
    attention = card.spec.layers[0].attention
    heads = {"self_attn.q_proj": attention.heads, "self_attn.k_proj": attention.kv_heads}
    layer, _, inner = name.removeprefix("model.layers.").partition(".")
    if inner in heads:
        data = _by_pairs(data, heads[inner])
    target = _OUTER[name] if name in _OUTER else f"blk.{layer}.{_NAMES[inner]}"
    to = gguf.GGMLQuantizationType["F32" if data.ndim == 1 else kind]
    writer.add_tensor(f"{target}.weight", gguf.quants.quantize(data, to), raw_dtype=to)


def _by_pairs(data: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder rows for llama.cpp's rotary embedding: dimensions i and i + half of a head become neighbours."""
    return np.ascontiguousarray(data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape))
