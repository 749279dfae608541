"""The operations and bytes that the steps of a model need, and how near a worker comes to the peaks of its device. Pure.

First come the sizes of a decoder, as far as operations and memory traffic depend on them.

A `ModelSpec` says exactly what an engine computes. A `ModelShape` says less, so it can also describe models that no engine here
computes. Norms and biases are left out: they are less than a thousandth of the numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from pdserve.core.blocks import BlockCounts
from pdserve.core.kv_layout import KvGroup
from pdserve.core.model_spec import Attention, MlaSpec, Mlp, ModelSpec, MoeSpec
from pdserve.core.step_plan import StepPlan
from pdserve.core.worker import ExpertLoad, Role, WorkerHello, WorkerLoad


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer. `gqa_attention` and `mla_attention` make it."""

    numbers: int
    """The numbers in the matrices of its projections."""
    kv_numbers: int
    """The numbers of KV that the layer stores for each token."""
    pair_flops: int
    """The operations of one query of a prompt and one key that it attends to, all heads together."""
    decode_pair_flops: int
    """The same operations for a query that decodes. They differ for MLA, because its decode steps attend to latent vectors."""
    window: int | None = None
    """The most tokens that a token attends to, itself included. None: there is no limit."""


@dataclass(frozen=True, slots=True)
class MlpShape:
    """The MLP of one layer, or its mixture of experts."""

    numbers: int
    """The numbers in the matrices that every token passes: a dense MLP, or the router and the shared experts."""
    expert_numbers: int = 0
    """The numbers of one routed expert."""
    experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer."""

    attention: AttentionShape
    mlp: MlpShape

    @property
    def numbers(self) -> int:
        """The numbers in all matrices of the layer, with all experts."""
        return self.attention.numbers + self.mlp.numbers + self.mlp.experts * self.mlp.expert_numbers

    @property
    def active_numbers(self) -> int:
        """The numbers by which one token is multiplied."""
        return self.attention.numbers + self.mlp.numbers + self.mlp.experts_per_token * self.mlp.expert_numbers


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole decoder: layers of each shape with their number, and the embedding. A tied head is the embedding itself."""

    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[LayerShape, int], ...]
    tied_head: bool

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """Return the shape of a model that an engine computes."""
        hidden = spec.hidden_size
        counts = Counter(LayerShape(_attention(layer.attention, hidden), _mlp(layer.mlp, hidden)) for layer in spec.layers)
        return cls(spec.vocab_size, hidden, tuple(counts.items()), spec.tied_head)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return sum(count for _, count in self.layers)

    @property
    def layer_numbers(self) -> int:
        """The numbers in the matrices of all layers."""
        return sum(layer.numbers * count for layer, count in self.layers)

    @property
    def active_layer_numbers(self) -> int:
        """The numbers in the matrices of all layers by which one token is multiplied."""
        return sum(layer.active_numbers * count for layer, count in self.layers)

    @property
    def head_numbers(self) -> int:
        """The numbers of the head. A step reads the whole head. If the embedding is not tied to it, the step also reads one row
        of the embedding for each token."""
        return self.vocab_size * self.hidden_size

    @property
    def numbers(self) -> int:
        """The numbers in all matrices, with embedding and head. A tied head is counted once."""
        return self.layer_numbers + (1 if self.tied_head else 2) * self.head_numbers

    @property
    def kv_numbers(self) -> int:
        """The numbers of KV that all layers store for one token."""
        return sum(layer.attention.kv_numbers * count for layer, count in self.layers)

    def kv_numbers_of(self, tokens: int) -> int:
        """Return the numbers of KV of one sequence. A layer with a window needs at most the tokens of its window."""
        return sum(
            layer.attention.kv_numbers * count * min(tokens, layer.attention.window or tokens) for layer, count in self.layers
        )

    def held_numbers(self, sequences: int, tokens: int, *, step_tokens: int, block_size: int) -> int:
        """Return the most numbers of KV that this many sequences of `tokens` tokens hold while they run together.

        A layer with a window holds the blocks that its engine reserves (`KvGroup.most_useful`): whole blocks of each window,
        and the blocks of a step of `step_tokens`.
        """
        numbers = 0
        for layer, count in self.layers:
            group = KvGroup((0,), ((1, 2),), block_size, "float32", layer.attention.window)  # only its window matters
            most = group.most_useful(sequences, step_tokens)
            held = sequences * tokens if most is None else min(sequences * tokens, most * block_size)
            numbers += layer.attention.kv_numbers * count * held
        return numbers


