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
from pdserve.checkpoint.families.family import LayerNames
from pdserve.checkpoint.layout import weight_files
from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer: matrices [out_features, in_features], norms [hidden]."""

    attention_norm: Tensor
    qkv: Tensor  # [query_width + kv_width, hidden]: q, then k, then v
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, then up
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
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


def load_weights(directory: Path, card: ModelCard, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Read the weights of a checkpoint in `directory`, by the names and the shapes of the card.

    Raises `ConfigError` naming missing, unexpected and misshapen tensors, or the file that cannot be read.
    """
    names, tied = card.tensors, card.spec.tied_head
    with ExitStack() as stack:
        reader = _Reader(directory, dtype, device, stack)
        reader.check(names.shapes(card.spec), unread=(names.head,) if tied else (), ignored=names.ignored)
        embedding = reader.read(names.embedding)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(_layer(reader, names.of_layer(i)) for i in range(len(card.spec.layers))),
            norm=reader.read(names.norm),
            head=embedding if tied else reader.read(names.head),
        )


def _layer(reader: _Reader, names: LayerNames) -> LayerWeights:
    return LayerWeights(
        attention_norm=reader.read(names.attention_norm),
        qkv=reader.read(names.q, names.k, names.v),
        attention_out=reader.read(names.attention_out),
        mlp_norm=reader.read(names.mlp_norm),
        gate_up=reader.read(names.gate, names.up),
        down=reader.read(names.down),
    )


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

    def check(self, expected: dict[str, tuple[int, ...]], *, unread: tuple[str, ...], ignored: tuple[str, ...]) -> None:
        present = [n for n in self._file_of if n not in unread and not n.endswith(ignored)]
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
