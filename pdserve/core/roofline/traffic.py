"""The bytes that a step must read from memory: the weights once, and the KV of each token that is attended to.

Activations are left out: they are small and mostly stay in caches. So the number is the least that any engine can read, and
its share of the peak is what a better engine could still win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.roofline.flops import attended
from pdserve.core.roofline.shape import ModelShape


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
