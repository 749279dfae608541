"""The memory and the step times of one worker with degrees. Every time is a floor divided by a share of the peak. Pure.

A step takes max(bytes / bandwidth, operations / compute), the roofline (Williams, Waterman and Patterson 2009). Tensor
parallelism adds the time of two all-reduces a layer: a latency, and the bytes that a ring moves; over several nodes, each node
sums first, and then nodes exchange their sums.

**Stages.** A batch passes the stages one after the other, so it is as fast as the GPUs of one stage are. As many batches as
there are stages are under way at a time, which are the *lanes* of the worker: each is like a worker of one stage's GPUs that
reads all layers, and has its share of the room for KV. Lanes wait for the largest stage.

**Whole experts.** Experts that a step chooses do not lie evenly on the GPUs, and all wait for the busiest. Of n GPUs with a
count of mean m and variance v each, the busiest has about m + sqrt(2 v ln n): the mean of the maximum of n normal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve.capacity.question import MOST_USERS, CapacityQuestion
from pdserve.core.roofline import StepFlops, StepTraffic
from pdserve.core.shards import Degrees

ROWS: Final = 256
"""Rows of logits that a step may hold at once: vLLM's default of sequences, and this project's largest."""
BLOCK_SIZE: Final = 16
"""Tokens of a KV block: the default of `engine.block_size`."""
ACTIVATION_BYTES: Final = 2
LOGIT_BYTES: Final = 4
ALL_REDUCE_S: Final = 5e-6
ALL_REDUCE_SHARE: Final = 0.4
"""The latency of an all-reduce, and the share of the links' rate that it reaches: fitted to all-reduces of vLLM 0.24 on 2, 4
and 8 H200, as aiconfigurator-core 0.12.0 (Apache-2.0) has measured them."""
NETWORK_BASE_S: Final = 6.8e-6
NETWORK_STEP_S: Final = 5.0e-6
"""The latency of a collective between nodes, and of each of its steps, as NCCL's own cost model has them for trees of small
messages (src/graph/tuning.cc of NCCL 2.18 to 2.27, baseLat and hwLat, LL protocol). An all-reduce over n nodes has 2 log2(n)
steps."""


def roofline_s(read_bytes: float, flops: float, bytes_per_s: float, flops_per_s: float) -> float:
    """Return the least time for these bytes and operations."""
    return max(read_bytes / bytes_per_s, flops / flops_per_s)


def bound_by(read_bytes: float, flops: float, bytes_per_s: float, flops_per_s: float) -> str:
    """Tell which of the two takes longer: "bandwidth" or "compute"."""
    return "bandwidth" if read_bytes / bytes_per_s >= flops / flops_per_s else "compute"


def e2e_s(ttft_s: float, tpot_s: float, output_tokens: int) -> float:
    """Return the time of a whole request: its first token, and the gaps of all others."""
    return ttft_s + (output_tokens - 1) * tpot_s


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one worker, all its GPUs together, in bytes."""

    total_bytes: float
    usable_bytes: float
    weights_bytes: float
    """With stages, each counts as much as the largest one, which is full first."""
    activation_bytes: float

    @property
    def kv_bytes(self) -> float:
        """The room for KV. It is 0 where weights and activations do not fit."""
        return max(0.0, self.usable_bytes - self.weights_bytes - self.activation_bytes)

    @property
    def fits(self) -> bool:
        """Tell whether weights and activations leave any room for KV."""
        return self.kv_bytes > 0


