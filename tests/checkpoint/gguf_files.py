"""Small GGUF files: a Llama of one layer with a byte-level BPE tokenizer, any part of it changed or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pdserve.text.token_bytes import BYTES

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 4, 2, 8
SPECIALS = ["<|end|>", "<s>", "</s>", "<tool>"]
ALPHABET = sorted(BYTES)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
TOKENS = [*SPECIALS, *ALPHABET, *(left + right for left, right in MERGES)]
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"

METADATA: dict[str, Any] = {
    "general.name": "small",
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": 1,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(TOKENS) - 4),
    "tokenizer.ggml.merges": [f"{left} {right}" for left, right in MERGES],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 0,
    "tokenizer.chat_template": TEMPLATE,
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """By GGUF name, in Hugging Face's layout of rows (the writer below interleaves q and k as llama.cpp does)."""
    draw = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
        "output_norm.weight": (HIDDEN,),
    }
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """As convert_hf_to_gguf.py of llama.cpp permutes the rows of q and k."""
    rows, columns = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)).reshape(rows, columns)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """`metadata` and `tensors` change the defaults; None leaves one out. `quantised`: every matrix is."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | (metadata or {})).items():
        _add(writer, key, value)
    for name, tensor in (weights() | (tensors or {})).items():
        if tensor is None:
            continue
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        stored = interleaved(tensor, heads) if heads else tensor
        if quantised is not None and stored.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(stored, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
