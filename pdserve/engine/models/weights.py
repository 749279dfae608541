"""The weights of a model, as decoders take them: fused, on their device and in their dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GqaWeights:
    """Weights of `AttentionSpec`. Norms are [qk_dim]."""

    qkv: Tensor  # [query_width + kv_width, hidden]: q, then k, then v
    out: Tensor  # [hidden, out_width]
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """Weights of `MlaSpec`."""

    q: Tensor  # [query_width, q_rank, or hidden where q_rank is None]: for each head nope_dim rows, then rope_dim rows
    kv_a: Tensor  # [kv_rank + rope_dim, hidden]: the latent vector, then the key that is rotated
    kv_a_norm: Tensor  # [kv_rank]
    kv_b: Tensor  # [heads * (nope_dim + v_dim), kv_rank]: for each head rows of the key, then rows of the value
    out: Tensor  # [hidden, out_width]
    q_a: Tensor | None = None  # [q_rank, hidden]
    q_a_norm: Tensor | None = None  # [q_rank]


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Weights of `DenseSpec`."""

    gate_up: Tensor  # [2 * intermediate, hidden]: gate, then up
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Weights of `MoeSpec`."""

    router: Tensor  # [experts, hidden]
    gate_up: Tensor  # [experts, 2 * intermediate, hidden]: gate, then up
    down: Tensor  # [experts, hidden, intermediate]
    router_bias: Tensor | None = None  # [experts] float32
    shared: DenseWeights | None = None
    shared_gate: Tensor | None = None  # [1, hidden]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. Norms are [hidden]."""

    attention_norm: Tensor
    attention: GqaWeights | MlaWeights
    mlp_norm: Tensor
    mlp: DenseWeights | MoeWeights
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None


class Layers(Protocol):
    """The weights of all layers, by their number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> LayerWeights: ...
    def __iter__(self) -> Iterator[LayerWeights]: ...


class WeightSource(Protocol):
    """Weights of a whole model, on their device and in their dtype.

    Each access to a layer, or to the head, may read it anew. So a caller takes each layer once, lays it out, and drops it
    before it takes the next layer.
    """

    @property
    def embedding(self) -> Tensor:
        """The embedding, [vocab, hidden], which stays in memory."""

    @property
    def layers(self) -> Layers:
        """The weights of each layer."""

    @property
    def norm(self) -> Tensor:
        """The norm before the head, [hidden]."""

    @property
    def head(self) -> Tensor:
        """The head, [vocab, hidden]; the embedding itself when the two are tied."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; a tied head is counted once."""

    def attention_norm(self, layer: int) -> Tensor:
        """Return the first norm of a layer, [hidden]."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Weights of a whole model in memory. It is a `WeightSource`."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor  # [vocab, hidden]; the embedding itself when the two are tied

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; a tied head is counted once."""
        return sum({id(tensor): tensor.nbytes for tensor in _tensors(self)}.values())

    def attention_norm(self, layer: int) -> Tensor:
        """Return the first norm of a layer, [hidden]."""
        return self.layers[layer].attention_norm

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelWeights:
        """Return the weights with each tensor changed. A tied head stays tied."""
        changed: ModelWeights = _mapped(self, change, {})
        return changed


def _tensors(held: object) -> Iterator[Tensor]:
    """Yield all tensors in weights, however deep."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, tuple):
        for one in held:
            yield from _tensors(one)
    elif is_dataclass(held):
        for field in fields(held):
            yield from _tensors(getattr(held, field.name))


def _mapped(held: Any, change: Callable[[Tensor], Tensor], done: dict[int, Tensor]) -> Any:
    if isinstance(held, Tensor):
        if id(held) not in done:
            done[id(held)] = change(held)
        return done[id(held)]
    if isinstance(held, tuple):
        return tuple(_mapped(one, change, done) for one in held)
    if held is None:
        return None
    return type(held)(*(_mapped(getattr(held, field.name), change, done) for field in fields(held)))
