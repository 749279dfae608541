"""The definition of a family of models, and the names and shapes of the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from pdserve.core.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of one layer's tensors."""

    attention_norm: str
    q: str
    k: str
    v: str
    attention_out: str
    mlp_norm: str
    gate: str
    up: str
    down: str

    def shapes(self, layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor. Matrices are [out_features, in_features]."""
        attention, ffn = layer.attention, layer.mlp.intermediate
        (k_heads, k_dim), (v_heads, v_dim) = attention.planes
        return {
            self.attention_norm: (hidden,),
            self.mlp_norm: (hidden,),
            self.q: (attention.query_width, hidden),
            self.k: (k_heads * k_dim, hidden),
            self.v: (v_heads * v_dim, hidden),
            self.attention_out: (hidden, attention.out_width),
            self.gate: (ffn, hidden),
            self.up: (ffn, hidden),
            self.down: (hidden, ffn),
        }


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a model's tensors. Each name of `layer` holds {} in place of the number of the layer.

    ignored: endings of names that a checkpoint may have and that nothing reads.
    """

    embedding: str
    layer: LayerNames
    norm: str
    head: str
    ignored: tuple[str, ...] = ()

    def of_layer(self, index: int) -> LayerNames:
        """Return the names of layer number `index`."""
        return LayerNames(*(name.format(index) for name in astuple(self.layer)))

    def shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that a checkpoint of this model has. A tied head has no tensor."""
        shapes: dict[str, tuple[int, ...]] = {
            self.embedding: (spec.vocab_size, spec.hidden_size),
            self.norm: (spec.hidden_size,),
        }
        if not spec.tied_head:
            shapes[self.head] = (spec.vocab_size, spec.hidden_size)
        for index, layer in enumerate(spec.layers):
            shapes |= self.of_layer(index).shapes(layer, spec.hidden_size)
        return shapes


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, known by the architecture that its published configurations name.

    read: returns the spec of a published configuration. It raises `ConfigError` that names what the family does not describe,
    `KeyError` for a missing setting, and TypeError, ValueError or ArithmeticError for a value of the wrong type or size.
    """

    architecture: str
    read: Callable[[Mapping[str, Any]], ModelSpec]
    tensors: TensorNames
