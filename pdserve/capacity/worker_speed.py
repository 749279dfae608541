"""The memory and the step times of one worker of `tp` GPUs. Every time is a floor divided by a share of the peak. Pure.

A step takes max(bytes / bandwidth, operations / compute), the roofline (Williams, Waterman and Patterson 2009). Tensor
parallelism adds the time of two all-reduces a layer: a latency, and the bytes that a ring moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve.capacity.question import MOST_USERS, CapacityQuestion
from pdserve.core.roofline import StepFlops, StepTraffic

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
    """One worker of `tp` GPUs that serves the question's model."""

    def __init__(self, question: CapacityQuestion, tp: int) -> None:
        shape, gpu = question.model.shape, question.gpu
        self.question, self.tp = question, tp
        self.flops = StepFlops.of(shape)
        self.traffic = StepTraffic.of(
            shape, weight_bits=question.weight_bits, kv_bits=question.kv_bits, head_bits=question.head_bits
        )
        self.flops_per_s = gpu.peak(question.compute_dtype) * tp * question.shares.compute
        self.bytes_per_s = gpu.bytes_per_s * tp * question.shares.bandwidth
        self.kv_copies = question.model.kv_copies(tp)
        self.memory = self._memory()

    def kv_bytes(self, tokens: int) -> float:
        """Return the bytes of one sequence's KV, stored once, as they cross the link."""
        return self.question.model.shape.kv_numbers_of(tokens) * self.question.kv_bits / 8

    def users_at(self, context: int) -> int:
        """Return the most sequences of this length that fit."""
        room, most = self.memory.kv_bytes / self.kv_copies, MOST_USERS
        return last_true(most, lambda users: self.held_bytes(users, context) <= room)

    def held_bytes(self, users: int, context: int) -> float:
        """Return the bytes of KV that this many sequences of this length hold while they run, stored once. Layers with a
        sliding window hold less than the context, but more than `kv_bytes`: whole blocks, and the blocks of a step."""
        shape, step = self.question.model.shape, self.question.max_num_batched_tokens
        numbers = shape.held_numbers(users, context, step_tokens=step, block_size=BLOCK_SIZE)
        return numbers * self.question.kv_bits / 8

    def max_context(self, users: int) -> int:
        """Return the longest context that fits for this many sequences at once, at most the positions of the model."""
        room, most = self.memory.kv_bytes / self.kv_copies, self.question.model.max_position
        return last_true(most, lambda tokens: self.held_bytes(users, tokens) <= room)

    def decode_s(self, batch: float, context: int) -> float:
        """Return the time of a step that gives one token to each of `batch` sequences of `context` tokens."""
        return roofline_s(*self._decode_work(batch, context), self.bytes_per_s, self.flops_per_s) + self.all_reduce_s(batch)

    def decode_bound(self, batch: float, context: int) -> str:
        """Tell what bounds such a step: "bandwidth" or "compute"."""
        return bound_by(*self._decode_work(batch, context), self.bytes_per_s, self.flops_per_s)

    def prefill_s(self, tokens: int) -> float:
        """Return the time of one prompt that is computed alone, in chunks of at most `max_num_batched_tokens`."""
        return roofline_s(*self._prefill_work(tokens), self.bytes_per_s, self.flops_per_s) + self.all_reduce_s(tokens)

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
        rows = batch + (1.0 if chunk else 0.0)
        products = math.hypot(
            self.traffic.weights(batch + chunk) / self.bytes_per_s,
            (self.flops.token * (batch + chunk) + self.flops.row * rows) / self.flops_per_s,
        )
        decodes = roofline_s(
            batch * self.kv_copies * self.traffic.kv((context - 1,)),
            batch * (self.flops.decodes((context - 1,)) - self.flops.token - self.flops.row),
            self.bytes_per_s,
            self.flops_per_s,
        )
        pairs = (self.flops.chunk(0, prompt) - self.flops.token * prompt) * chunk / prompt
        return products + decodes + pairs / self.flops_per_s + self.all_reduce_s(batch + chunk)

    def all_reduce_s(self, tokens: float) -> float:
        """Return the time of the all-reduces of a step: two a layer, each of one row a token, by rings over the GPUs' links."""
        own = self.question.gpu.scale_up_bytes_per_s
        if self.tp == 1 or own is None:
            return 0.0
        shape = self.question.model.shape
        moved = 2 * (self.tp - 1) / self.tp * shape.hidden_size * ACTIVATION_BYTES * tokens
        return 2 * shape.num_layers * (ALL_REDUCE_S + moved / (own * ALL_REDUCE_SHARE))

    def _decode_work(self, batch: float, context: int) -> tuple[float, float]:
        start = (context - 1,)
        read = self.traffic.weights(batch) + batch * self.kv_copies * self.traffic.kv(start)
        return read, batch * self.flops.decodes(start)

    def _prefill_work(self, tokens: int) -> tuple[float, float]:
        chunks = math.ceil(tokens / self.question.max_num_batched_tokens)
        return chunks * self.traffic.weights(tokens / chunks), self.flops.chunk(0, tokens, rows=1)

    def _memory(self) -> Memory:
        question, shape = self.question, self.question.model.shape
        total = question.gpu.memory_bytes * self.tp
        embeddings = (shape.numbers - shape.layer_numbers) * question.head_bits
        weights = (shape.layer_numbers * question.weight_bits + embeddings) / 8
        row = 2 * shape.hidden_size * self.tp + question.model.widest  # each GPU holds the row, and its share of the rest
        activations = question.max_num_batched_tokens * row * ACTIVATION_BYTES + ROWS * shape.vocab_size * LOGIT_BYTES
        return Memory(total, total * question.gpu_memory_utilization, weights, activations)


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
