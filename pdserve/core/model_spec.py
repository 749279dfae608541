"""The description of a decoder as data: the shapes of its layers and the functions that they compute.

A family of models makes a `ModelSpec` from a published configuration (`pdserve.checkpoint.families`). Each engine backend
reads it, and refuses by name what it does not compute (`beyond`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvGroup, KvSpec

MOST_EXPERTS: Final = 2**16
"""The most experts of all layers together. DeepSeek-V3 has 14,848, and each expert has names, shapes and counts."""
MOST_RANKS: Final = 8
"""The most ranks among which a layer may be split: the GPUs of one machine."""
WHOLE_GROUP: Final = 64
"""Numbers of a row that share a scale in products of 8-bit integers. A rank's share is a whole number of such groups."""
Activation = Literal["silu", "gelu_tanh"]
"""The function of the gate. gelu_tanh is GELU approximated by a tangent hyperbolic."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The scaling of rotary positions in Llama 3.1. A frequency is divided by `factor` when its wavelength is long compared
    with `original_max_position`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """The scaling of rotary positions by YaRN (Peng et al. 2023): slow frequencies are divided by `factor`, fast ones are kept.

    beta_fast, beta_slow: the turns within `original_max_position` above which a frequency is kept, and below which it is
    divided. attention_factor: factor of cosines and sines. truncate: the ends of the ramp between them are whole numbers.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions. scaling None: positions are not scaled.

    dim: the number of leading numbers of a head that are rotated; None means all. neighbours: numbers 2i and 2i + 1 are a pair,
    instead of i and i + dim / 2.
    """

    theta: float
    scaling: RopeScaling | None = None
    dim: int | None = None
    neighbours: bool = False


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMSNorm with one weight for each number of a row. eps is added to the mean square, offset to each weight."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention in which `heads` query heads share `kv_heads` heads of keys and values.

    One KV head for each query head is MHA, one KV head for all is MQA, and a number in between is GQA. Its KV is a plane of
    keys and a plane of values. qk_dim, v_dim: numbers of a head of queries and keys, and of a head of values. window: positions
    that a token sees, its own included; None means all. bias, out_bias: the projections to queries, keys and values, and the
    projection of the result, add a bias. qk_norm: the norm of each head of queries and keys before it is rotated. softcap:
    bound c of the scores s, which become c * tanh(s / c); None means no bound. scale: factor of the scores; None means 1 /
    sqrt(qk_dim).
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    rope: RopeSpec
    window: int | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
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
    def features(self) -> Iterator[str]:
        """The names of the features of this attention that Llama's attention lacks."""
        found = {
            "a v_dim other than qk_dim": self.v_dim != self.qk_dim, "window": self.window is not None, "bias": self.bias,
            "out_bias": self.out_bias, "qk_norm": self.qk_norm is not None, "softcap": self.softcap is not None,
            "scale": self.scale is not None, "rope of a part of a head": self.rope.dim not in (None, self.qk_dim),
            "rope of neighbours": self.rope.neighbours,
        }  # fmt: skip
        return (name for name, there in found.items() if there)

    def numbers(self, hidden: int) -> int:
        """Return the numbers in all matrices."""
        return hidden * (self.query_width + self.kv_width + self.out_width)


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1). A token stores one normed latent vector and one rotated key.

    All heads share them: the absorbed form multiplies the expansion of the latent vector into queries and results, so that
    attention has a single KV head of kv_rank + rope_dim numbers, whose first kv_rank numbers are the value as well. q_rank:
    numbers of the queries' own latent vector; None means that queries are projected in one product. nope_dim, rope_dim: numbers
    of a head that are not rotated, and that are rotated. norm: the norm of both latent vectors. scale: factor of the scores;
    None means 1 / sqrt(nope_dim + rope_dim).
    """

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: RopeSpec
    norm: NormSpec
    q_rank: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        _check_positive(heads=self.heads, kv_rank=self.kv_rank, nope_dim=self.nope_dim, rope_dim=self.rope_dim)
        _check_positive(v_dim=self.v_dim, q_rank=self.q_rank)

    @property
    def window(self) -> None:
        """There is no window."""

    @property
    def kv_heads(self) -> int:
        """All heads share one latent vector."""
        return 1

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """The one plane of KV that a layer stores, as (heads, numbers of a head)."""
        return ((1, self.kv_rank + self.rope_dim),)

    @property
    def qk_dim(self) -> int:
        """The numbers of a head of expanded queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def query_width(self) -> int:
        """The numbers of all query heads of one token, before they are absorbed."""
        return self.heads * self.qk_dim

    @property
    def out_width(self) -> int:
        """The numbers of one token that attention returns, all heads together, expanded."""
        return self.heads * self.v_dim

    @property
    def features(self) -> Iterator[str]:
        """The name of the feature that Llama's attention lacks."""
        return iter(("latent attention",))

    def numbers(self, hidden: int) -> int:
        """Return the numbers in all matrices."""
        queries = hidden * self.query_width if self.q_rank is None else self.q_rank * (hidden + self.query_width)
        expansion = self.kv_rank * self.heads * (self.nope_dim + self.v_dim)
        return queries + hidden * (self.kv_rank + self.rope_dim) + expansion + self.out_width * hidden


