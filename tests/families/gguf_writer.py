"""Gemma 3 checkpoints written as GGUF files, as llama.cpp's converter writes them.

The names of tensors and of metadata are those of the package `gguf`, so that no table of ours is compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = 4 + 256
Change = Callable[[gguf.GGUFWriter], None]


def write_gemma(
    path: Path, config: Any, tensors: Mapping[str, np.ndarray], *changes: Change, leave_out: tuple[str, ...] = ()
) -> Path:
    """Write a checkpoint. config: that of transformers. changes: add to the file. leave_out: tensors or settings."""
    writer = gguf.GGUFWriter(path, "gemma3")
    _describe(writer, config)
    _add_tokenizer(writer, config.vocab_size)
    for change in changes:
        change(writer)
    for key in leave_out:
        for values in writer.kv_data:
            values.pop(key, None)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        if stored not in leave_out:
            writer.add_tensor(stored, tensor + np.float32(1) if name.endswith("norm.weight") else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [chr(0x4E00 + index) for index in range(size - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * (size - NAMES)])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_space_prefix(False)
