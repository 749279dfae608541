"""The description of an architecture of GGUF files in the terms of a family: settings, names and layout of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.gguf.metadata import Metadata
from pdserve.core.errors import ConfigError

Array = NDArray[np.float32]

EMBEDDING, NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    layer: the name of each tensor of a layer, and its part (`families/parts.py`). config: returns the settings of config.json
    beside those of `plain_config`; it raises `ConfigError` that names what is not supported. restore: returns the tensor of a
    name in the layout of the family. extra: tensors that `config` reads, and that no checkpoint has.
    """

    family: Family
    layer: Mapping[str, str]
    config: Callable[[Metadata], dict[str, Any]]
    restore: Callable[[Metadata, str, Array], Array]
    extra: tuple[str, ...] = ()

    def tensor_map(self, metadata: Metadata) -> dict[str, str]:
        """Return the GGUF name of each name of the family, in the file's order.

        Raises `ConfigError` for missing or unknown tensors.
        """
        gguf, names = metadata.gguf, self.family.tensors
        expected = {EMBEDDING: names.embedding, NORM: names.norm, HEAD: names.head}
        for layer in range(metadata.require("block_count")):
            expected |= {f"blk.{layer}.{name}": names.of(part, layer) for name, part in self.layer.items()}
        present = [name for name in gguf.tensor_names if name not in self.extra]
        unknown = [name for name in present if name not in expected]
        missing = sorted(set(expected) - set(present) - {HEAD})  # it is absent where the head is tied
        if unknown or missing:
            kind = f"plain {metadata.architecture} model"
            raise ConfigError(f"{gguf.path} is not a {kind}: unknown tensors {unknown[:3]}, missing {missing[:3]}")
        return {expected[name]: name for name in present}

    def full_config(self, metadata: Metadata) -> dict[str, Any]:
        """Return config.json. Raises `ConfigError` for a setting of the file that is not supported, by name."""
        config = {"architectures": [self.family.architecture], **_plain_config(metadata), **self.config(metadata)}
        metadata.check_all_read()
        return config


def _plain_config(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of config.json that all architectures have."""
    gguf = metadata.gguf
    return {
        "vocab_size": gguf.shape(EMBEDDING)[0],
        "hidden_size": metadata.require("embedding_length"),
        "intermediate_size": metadata.require("feed_forward_length"),
        "num_hidden_layers": metadata.require("block_count"),
        "num_attention_heads": metadata.require("attention.head_count"),
        "num_key_value_heads": metadata.kv_heads(),
        "head_dim": metadata.head_dim(),
        "max_position_embeddings": metadata.require("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": False,
        "tie_word_embeddings": HEAD not in gguf.tensor_names,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
