"""Weights that are read while a decoder lays them out, one layer at a time, so that memory never holds them twice.

Each tensor is copied once, from its file into the memory of the fused tensor that holds it, and is cast on the way. So
loading takes at most the weights in their final layout, plus one layer, plus the working memory of the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from pdserve.checkpoint.families.family import TensorNames
from pdserve.checkpoint.progress import Progress, silent
from pdserve.core.model_spec import ModelSpec
from pdserve.engine.loading.layers import read_layer
from pdserve.engine.loading.source import Copy, Shape, TensorSource
from pdserve.engine.models.weights import LayerWeights, ModelWeights

LOADING = "loading weights"
"""The words by which progress is reported, in bytes."""


class StreamedWeights:
    """A `WeightSource` over tensors that are read when they are taken. Only the embedding and the last norm stay here."""

    def __init__(
        self,
        names: TensorNames,
        spec: ModelSpec,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = silent,
    ) -> None:
        """Prepare to read; no tensor is read yet. `progress` gets the bytes in the model's dtype."""
        self._names, self._spec, self.source = names, spec, source
        self._dtype, self._device = dtype, device
        self._shapes: dict[str, Shape] = names.shapes(spec)
        self._progress = progress
        self._read_bytes = 0
        self.layers = _Layers(len(spec.layers), self._layer)

    @cached_property
    def embedding(self) -> Tensor:
        """The embedding, [vocab, hidden]."""
        return self._one(self._names.embedding)

    @cached_property
    def norm(self) -> Tensor:
        """The norm before the head, [hidden]."""
        return self._one(self._names.norm)

    @property
    def head(self) -> Tensor:
        """The head, [vocab, hidden], read anew unless it is the embedding itself."""
        return self.embedding if self._spec.tied_head else self._one(self._names.head)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors; a tied head is counted once."""
        wide = {
            self._names.of("router_bias", index)
            for index, layer in enumerate(self._spec.layers)
            if getattr(layer.mlp, "correction_bias", False)
        }
        sizes = {name: torch.float32.itemsize if name in wide else self._dtype.itemsize for name in self._shapes}
        return sum(math.prod(shape) * sizes[name] for name, shape in self._shapes.items())

    def attention_norm(self, layer: int) -> Tensor:
        """Return the first norm of a layer, [hidden]."""
        return self._one(self._names.of("attention_norm", layer))

    def _layer(self, index: int) -> LayerWeights:
        """Read a layer."""
        with self.source.opened() as copy:
            return read_layer(partial(self._parts, copy, index), self._spec.layers[index])

    def held(self) -> ModelWeights:
        """Read everything into memory."""
        return ModelWeights(self.embedding, tuple(self.layers), self.norm, self.head)

    def _one(self, name: str) -> Tensor:
        with self.source.opened() as copy:
            return self._join(copy, [[name]], self._dtype)[0]

    def _parts(
        self, copy: Copy, layer: int, *parts: str, experts: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read parts of a layer, as `ReadPart` says. Parts of one name are one tensor, which is read once."""
        numbers = [None] if experts is None else range(experts)
        names = [list(dict.fromkeys(self._names.of(part, layer, expert) for part in parts)) for expert in numbers]
        joined = self._join(copy, names, dtype or self._dtype)
        return joined[0] if experts is None else joined

    def _join(self, copy: Copy, names: Sequence[Sequence[str]], dtype: torch.dtype) -> Tensor:
        """Return the named tensors in new memory: the tensors of each list are stacked along the rows, and the lists along a
        new dimension."""
        rows = sum(self._shapes[name][0] for name in names[0])
        joined = torch.empty(len(names), rows, *self._shapes[names[0][0]][1:], dtype=dtype, device=self._device)
        for place, below in zip(joined, names, strict=True):
            at = 0
            for name in below:
                part = place[at : at + self._shapes[name][0]]
                copy(name, part)
                at += len(part)
                self._read_bytes = min(self.nbytes, self._read_bytes + part.nbytes)  # the first norms are read twice
                self._progress(LOADING, self._read_bytes, self.nbytes)
        return joined


class _Layers:
    """The layers of streamed weights. Each access reads a layer anew."""

    def __init__(self, count: int, read: Callable[[int], LayerWeights]) -> None:
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> LayerWeights:
        return self._read(index)

    def __iter__(self) -> Iterator[LayerWeights]:
        return map(self._read, range(self._count))
