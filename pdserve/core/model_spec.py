"""The description of a decoder as data: the shapes of its layers and the functions that they compute.

A family of models makes a `ModelSpec` from a published configuration (`pdserve.checkpoint.families`). Each engine backend
reads it, and refuses by name what it does not compute (`beyond`). The types allow more than any backend computes today:
another kind of attention or of MLP is one more value of `kind`, or one more type in `Mlp`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvGroup, KvSpec


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The scaling of rotary positions in Llama 3.1. A frequency is divided by `factor` when its wavelength is long compared
    with `original_max_position`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions of whole heads. scaling None: positions are not scaled."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMSNorm with one weight for each number of a row. eps is added to the mean square."""

    eps: float


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention in which `heads` query heads share `kv_heads` heads of keys and values.

    kind: gqa is grouped-query attention, whose KV is a plane of keys and a plane of values. qk_dim, v_dim: numbers of a head
    of queries and keys, and of a head of values. window: positions that a token sees, its own included; None means all.
    bias: the projections add a bias. qk_norm: queries and keys are normed before they are rotated. softcap: bound of the
    scores; None means no bound. scale: factor of the scores; None means 1 / sqrt(qk_dim).
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    rope: RopeSpec
    kind: Literal["gqa"] = "gqa"
    window: int | None = None
    bias: bool = False
    qk_norm: bool = False
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        _check_positive(heads=self.heads, kv_heads=self.kv_heads, qk_dim=self.qk_dim, v_dim=self.v_dim, window=self.window)
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """The planes of KV that a layer stores, each as (heads, numbers of a head): keys, then values."""
        return (self.kv_heads, self.qk_dim), (self.kv_heads, self.v_dim)

    @property
    def query_width(self) -> int:
        """The numbers of all query heads of one token."""
        return self.heads * self.qk_dim

    @property
    def out_width(self) -> int:
        """The numbers of one token that attention returns, all heads together."""
        return self.heads * self.v_dim

    @property
    def kv_width(self) -> int:
        """The numbers of K and V of one token."""
        return sum(heads * dim for heads, dim in self.planes)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features of this attention that Llama's attention lacks."""
        unequal = self.v_dim != self.qk_dim
        found = {
            "a v_dim other than qk_dim": unequal, "window": self.window is not None, "bias": self.bias,
            "qk_norm": self.qk_norm, "softcap": self.softcap is not None, "scale": self.scale is not None,
        }  # fmt: skip
        return tuple(name for name, there in found.items() if there)


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A gated MLP of `intermediate` numbers: down(activation(gate(x)) * up(x))."""

    intermediate: int
    activation: Literal["silu"] = "silu"

    def __post_init__(self) -> None:
        _check_positive(intermediate=self.intermediate)


Mlp = DenseSpec
"""The types of MLP. A mixture of experts will be the second one."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: attention, then an MLP, each after a norm of the kind `norms` and each added to its input."""

    attention: AttentionSpec
    mlp: Mlp
    norms: NormSpec


UNEQUAL_HEADS: Final = "layers that share KV of one shape but have different numbers of query heads"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder. norm: the norm before the head. tied_head: the head is the embedding itself."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position: int
    tied_head: bool

    def __post_init__(self) -> None:
        _check_positive(vocab_size=self.vocab_size, hidden_size=self.hidden_size, layers=len(self.layers))
        _check_positive(max_position=self.max_position)

    @property
    def kv_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each KV group, in the order of first appearance. KV of a group has equal planes and an equal window."""
        groups: dict[object, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault((layer.attention.planes, layer.attention.window), []).append(index)
        return tuple(tuple(layers) for layers in groups.values())

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The place of each layer's KV: the number of its group, and its index within the group."""
        found = {layer: (g, i) for g, layers in enumerate(self.kv_groups) for i, layer in enumerate(layers)}
        return tuple(found[layer] for layer in range(len(self.layers)))

    def kv_spec(self, block_size: int, dtype: str) -> KvSpec:
        """Return the layout of the model's KV in blocks of `block_size` tokens, stored in `dtype` of `DTYPE_BITS`.

        Raises `ConfigError` when the model has too many groups, or when a block of one is not a whole number of words.
        """
        groups = []
        for layers in self.kv_groups:
            attention = self.layers[layers[0]].attention
            groups.append(KvGroup(layers, attention.planes, block_size, dtype, attention.window))
        return KvSpec(tuple(groups))

    @property
    def layer_numbers(self) -> int:
        """The numbers in the matrices of all layers. Norms are too small to count."""
        return sum(self._numbers_of(layer) for layer in self.layers)

    @property
    def numbers(self) -> int:
        """The numbers in all matrices, with embedding and head. A tied head is the embedding, and is counted once."""
        return self.layer_numbers + (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size

    def beyond(self, features: Collection[str] = ()) -> str | None:
        """Return the name of the first feature that Llama lacks and `features` does not hold. None: there is none."""
        for layer in self.layers:
            for name in layer.attention.features:
                if name not in features:
                    return name
        for layers in self.kv_groups:
            if len({self.layers[layer].attention.heads for layer in layers}) > 1 and UNEQUAL_HEADS not in features:
                return UNEQUAL_HEADS
        return None

    def _numbers_of(self, layer: LayerSpec) -> int:
        attention = layer.attention
        widths = attention.query_width + attention.kv_width + attention.out_width + 3 * layer.mlp.intermediate
        return self.hidden_size * widths


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
