"""Weights from safetensors files in Hugging Face layout, cast and fused for the model.

Tensors are read and copied one at a time, and the files are closed afterwards. So a float32 checkpoint of a bfloat16 model
takes page cache only while it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.layout import weight_files
from pdserve.core.errors import ConfigError

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # a buffer of old checkpoints; this code computes it


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer: matrices [out_features, in_features], norms [hidden]."""

    attention_norm: Tensor
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: q, then k, then v
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, then up
    down: Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """Weights of a whole model, on its device and in its dtype."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor  # [vocab, hidden]; the embedding itself when the two are tied

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; a tied head is counted once."""
        tensors = {id(t): t.nbytes for t in self._tensors()}
        return sum(tensors.values())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.embedding, self.norm, self.head)
        for layer in self.layers:
            yield from (layer.attention_norm, layer.qkv, layer.attention_out, layer.mlp_norm, layer.gate_up, layer.down)


def load_llama(directory: Path, card: ModelCard, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Read the weights of a checkpoint in `directory`.

    Raises `ConfigError` naming missing, unexpected and misshapen tensors, or the file that cannot be read.
    """
    with ExitStack() as stack:
        reader = _Reader(directory, dtype, device, stack)
        reader.check(_expected_shapes(card), tied=card.tie_word_embeddings)
        embedding = reader.read("model.embed_tokens.weight")
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(_layer(reader, f"model.layers.{i}.") for i in range(card.num_layers)),
            norm=reader.read("model.norm.weight"),
            head=embedding if card.tie_word_embeddings else reader.read("lm_head.weight"),
        )


def _layer(reader: _Reader, prefix: str) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LayerWeights(
        attention_norm=reader.read(prefix + "input_layernorm.weight"),
        qkv=reader.read(*(f"{attention}{name}_proj.weight" for name in "qkv")),
        attention_out=reader.read(attention + "o_proj.weight"),
        mlp_norm=reader.read(prefix + "post_attention_layernorm.weight"),
        gate_up=reader.read(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        down=reader.read(mlp + "down_proj.weight"),
    )


def _expected_shapes(card: ModelCard) -> dict[str, tuple[int, ...]]:
    hidden, ffn = card.hidden_size, card.intermediate_size
    q, kv = card.num_heads * card.head_dim, card.num_kv_heads * card.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (card.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not card.tie_word_embeddings:
        shapes["lm_head.weight"] = (card.vocab_size, hidden)
    for i in range(card.num_layers):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes


class _Reader:
    """The open files of one checkpoint; `stack` closes them."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, stack: ExitStack) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as exc:
                raise ConfigError(f"cannot read the weights in {path}: {exc}") from exc
            self._file_of |= dict.fromkeys(file.keys(), file)

    def check(self, expected: dict[str, tuple[int, ...]], *, tied: bool) -> None:
        ignored = ("lm_head.weight",) if tied else ()
        present = [n for n in self._file_of if n not in ignored and not n.endswith(_IGNORED_SUFFIXES)]
        problems = _listed("missing", [n for n in expected if n not in self._file_of])
        problems += _listed("unexpected", [n for n in present if n not in expected])
        for name in sorted(set(present) & set(expected)):
            shape = tuple(self._file_of[name].get_slice(name).get_shape())
            if shape != expected[name]:
                problems.append(f"{name} has shape {list(shape)}, not {list(expected[name])}")
        if problems:
            raise ConfigError(f"the weights in {self._directory} do not fit config.json: {'; '.join(problems[:8])}")

    def read(self, *names: str) -> Tensor:
        """Return the named tensors joined along the first dimension, cast, on the device, in new memory."""
        parts = [self._file_of[name].get_tensor(name).to(self._dtype) for name in names]
        return torch.cat(parts).to(self._device)


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(sorted(names)[:4])
    return [f"{what}: {shown}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")]
