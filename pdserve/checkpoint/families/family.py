"""The definition of a family of models, and the names and shapes of the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdserve.checkpoint.families.parts import layer_shapes
from pdserve.core.model_spec import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a model's tensors.

    layer: the name of each part of a layer (`parts.py`), with {layer} in place of the layer's number and {expert} in place of
    the expert's. Parts of one name are rows of one tensor, in the order in which `layer_shapes` lists them. A family lists all
    parts that any layer of it may have. ignored: endings of names that a checkpoint may have and that nothing reads. later: the
    beginning of such names, with {layer} in place of the number of layers. beside: the beginnings of such names that belong to
    parts beside the language model.
    """

    embedding: str
    layer: Mapping[str, str]
    norm: str
    head: str
    ignored: tuple[str, ...] = ()
    later: str | None = None
    beside: tuple[str, ...] = ()

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """Return True for a tensor that a checkpoint of this model may have and that nothing reads."""
        if self.later is not None and name.startswith(self.later.format(layer=len(spec.layers))):
            return True
        return name.endswith(self.ignored) or name.startswith(self.beside)

    def under(self, prefix: str, beside: tuple[str, ...]) -> TensorNames:
        """Return the names in a model that contains this model as a part. beside: beginnings of the names of its other
        parts."""
        layer = {part: prefix + name for part, name in self.layer.items()}
        embedding, norm, head = (prefix + name for name in (self.embedding, self.norm, self.head))
        return replace(self, embedding=embedding, layer=layer, norm=norm, head=head, beside=beside)

    def of(self, part: str, layer: int, expert: int | None = None) -> str:
        """Return the name of a part of a layer, or of one of its experts."""
        return self.layer[part].format(layer=layer, expert=expert)

    def shapes(self, spec: ModelSpec) -> dict[str, Shape]:
        """Return the shape of each tensor that a checkpoint of this model has. A tied head has no tensor."""
        shapes: dict[str, Shape] = {
            self.embedding: (spec.vocab_size, spec.hidden_size),
            self.norm: (spec.hidden_size,),
        }
        if not spec.tied_head:
            shapes[self.head] = (spec.vocab_size, spec.hidden_size)
        for index, layer in enumerate(spec.layers):
            for (part, expert), (rows, *columns) in layer_shapes(layer, spec.hidden_size):
                name = self.of(part, index, expert)
                above = shapes[name][0] if name in shapes else 0
                shapes[name] = (above + rows, *columns)
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
