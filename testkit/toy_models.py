"""Toy models with seeded random weights in Hugging Face layout, for tests: families and shapes that the tiny model lacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.checkpoint.families.decilm import DECILM
from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import LLAMA
from pdserve.checkpoint.families.mixtral import MIXTRAL
from pdserve.checkpoint.shards import write_shards
from pdserve.checkpoint.tiny import write_tiny

DECILM_KV_HEADS: Final = (2, 1, 2, 1)
"""The KV heads of each layer: two KV groups, whose layers take turns."""
_SEED: Final = 20231212


def write_shared(directory: Path, *, experts: int = 0) -> None:
    """Write a Llama that up to four ranks can share into the empty `directory`, with the tokenizer of the tiny model.

    experts: the number of experts of each layer, as a Mixtral; 0 means a dense MLP.
    """
    config = json.loads(_with_tiny_tokenizer(directory).read_text())
    config |= {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    family = LLAMA
    if experts:
        family = MIXTRAL
        config |= {
            "architectures": [MIXTRAL.architecture], "model_type": "mixtral", "num_local_experts": experts,
            "num_experts_per_tok": 2,
        }  # fmt: skip
    _write_random(directory, family, config)


def write_decilm(directory: Path, kv_heads: Sequence[int] = DECILM_KV_HEADS) -> None:
    """Write a DeciLM of the tiny model's size, with its tokenizer, into the empty `directory`.

    kv_heads: the number of KV heads of each layer. Every weight is random, those of the norms too.
    """
    config = json.loads(_with_tiny_tokenizer(directory).read_text())
    del config["num_key_value_heads"]
    config |= {
        "architectures": [DECILM.architecture], "model_type": "deci", "num_hidden_layers": len(kv_heads),
        "num_key_value_heads_per_layer": list(kv_heads),
    }  # fmt: skip
    _write_random(directory, DECILM, config)


def _with_tiny_tokenizer(directory: Path) -> Path:
    """Write the tiny model, and return the path of its configuration."""
    write_tiny(directory)
    return directory / "config.json"


def _write_random(directory: Path, family: Family, config: dict[str, Any]) -> None:
    """Write a configuration, and random weights in place of those that are there."""
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shapes = family.tensors.shapes(family.read(config))
    random = np.random.default_rng(_SEED)
    weights = {name: _drawn(random, name, shape) for name, shape in shapes.items()}
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    write_shards(directory, shapes, weights.__getitem__, lambda _: None)


def _drawn(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draw a weight. The scales keep the residual stream at a few units and attention neither flat nor on a single token."""
    if len(shape) == 1:
        return random.uniform(0.75, 1.25, shape).astype(np.float32)
    sharp = name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight"))
    scale = 1.0 if name.endswith("embed_tokens.weight") else (0.375 if sharp else 0.25)
    return random.uniform(-scale, scale, shape).astype(np.float32)
