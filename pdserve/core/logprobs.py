"""Log-probabilities of one output token. Immutable: crosses threads and, packed, the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature, penalties, bias and filters.

    top: (id, log-probability) of the most likely tokens, most likely first, the lower id first among equals; the drawn
    token is among them only if it is one of them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PackedLogprobs(Protocol):
    """Log-probabilities of consecutive tokens, one list behind the other, as they cross the wire. Each token has equally many
    likeliest tokens."""

    @property
    def chosen(self) -> Sequence[float]: ...
    @property
    def top_ids(self) -> Sequence[int]: ...
    @property
    def top(self) -> Sequence[float]: ...


def unpack_logprobs(packed: PackedLogprobs, count: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of `count` tokens. Raises ValueError when `packed` holds another number of them."""
    width, rest = divmod(len(packed.top), max(count, 1))
    if len(packed.chosen) != count or rest:
        raise ValueError(f"log-probabilities of {len(packed.chosen)} tokens with {len(packed.top)} others, of {count} expected")
    top = tuple(zip(packed.top_ids, packed.top, strict=True))
    return tuple(TokenLogprobs(value, top[i * width : (i + 1) * width]) for i, value in enumerate(packed.chosen))
