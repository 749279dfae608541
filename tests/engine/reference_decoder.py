"""A Llama-like decoder in float64, written from the papers with explicit loops. It shares no code with the engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def reference_logits(directory: Path, ids: list[int]) -> Tensor:
    """Return the logits of every token of one sequence: [tokens, vocab] float64."""
    config = json.loads((directory / "config.json").read_text())
    weights = {name: tensor.double() for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    layers, heads, dim = config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]
    kv_heads = config.get("num_key_value_heads_per_layer") or [config["num_key_value_heads"]] * layers
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    x = [weights["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(layers):
        own = {name.removeprefix(f"model.layers.{layer}."): w for name, w in weights.items() if f"layers.{layer}." in name}
        normed = [norm(row, own["input_layernorm.weight"], eps) for row in x]
        query, key, value = (
            [(own[f"self_attn.{name}_proj.weight"] @ row).view(-1, dim) for row in normed] for name in ("q", "k", "v")
        )
        assert (len(query[0]), len(key[0]), len(value[0])) == (heads, kv_heads[layer], kv_heads[layer])
        for position in range(len(ids)):
            query[position], key[position] = (rotated(part[position], position, theta) for part in (query, key))
        for position in range(len(ids)):
            out = []
            for head in range(heads):
                of = head * kv_heads[layer] // heads
                scores = torch.stack([query[position][head] @ key[p][of] / math.sqrt(dim) for p in range(position + 1)])
                shares = torch.softmax(scores, 0)
                out.append(sum(shares[p] * value[p][of] for p in range(position + 1)))
            x[position] = x[position] + own["self_attn.o_proj.weight"] @ torch.cat(out)
        for position, row in enumerate(x):
            inner = norm(row, own["post_attention_layernorm.weight"], eps)
            gate = own["mlp.gate_proj.weight"] @ inner
            gated = gate * torch.sigmoid(gate) * (own["mlp.up_proj.weight"] @ inner)
            x[position] = row + own["mlp.down_proj.weight"] @ gated
    head = weights["model.embed_tokens.weight"] if config["tie_word_embeddings"] else weights["lm_head.weight"]
    return torch.stack([head @ norm(row, weights["model.norm.weight"], eps) for row in x])


def norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of one row."""
    return row / torch.sqrt((row * row).mean() + eps) * weight


def rotated(heads: Tensor, position: int, theta: float) -> Tensor:
    """Return the heads [heads, dim] turned by their position: number i of a head is paired with number i + dim / 2."""
    half = heads.shape[1] // 2
    out = heads.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        a, b = heads[:, i], heads[:, i + half]
        out[:, i] = a * math.cos(angle) - b * math.sin(angle)
        out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out