def _attention(spec: Attention, hidden: int) -> AttentionShape:
    if isinstance(spec, MlaSpec):
        return mla_attention(
            hidden,
            spec.heads,
            q_rank=spec.q_rank,
            kv_rank=spec.kv_rank,
            nope_dim=spec.nope_dim,
            rope_dim=spec.rope_dim,
            v_dim=spec.v_dim,
        )
    return gqa_attention(hidden, spec.heads, spec.kv_heads, spec.qk_dim, spec.v_dim, window=spec.window)


def _mlp(spec: Mlp, hidden: int) -> MlpShape:
    if isinstance(spec, MoeSpec):
        return moe_mlp(
            hidden,
            spec.intermediate,
            experts=spec.experts,
            experts_per_token=spec.experts_per_token,
            shared=spec.shared,
            shared_gate=spec.shared_gate,
        )
    return dense_mlp(hidden, spec.intermediate)


def gqa_attention(
    hidden: int, heads: int, kv_heads: int, qk_dim: int, v_dim: int, *, window: int | None = None
) -> AttentionShape:
    """Return attention in which `heads` query heads share `kv_heads` heads of K and V. Equal numbers: MHA. One KV head: MQA."""
    kv_numbers = kv_heads * (qk_dim + v_dim)
    pair_flops = 2 * heads * (qk_dim + v_dim)
    return AttentionShape(
        hidden * (heads * qk_dim + kv_numbers + heads * v_dim), kv_numbers, pair_flops, pair_flops, window=window
    )


def mla_attention(
    hidden: int, heads: int, *, q_rank: int | None, kv_rank: int, nope_dim: int, rope_dim: int, v_dim: int
) -> AttentionShape:
    """Return multi-head latent attention (DeepSeek-V2, section 2.1). q_rank None: queries are projected in one product.

    A token stores one latent vector and one rotated key. A prompt expands them to all heads. A decode step multiplies the
    expansion into the query and the output, so its queries attend to the latent vectors themselves.
    """
    q_dim, stored = nope_dim + rope_dim, kv_rank + rope_dim
    queries = hidden * heads * q_dim if q_rank is None else q_rank * (hidden + heads * q_dim)
    numbers = queries + hidden * stored + kv_rank * heads * (nope_dim + v_dim) + heads * v_dim * hidden
    return AttentionShape(numbers, stored, 2 * heads * (q_dim + v_dim), 2 * heads * (stored + kv_rank))


def dense_mlp(hidden: int, intermediate: int, *, gated: bool = True) -> MlpShape:
    """Return an MLP of `intermediate` numbers. A gated MLP has three matrices, an ungated MLP has two."""
    return MlpShape((3 if gated else 2) * hidden * intermediate)


def moe_mlp(
    hidden: int, intermediate: int, *, experts: int, experts_per_token: int, shared: int = 0, shared_gate: bool = False
) -> MlpShape:
    """Return a mixture of gated experts of `intermediate` numbers each. shared: the numbers of a gated MLP for every token.

    shared_gate: one more product of the token weighs the result of the shared MLP.
    """
    every = hidden * (experts + 3 * shared + shared_gate)
    return MlpShape(every, 3 * hidden * intermediate, experts, experts_per_token)


# Operations -----------------------------------------------------------------------------------------------------------
#
# The floating-point operations of a step. A multiplication and an addition are two operations.
#
# A token is multiplied by every number of the layers that it passes, and with the query and key of each token that it attends
# to. The head is computed only for rows after which a token is drawn. Norms, rotations and activations are left out.


def attended(starts: Sequence[int], window: int | None) -> int:
    """Return the number of tokens to which one token of each sequence attends, itself included. `starts` are the positions."""
    if window is None:
        return sum(starts) + len(starts)
    return sum([min(start + 1, window) for start in starts])