Attention = AttentionSpec | MlaSpec
"""The types of attention."""


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A gated MLP of `intermediate` numbers: down(activation(gate(x)) * up(x))."""

    intermediate: int
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        _check_positive(intermediate=self.intermediate)

    @property
    def features(self) -> Iterator[str]:
        """The names of the features that Llama's MLP lacks."""
        return iter(() if self.activation == "silu" else (self.activation,))

    @property
    def split_widths(self) -> tuple[int, ...]:
        """The numbers of a row that a rank shares with others where the layer is split among ranks."""
        return (self.intermediate,)

    def numbers(self, hidden: int) -> int:
        """Return the numbers in all matrices."""
        return 3 * hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of `experts` gated MLPs of `intermediate` numbers each. A router chooses `experts_per_token` for each token.

    score: the function of the router's outputs, over all experts. correction_bias: the choice, not the weight, adds a bias to
    each score. groups, top_groups: experts are chosen only from the `top_groups` best of `groups` equal groups. group_score:
    a group counts as its best score, or as the sum of its best two. Of equal scores the lowest expert is chosen. The weight
    of a chosen expert is its score. renormalise: the weights of a token are divided by their sum; then all are multiplied
    by `scale`. shared: numbers of a gated MLP that every token passes, 0 for none; shared_gate: its result is multiplied by
    the sigmoid of one more product of the token.
    """

    experts: int
    experts_per_token: int
    intermediate: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    shared: int = 0
    shared_gate: bool = False
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        _check_positive(experts=self.experts, experts_per_token=self.experts_per_token, intermediate=self.intermediate)
        _check_positive(groups=self.groups, top_groups=self.top_groups)
        if self.experts % self.groups or self.top_groups > self.groups:
            raise ConfigError(f"{self.top_groups} of {self.groups} groups of {self.experts} experts cannot be chosen")
        if self.experts_per_token > self.top_groups * (self.experts // self.groups):
            raise ConfigError(f"experts_per_token {self.experts_per_token} is more than the experts to choose from")
        if self.groups > 1 and self.group_score == "best_two" and self.experts // self.groups < 2:
            raise ConfigError(f"groups of one expert have no best two: {self.groups} groups of {self.experts} experts")

    @property
    def features(self) -> Iterator[str]:
        """The names of the features that Llama's MLP lacks."""
        return iter(("a mixture of experts",) if self.activation == "silu" else ("a mixture of experts", self.activation))

    @property
    def split_widths(self) -> tuple[int, ...]:
        """The numbers of a row that a rank shares with others where the layer is split among ranks."""
        return (self.intermediate, self.shared)

    def numbers(self, hidden: int) -> int:
        """Return the numbers in all matrices, of all experts."""
        routed = self.experts * (1 + 3 * self.intermediate)
        return hidden * (routed + 3 * self.shared + (1 if self.shared_gate else 0))


