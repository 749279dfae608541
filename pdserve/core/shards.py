"""The shares of a model that the ranks of a gang have. All of it is a pure function of the model and of the degrees.

A gang computes one model by several processes. `tensor` ranks share each layer, which is tensor parallelism: a rank has some
query heads with their KV heads, some numbers of each MLP, and some token ids of embedding and head. `pipeline` stages have some
layers each. With `experts`, a rank has whole experts of a mixture instead of some numbers of each.

Only products over numbers that ranks share have sums over ranks. They are added as the parts of one rank are
(`ModelSpec.parts`), so the degrees change no bit. Where ranks do not divide the parts, as three ranks never do, they share no
sums: each gathers the whole rows and computes some columns of these products, too. All this is for compiled code. Ranks that
compute by torch never share sums, and need no equal shares (`columns_of`, `whole_heads`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvGroup, KvShare, KvSpec
from pdserve.core.model_spec import Attention, DenseSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec

MOST_DEGREE: Final = 8
"""The most ranks of a stage, and the most stages. gang.h has the same numbers."""
MOST_RANKS: Final = MOST_DEGREE * MOST_DEGREE
"""The most ranks of a gang."""
PANEL: Final = 32
"""Each rank but the last has a multiple of so many columns of a product, such as the token ids of the head. Compiled code
computes so many of them at a time."""
LANES: Final = 16
"""The numbers of a gated MLP that compiled code computes at a time."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """The numbers of ranks that share a layer and of stages. `experts`: each rank has whole experts."""

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False

    def __str__(self) -> str:
        """Say the degrees above 1 as operators set them."""
        set_ones = {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline}
        words = [f"{name} {degree}" for name, degree in set_ones.items() if degree > 1]
        return ", ".join([*words, *(["enable_expert_parallel"] if self.experts else [])]) or "one rank"

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.tensor * self.pipeline

    def check(self, spec: ModelSpec, *, equal: bool = True) -> None:
        """Raise `ConfigError` when a model cannot be shared so. The error names the degrees that work.

        equal: the ranks must have equal shares, as compiled code needs them.
        """
        works = [tensor for tensor in range(1, MOST_DEGREE + 1) if not equal or shares_evenly(spec, tensor)]
        if self.tensor not in works:
            heads = dict.fromkeys((layer.attention.heads, layer.attention.kv_heads) for layer in spec.layers)
            words = " and ".join(f"{queries} query heads and {kv_heads} KV heads" for queries, kv_heads in heads)
            raise ConfigError(
                f"tensor_parallel_size {self.tensor} does not divide this model, with {words}, into equal ranks: "
                f"use {' or '.join(map(str, works))}"
            )
        stages = min(len(spec.layers), MOST_DEGREE)
        if not 1 <= self.pipeline <= stages:
            raise ConfigError(
                f"pipeline_parallel_size {self.pipeline} is not possible with {len(spec.layers)} layers: use 1 to {stages}"
            )
        mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
        if self.experts and not mixtures:
            raise ConfigError("enable_expert_parallel is for mixtures of experts, and this model has none")
        for mlp in mixtures:
            if self.experts and mlp.experts % self.tensor:
                raise ConfigError(
                    f"enable_expert_parallel: {mlp.experts} experts cannot be shared among {self.tensor} ranks in equal parts"
                )


def shares_evenly(spec: ModelSpec, tensor: int) -> bool:
    """Tell whether so many ranks have equal shares of each layer, with whole KV heads or one KV head for several ranks."""
    if spec.parts % tensor and not gathers_evenly(spec, tensor):
        return False
    kv_heads = {layer.attention.kv_heads for layer in spec.layers}
    return all(heads % tensor == 0 or tensor % heads == 0 for heads in kv_heads)


def gathers_evenly(spec: ModelSpec, tensor: int) -> bool:
    """Tell whether so many ranks that share no sums have equal shares of query heads and of each MLP, which is no mixture."""
    dense = all(isinstance(layer.mlp, DenseSpec) for layer in spec.layers)
    divided = all(
        layer.attention.heads % tensor == 0 and layer.mlp.intermediate % (tensor * LANES) == 0 for layer in spec.layers
    )
    return dense and divided and spec.hidden_size >= tensor * PANEL


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of one rank. `number` is the place of the rank in its gang, stage by stage."""

    spec: ModelSpec
    degrees: Degrees = Degrees()
    number: int = 0

    @property
    def rank(self) -> int:
        """The place of the rank in its stage."""
        return self.number % self.degrees.tensor

    @property
    def stage(self) -> int:
        """The number of its stage."""
        return self.number // self.degrees.tensor

    @property
    def of_stage(self) -> tuple[RankShare, ...]:
        """The shares of all ranks of its stage, in order."""
        first = self.stage * self.degrees.tensor
        return tuple(replace(self, number=first + rank) for rank in range(self.degrees.tensor))

    @property
    def parts(self) -> int:
        """The parts of each sum that this rank computes."""
        return self.spec.parts if self.gathers else self.spec.parts // self.degrees.tensor

    @property
    def gathers(self) -> bool:
        """True where the ranks of a stage share no sums: each gathers whole rows and computes its columns of every product."""
        return self.spec.parts % self.degrees.tensor != 0

    @property
    def columns(self) -> range:
        """Its columns of the products that give whole rows. They are all of them where ranks share sums."""
        return self._panels(self.spec.hidden_size) if self.gathers else range(self.spec.hidden_size)

    @property
    def layers(self) -> range:
        """The layers of its stage."""
        count, stages = len(self.spec.layers), self.degrees.pipeline
        return range(count * self.stage // stages, count * (self.stage + 1) // stages)

    @property
    def token_ids(self) -> range:
        """The rows of embedding and head that it has."""
        return self._panels(self.spec.vocab_size)

    def columns_of(self, width: int) -> range:
        """Return its columns of a product of `width` columns, where ranks need no equal shares.

        The last rank has what is left after all whole panels. Ranks may have no columns.
        """
        panels, ranks = width // PANEL, self.degrees.tensor
        first, behind = (panels * rank // ranks * PANEL for rank in (self.rank, self.rank + 1))
        return range(first, width if self.rank == ranks - 1 else behind)

    def whole_heads(self, attention: Attention) -> range:
        """Return the KV heads that it computes alone, with all of their query heads. Ranks may have none."""
        count, ranks = attention.kv_heads, self.degrees.tensor
        return range(count * self.rank // ranks, count * (self.rank + 1) // ranks)

    def _panels(self, width: int) -> range:
        """Return its columns of a product of `width` columns."""
        panels = -(-width // PANEL)
        bounds = [min(width, panels * rank // self.degrees.tensor * PANEL) for rank in (self.rank, self.rank + 1)]
        return range(*bounds)

    def part_of(self, width: int) -> range:
        """Return its numbers of a row of `width` numbers that the ranks of a stage share."""
        each = width // self.degrees.tensor
        return range(self.rank * each, (self.rank + 1) * each)

    def heads(self, attention: Attention) -> range:
        """Return its query heads."""
        return self.part_of(attention.heads)

    def kv_heads(self, attention: Attention) -> range:
        """Return the KV heads that its query heads read."""
        if isinstance(attention, MlaSpec) or attention.kv_heads < self.degrees.tensor:
            first = self.rank * attention.kv_heads // self.degrees.tensor
            return range(first, first + 1)
        return self.part_of(attention.kv_heads)

    def shares_kv(self, attention: Attention) -> bool:
        """Tell whether several ranks read one KV head."""
        return attention.kv_heads < self.degrees.tensor

    def stores_kv(self, attention: Attention) -> bool:
        """Tell whether it computes and stores its KV heads: the first of the ranks that read a KV head does."""
        return not self.shares_kv(attention) or self.rank * attention.kv_heads % self.degrees.tensor == 0

    def experts(self, mlp: MoeSpec) -> range:
        """Return the experts of which it has weights."""
        return self.part_of(mlp.experts) if self.degrees.experts else range(mlp.experts)

    def intermediate(self, layer: LayerSpec) -> range:
        """Return its numbers of the MLP of a layer, or of each of its experts."""
        mlp = layer.mlp
        whole = isinstance(mlp, MoeSpec) and self.degrees.experts
        return range(mlp.intermediate) if whole else self.part_of(mlp.intermediate)


def kv_shares(spec: ModelSpec, degrees: Degrees, group: KvGroup) -> tuple[KvShare, ...]:
    """Return the shares of all ranks that have a part of a KV group, in the order of the ranks.

    A rank computes whole KV heads (`RankShare.whole_heads`), and where a stage has more ranks than KV heads, some ranks have
    none.
    """
    shares = []
    for number in range(degrees.ranks):
        rank = RankShare(spec, degrees, number)
        layers = [place for place, layer in enumerate(group.layers) if layer in rank.layers]
        heads = rank.whole_heads(spec.layers[group.layers[0]].attention)
        if layers and heads:
            shares.append(KvShare(number, range(layers[0], layers[-1] + 1), heads))
    return tuple(shares)


def shares_of_rank(spec: ModelSpec, degrees: Degrees, kv: KvSpec, rank: int) -> tuple[KvShare | None, ...]:
    """Return the share that one rank stores of each KV group. None: it stores nothing of the group."""
    shares = [kv_shares(spec, degrees, group) for group in kv.groups]
    return tuple(next((share for share in of_group if share.rank == rank), None) for of_group in shares)
