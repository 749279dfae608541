"""Toy models with seeded random weights in Hugging Face layout, for tests: families and shapes that the tiny model lacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pdserve.checkpoint.families.decilm import DECILM
from pdserve.checkpoint.shards import write_shards
from pdserve.checkpoint.tiny import write_tiny

DECILM_KV_HEADS: Final = (2, 1, 2, 1)
"""The KV heads of each layer: two KV groups, whose layers take turns."""
_SEED: Final = 20231212


def write_decilm(directory: Path, kv_heads: Sequence[int] = DECILM_KV_HEADS) -> None:
    """Write a DeciLM of the tiny model's size, with its tokenizer, into the empty `directory`.

    kv_heads: the number of KV heads of each layer. Every weight is random, those of the norms too.
    """
    write_tiny(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["num_key_value_heads"]
    config |= {
        "architectures": [DECILM.architecture], "model_type": "deci", "num_hidden_layers": len(kv_heads),
        "num_key_value_heads_per_layer": list(kv_heads),
    }  # fmt: skip
    path.write_text(json.dumps(config, indent=2) + "\n")
    shapes = DECILM.tensors.shapes(DECILM.read(config))
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