Mlp = DenseSpec | MoeSpec
"""The types of MLP."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: attention, then an MLP, each after a norm of the kind `norms` and each added to its input.

    post_norms: the results of attention and of the MLP are normed too before they are added.
    """

    attention: Attention
    mlp: Mlp
    norms: NormSpec
    post_norms: bool = False

    @property
    def features(self) -> Iterator[str]:
        """The names of the features that a layer of Llama lacks."""
        yield from self.attention.features
        yield from self.mlp.features
        if self.post_norms:
            yield "post_norms"
        if self.norms.offset:
            yield "an offset of norms"

    def splits_among(self, ranks: int) -> bool:
        """Tell whether each rank gets whole query heads and whole groups of numbers."""
        widths = (self.attention.out_width, *self.mlp.split_widths)
        return self.attention.heads % ranks == 0 and all(ranks == 1 or width % (ranks * WHOLE_GROUP) == 0 for width in widths)


UNEQUAL_HEADS: Final = "layers that share KV of one shape but have different numbers of query heads"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder. norm: the norm before the head. tied_head: the head is the embedding itself.

    embedding_scale: factor of the embedding's rows, rounded to the dtype of the computation. softcap: bound c of the logits
    x, which become c * tanh(x / c); None means no bound.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position: int
    tied_head: bool
    embedding_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        _check_positive(vocab_size=self.vocab_size, hidden_size=self.hidden_size, layers=len(self.layers))
        _check_positive(max_position=self.max_position)
        experts = sum(layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, MoeSpec))
        if experts > MOST_EXPERTS:
            raise ConfigError(f"the layers have {experts} experts together, over the limit of {MOST_EXPERTS}")

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

        Raises `ConfigError` when the model has too many groups, or when a block of a group is not a whole number of words.
        """
        groups = []
        for layers in self.kv_groups:
            attention = self.layers[layers[0]].attention
            groups.append(KvGroup(layers, attention.planes, block_size, dtype, attention.window))
        return KvSpec(tuple(groups))

    @property
    def parts(self) -> int:
        """The most ranks among which every layer can be split: a power of two.

        Products over numbers that ranks share are computed as so many parts, which are added as a balanced tree. So one rank
        gives the same bits as several do.
        """
        return max(ranks for ranks in (1, 2, 4, MOST_RANKS) if all(layer.splits_among(ranks) for layer in self.layers))

    @property
    def layer_numbers(self) -> int:
        """The numbers in the matrices of all layers. Norms are too small to count."""
        return sum(layer.attention.numbers(self.hidden_size) + layer.mlp.numbers(self.hidden_size) for layer in self.layers)

    @property
    def numbers(self) -> int:
        """The numbers in all matrices, with embedding and head. A tied head is the embedding, and is counted once."""
        return self.layer_numbers + (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size

    @property
    def features(self) -> Iterator[str]:
        """The names of the features that a Llama lacks, some of them several times."""
        for layer in self.layers:
            yield from layer.features
        if self.norm.offset:
            yield "an offset of norms"
        if self.embedding_scale != 1.0:
            yield "embedding_scale"
        if self.softcap is not None:
            yield "a softcap of logits"

    def beyond(self, features: Collection[str] = ()) -> str | None:
        """Return the name of the first feature that Llama lacks and `features` does not hold. None: there is none."""
        for name in self.features:
            if name not in features:
                return name
        for layers in self.kv_groups:
            if len({self.layers[layer].attention.heads for layer in layers}) > 1 and UNEQUAL_HEADS not in features:
                return UNEQUAL_HEADS
        return None


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