def causal_pairs(start: int, count: int, window: int | None = None) -> int:
    """Return the pairs of query and key of tokens [start, start + count): each attends to itself and to all before it."""
    if window is None or start + count <= window:
        return count * start + count * (count + 1) // 2
    growing = max(0, window - start)  # the first tokens see fewer than a whole window
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The operations of a model's steps."""

    token: float
    """Operations of one token in the matrices of all layers."""
    row: float
    """Operations of the head for one row."""
    pairs: tuple[tuple[int | None, float, float], ...]
    """For each window: the window, and the operations of a pair in prompts and in decode steps."""

    @classmethod
    def of(cls, shape: ModelShape) -> StepFlops:
        """Return the operations of this model."""
        pairs: dict[int | None, tuple[float, float]] = {}
        for layer, count in shape.layers:
            one, (prompt, decode) = layer.attention, pairs.get(layer.attention.window, (0.0, 0.0))
            pairs[one.window] = prompt + one.pair_flops * count, decode + one.decode_pair_flops * count
        return cls(
            2.0 * shape.active_layer_numbers, 2.0 * shape.head_numbers, tuple((window, *two) for window, two in pairs.items())
        )

    def chunk(self, start: int, tokens: int, rows: int = 0) -> float:
        """Return the operations of the tokens [start, start + tokens) of one prompt, with the head for `rows` of them."""
        attention = sum([prompt * causal_pairs(start, tokens, window) for window, prompt, _ in self.pairs])
        return self.token * tokens + self.row * rows + attention

    def decodes(self, starts: Sequence[int]) -> float:
        """Return the operations of one token of each sequence. `starts` are the positions of these tokens."""
        attention = sum([decode * attended(starts, window) for window, _, decode in self.pairs])
        return (self.token + self.row) * len(starts) + attention


# Memory traffic -------------------------------------------------------------------------------------------------------
#
# The bytes that a step must read from memory: the weights once, and the KV of each token that is attended to.
#
# Activations are left out: they are small and mostly stay in caches. So the number is the least that any engine can read, and
# its share of the peak is what a better engine could still win.


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """The bytes that a model's decode steps read."""

    fixed: float
    """Bytes of all matrices that every step reads whole, the head among them."""
    experts: tuple[tuple[int, int, float], ...]
    """For each kind of expert: their number in a layer, the number that a token passes, and the bytes of all of them."""
    token: tuple[tuple[int | None, float], ...]
    """For each window: the window, and the bytes of one token's KV in the layers that have it."""

    @classmethod
    def of(cls, shape: ModelShape, *, weight_bits: float, kv_bits: float, head_bits: float | None = None) -> StepTraffic:
        """Return the traffic of a model with the given bits for each number of weights and KV. head_bits None: the bits of the
        weights."""
        fixed = shape.head_numbers * (weight_bits if head_bits is None else head_bits) / 8
        experts: dict[tuple[int, int], float] = {}
        token: dict[int | None, float] = {}
        for layer, count in shape.layers:
            mlp, attention = layer.mlp, layer.attention
            fixed += count * (attention.numbers + mlp.numbers) * weight_bits / 8
            if mlp.experts:
                kind, routed = (mlp.experts, mlp.experts_per_token), mlp.experts * mlp.expert_numbers
                experts[kind] = experts.get(kind, 0.0) + count * routed * weight_bits / 8
            token[attention.window] = token.get(attention.window, 0.0) + count * attention.kv_numbers * kv_bits / 8
        return cls(fixed, tuple((*kind, size) for kind, size in experts.items()), tuple(token.items()))

    def weights(self, tokens: float) -> float:
        """Return the bytes of weights that a step of `tokens` tokens reads. The number may be a mean.

        An expert is read if a token of the step passes it. The estimate assumes that tokens choose experts evenly and
        independently.
        """
        if not self.experts:
            return self.fixed
        routed = [size * (1.0 - math.pow(1.0 - chosen / number, tokens)) for number, chosen, size in self.experts]
        return self.fixed + sum(routed)

    def kv(self, starts: Sequence[int]) -> float:
        """Return the bytes of KV to which one token of each sequence attends. `starts` are the positions of these tokens."""
        read = 0.0
        for window, size in self.token:
            read += size * attended(starts, window)
        return read

    def decodes(self, starts: Sequence[int]) -> float:
        """Return the bytes that a step reads that computes one token of each sequence."""
        return self.weights(len(starts)) + self.kv(starts)


# Counts of steps ------------------------------------------------------------------------------------------------------
#
# The counts of what an engine has computed since its start: tokens, busy seconds, operations and bytes.
#
# The counts cost a few microseconds a step, so there is no work for single tokens where all slices are plain decodes.

COUNTED: Final = (
    "computed_prompt_tokens", "output_tokens", "prompt_busy_s", "decode_busy_s", "prompt_steps", "decode_steps",
    "prompt_flops", "decode_read_bytes",
)  # fmt: skip
"""The fields of `WorkerLoad` that are counted here."""
_START: Final = attrgetter("start")
EXPERT_STEPS: Final = 64
"""The spread over experts is taken once in this many steps, and when no work is left. It walks over all experts of all
layers."""