class WorkerSpeed:
    """One worker that serves the question's model. Times of steps are those of one lane, and `batch` is the batch of a lane."""

    def __init__(self, question: CapacityQuestion, degrees: Degrees) -> None:
        shape, gpu, tp = question.model.shape, question.gpu, degrees.tensor
        self.question, self.degrees, self.tp = question, degrees, tp
        self.lanes = degrees.pipeline
        self.evenness = shape.num_layers / (self.lanes * math.ceil(shape.num_layers / self.lanes))
        """The layers of the mean stage divided by those of the largest one."""
        self.flops = StepFlops.of(shape)
        self.expert_flops = sum(2.0 * count * one.mlp.experts_per_token * one.mlp.expert_numbers for one, count in shape.layers)
        """Operations of one token in routed experts."""
        self.traffic = StepTraffic.of(
            shape, weight_bits=question.weight_bits, kv_bits=question.kv_bits, head_bits=question.head_bits
        )
        self.flops_per_s = gpu.peak(question.compute_dtype) * tp * question.shares.compute * self.evenness
        self.bytes_per_s = gpu.bytes_per_s * tp * question.shares.bandwidth * self.evenness
        self.kv_copies = question.model.kv_copies(tp)
        self.memory = self._memory()

    @property
    def gpus(self) -> int:
        """The GPUs of the worker."""
        return self.degrees.ranks

    @property
    def room_bytes(self) -> float:
        """The room for KV that counts once. The largest stage is full first."""
        return self.memory.kv_bytes / self.kv_copies * self.evenness

    def lane(self, batch: float) -> float:
        """Return the batch of a lane when `batch` sequences run. It is at least one sequence, which is on its way alone."""
        return max(1.0, batch / self.lanes)

    def kv_bytes(self, tokens: int) -> float:
        """Return the bytes of one sequence's KV, stored once, as they cross the link."""
        return self.question.model.shape.kv_numbers_of(tokens) * self.question.kv_bits / 8

    def users_at(self, context: int) -> int:
        """Return the most sequences of this length that fit."""
        room, most = self.room_bytes, MOST_USERS
        return last_true(most, lambda users: self.held_bytes(users, context) <= room)

    def held_bytes(self, users: int, context: int) -> float:
        """Return the bytes of KV that this many sequences of this length hold while they run, stored once. Layers with a
        sliding window hold less than the context, but more than `kv_bytes`: whole blocks, and the blocks of a step."""
        shape, step = self.question.model.shape, self.question.max_num_batched_tokens
        numbers = shape.held_numbers(users, context, step_tokens=step, block_size=BLOCK_SIZE)
        return numbers * self.question.kv_bits / 8

    def max_context(self, users: int) -> int:
        """Return the longest context that fits for this many sequences at once, at most the positions of the model."""
        room, most = self.room_bytes, self.question.model.max_position
        return last_true(most, lambda tokens: self.held_bytes(users, tokens) <= room)

    def decode_s(self, batch: float, context: int) -> float:
        """Return the time of a step that gives one token to each of `batch` sequences of `context` tokens."""
        return roofline_s(*self._decode_work(batch, context), self.bytes_per_s, self.flops_per_s) + self.links_s(batch)

    def decode_bound(self, batch: float, context: int) -> str:
        """Tell what bounds such a step: "bandwidth" or "compute"."""
        return bound_by(*self._decode_work(batch, context), self.bytes_per_s, self.flops_per_s)

    def prefill_s(self, tokens: int) -> float:
        """Return the time of one prompt that is computed alone, in chunks of at most `max_num_batched_tokens`."""
        return roofline_s(*self._prefill_work(tokens), self.bytes_per_s, self.flops_per_s) + self.links_s(tokens)

    def prefill_bound(self, tokens: int) -> str:
        """Tell what bounds a prompt: "bandwidth" or "compute"."""
        return bound_by(*self._prefill_work(tokens), self.bytes_per_s, self.flops_per_s)

    def mixed_s(self, batch: float, context: int, chunk: float, prompt: int) -> float:
        """Return the time of a step with `batch` decodes and a mean chunk of `chunk` tokens of a prompt of `prompt` tokens.

        Products with weights serve both at once and read the weights once. A chunk often lies near the ridge of the roofline,
        where an engine reaches neither peak: there the root of the sum of squares fits measured prompts of 128 to 1,024 tokens
        (docs/capacity.md), and the larger of the two terms is too fast. Attention of decodes and of the chunk run one after the
        other, and do not overlap with products.
        """
        return self.beside_s(batch, context, chunk, (self.flops.chunk(0, prompt) - self.flops.token * prompt) * chunk / prompt)

    def beside_s(self, batch: float, context: int, chunk: float, pair_flops: float) -> float:
        """Return the time of the same step, in which the chunk's attention has `pair_flops` operations."""
        rows = batch + (1.0 if chunk else 0.0)
        products = math.hypot(
            self.weights_bytes(batch + chunk) / self.bytes_per_s,
            (self.token_flops(batch + chunk) * (batch + chunk) + self.flops.row * rows) / self.flops_per_s,
        )
        decodes = roofline_s(
            batch * self.kv_copies * self.traffic.kv((context - 1,)),
            batch * (self.flops.decodes((context - 1,)) - self.flops.token - self.flops.row),
            self.bytes_per_s,
            self.flops_per_s,
        )
        return products + decodes + pair_flops / self.flops_per_s + self.links_s(batch + chunk)

    def weights_bytes(self, tokens: float) -> float:
        """Return the bytes of weights that a step of `tokens` tokens reads, as if all GPUs read what the busiest one reads."""
        if not self.degrees.experts:
            return self.traffic.weights(tokens)
        routed = 0.0
        for number, chosen, size in self.traffic.experts:
            own, hit = number / self.tp, 1.0 - math.pow(1.0 - chosen / number, tokens)
            routed += size * min(1.0, busiest(own * hit, own * hit * (1.0 - hit), self.tp) / own)
        return self.traffic.fixed + routed

    def token_flops(self, tokens: float) -> float:
        """Return the operations of one token of a step of `tokens` in all layers, as if all GPUs had those of the busiest."""
        if not self.degrees.experts or not tokens:
            return self.flops.token
        factors = []
        for number, chosen, _ in self.traffic.experts:
            mean = tokens * chosen / self.tp
            most = tokens * min(chosen, number / self.tp)
            factors.append(min(most, busiest(mean, mean * (1.0 - 1.0 / self.tp), self.tp)) / mean)
        return self.flops.token + self.expert_flops * (max(factors) - 1.0)

    def links_s(self, tokens: float) -> float:
        """Return the time that a step of `tokens` tokens spends between GPUs: all-reduces, and the passes between stages."""
        return self.all_reduce_s(tokens) + self.passes_s(tokens)

    def passes_s(self, tokens: float) -> float:
        """Return the time of the passes between stages: each gives one row a token to the next stage, from each of its GPUs to
        one of the next."""
        own, per_node = self.question.gpu.scale_up_bytes_per_s, self.question.gpus_per_node
        row_bytes = self.question.model.shape.hidden_size * ACTIVATION_BYTES * tokens
        crossing = math.ceil(self.gpus / per_node) - 1 if self.tp <= per_node else self.lanes - 1
        within = 0.0 if own is None else ALL_REDUCE_S + row_bytes / (own * ALL_REDUCE_SHARE)
        between = NETWORK_BASE_S + NETWORK_STEP_S + row_bytes / self._node_rate(min(self.tp, per_node))
        return (self.lanes - 1 - crossing) * within + crossing * between

    def all_reduce_s(self, tokens: float) -> float:
        """Return the time of the all-reduces of a step: two a layer, each of one row a token, by rings over the GPUs' links.

        Over several nodes, each node adds its rows up, and the nodes exchange the sums over their network.
        """
        own, shape = self.question.gpu.scale_up_bytes_per_s, self.question.model.shape
        row_bytes = shape.hidden_size * ACTIVATION_BYTES * tokens
        near, nodes = min(self.tp, self.question.gpus_per_node), math.ceil(self.tp / self.question.gpus_per_node)
        time = 0.0
        if near > 1 and own is not None:
            time += ALL_REDUCE_S + 2 * (near - 1) / near * row_bytes / (own * ALL_REDUCE_SHARE)
        if nodes > 1:
            time += NETWORK_BASE_S + 2 * math.log2(nodes) * NETWORK_STEP_S
            time += 2 * (nodes - 1) / nodes * row_bytes / self._node_rate(near)
        return 2 * shape.num_layers * time

    def _node_rate(self, gpus: int) -> float:
        """Return the bytes a second that `gpus` GPUs of a node send to others, as their share of the node's network."""
        question = self.question
        return question.node_bytes_per_s * question.shares.link * gpus / question.gpus_per_node

    def _decode_work(self, batch: float, context: int) -> tuple[float, float]:
        start = (context - 1,)
        read = self.weights_bytes(batch) + batch * self.kv_copies * self.traffic.kv(start)
        return read, batch * (self.flops.decodes(start) - self.flops.token + self.token_flops(batch))

    def _prefill_work(self, tokens: int) -> tuple[float, float]:
        chunks = math.ceil(tokens / self.question.max_num_batched_tokens)
        more = (self.token_flops(tokens / chunks) - self.flops.token) * tokens
        return chunks * self.weights_bytes(tokens / chunks), self.flops.chunk(0, tokens, rows=1) + more

    def _memory(self) -> Memory:
        question, shape = self.question, self.question.model.shape
        total = question.gpu.memory_bytes * self.gpus
        embeddings = (shape.numbers - shape.layer_numbers) * question.head_bits
        if self.lanes > 1:  # the first stage has the embedding, and the last one the head: each counts as a whole stage's
            embeddings = self.lanes * shape.head_numbers * question.head_bits
        weights = (shape.layer_numbers * question.weight_bits / self.evenness + embeddings) / 8
        row = 2 * shape.hidden_size * self.tp + question.model.widest  # each GPU holds the row, and its share of the rest
        logits = ROWS * shape.vocab_size * LOGIT_BYTES
        activations = self.lanes * (question.max_num_batched_tokens * row * ACTIVATION_BYTES + logits)
        return Memory(total, total * question.gpu_memory_utilization, weights, activations)


def busiest(mean: float, variance: float, count: int) -> float:
    """Return about how much the largest of `count` numbers of this mean and variance is (see above)."""
    return mean + math.sqrt(2.0 * variance * math.log(count))


def last_true(most: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` for which `holds`, or 0. If `holds` is true for a number, it is true for all
    smaller numbers."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
