"""The floating-point operations of a step. A multiplication and an addition are two operations.

A token is multiplied by every number of the layers that it passes, and with the query and key of each token that it attends
to. The head is computed only for rows after which a token is drawn. Norms, rotations and activations are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.roofline.shape import ModelShape


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