class StepCounts:
    """The counts of one engine. The engine thread owns it."""

    def __init__(
        self,
        flops: StepFlops | None = None,
        traffic: StepTraffic | None = None,
        experts: Callable[[], ExpertLoad | None] = lambda: None,
    ) -> None:
        """`flops` and `traffic` describe the model. None: operations and bytes stay 0, so they are unknown.

        experts: returns the present spread over the model's experts; None: there is none.
        """
        self._flops = flops
        self._traffic = traffic
        self._experts = experts
        self._steps = 0
        self.experts: ExpertLoad | None = None
        self.computed_prompt_tokens = 0
        self.output_tokens = 0
        self.prompt_busy_s = 0.0
        self.prompt_steps = 0
        self.decode_busy_s = 0.0
        self.decode_steps = 0
        self.prompt_flops = 0.0
        self.decode_read_bytes = 0.0

    def add(self, plan: StepPlan, *, prompt_tokens: int, output_tokens: int, step_s: float, idle: bool = False) -> None:
        """Count one step, which computed `prompt_tokens` of prompts and drew `output_tokens`. idle: no work is left."""
        self.computed_prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        if idle or self._steps % EXPERT_STEPS == 0:
            self.experts = self._experts()
        self._steps += 1
        if prompt_tokens:
            self.prompt_busy_s += step_s
            self.prompt_steps += 1
            if self._flops is not None:
                self.prompt_flops += _flops(self._flops, plan)
        else:
            self.decode_busy_s += step_s
            self.decode_steps += 1
            if self._traffic is not None:
                # The KV of a sequence is read once, also where the sequence has drafts.
                starts = list(map(_START, plan.slices[: plan.decodes]))
                tokens = len(starts)
                for drafted in plan.slices[plan.decodes :]:
                    tokens += len(drafted.token_ids)
                    starts.append(drafted.start + len(drafted.token_ids) - 1)
                self.decode_read_bytes += self._traffic.weights(tokens) + self._traffic.kv(starts)


def _flops(flops: StepFlops, plan: StepPlan) -> float:
    chunks = plan.slices[plan.decodes :]
    decodes = flops.decodes(list(map(_START, plan.slices[: plan.decodes])))
    return decodes + sum([flops.chunk(one.start, len(one.token_ids), len(one.samples)) for one in chunks])


def since(load: WorkerLoad, base: WorkerLoad) -> dict[str, Any]:
    """Return the counts of `load` since `base` was taken, by their names. The engine counts on through a role flip."""
    return {name: getattr(load, name) - getattr(base, name) for name in COUNTED}


# Utilisation ----------------------------------------------------------------------------------------------------------
#
# The utilisation of a worker between two of its heartbeats: how busy its engine was, and how near its steps came to the peaks.
#
# MFU is the share of the device's peak of operations that steps with prompts reach while they run; MBU is the share of its peak
# of memory reads that all other steps reach (the terms of PaLM, appendix B, and of Databricks' "LLM inference performance
# engineering"). Both count what the model needs, not what the engine does, so waste lowers them. A measured peak may be too low
# on a machine that was busy then, and a small model may fit into caches: then they exceed 1.
START: Final = WorkerLoad(BlockCounts(0, 0, 0, 0, 0))
"""The load of a worker at the start of its incarnation. Only its counts have a meaning."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The utilisation of one worker in one time. None: unknown, or there were no such steps."""

    busy: float | None = None
    """The share of the time in which the engine made steps, [0, 1]."""
    mfu: float | None = None
    mbu: float | None = None


def utilisation(hello: WorkerHello, old: WorkerLoad, new: WorkerLoad) -> Utilisation:
    """Return the utilisation between two loads of one incarnation. With `START` as the old load: since the start."""
    prompt_s, decode_s = new.prompt_busy_s - old.prompt_busy_s, new.decode_busy_s - old.decode_busy_s
    busy = _share(prompt_s + decode_s, new.uptime_s - old.uptime_s)
    return Utilisation(
        None if busy is None else min(1.0, busy),
        _share(new.prompt_flops - old.prompt_flops, prompt_s * hello.peak_flops_per_s) or None,
        _share(new.decode_read_bytes - old.decode_read_bytes, decode_s * hello.peak_bytes_per_s) or None,
    )


def computed_tokens(role: Role, load: WorkerLoad) -> int:
    """Return the tokens for which the role exists: prompt tokens of prefill workers, output tokens of decode workers."""
    return load.computed_prompt_tokens if role is Role.PREFILL else load.output_tokens


def _share(part: float, whole: float) -> float | None:
    share = part / whole if whole > 0.0 else math.nan
    return share if 0.0 <= share < math.inf else None
