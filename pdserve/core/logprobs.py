"""Log-probabilities of output tokens. They are immutable, because they cross threads and, packed, the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one output token: natural logarithms of the model's own probabilities, before temperature,
    penalties, bias and filters.

    `top` has (id, log-probability) of the most likely tokens, most likely first; the lower id comes first among equals. The
    drawn token is not added to them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PackedLogprobs(Protocol):
    """The log-probabilities of consecutive output tokens, concatenated, as they cross the wire. Each output token has the same
    number of likeliest tokens."""

    @property
    def chosen(self) -> Sequence[float]:
        """The log-probability of each drawn token."""

    @property
    def top_ids(self) -> Sequence[int]:
        """The ids of the likeliest tokens of all output tokens."""

    @property
    def top(self) -> Sequence[float]:
        """The log-probability of each id in `top_ids`."""


def unpack_logprobs(packed: PackedLogprobs, count: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of each of `count` tokens. Raises ValueError when `packed` holds another number."""
    width, rest = divmod(len(packed.top), max(count, 1))
    if len(packed.chosen) != count or rest:
        raise ValueError(
            f"{len(packed.chosen)} log-probabilities and {len(packed.top)} likeliest tokens came, {count} tokens were expected"
        )
    top = tuple(zip(packed.top_ids, packed.top, strict=True))
    return tuple(TokenLogprobs(value, top[i * width : (i + 1) * width]) for i, value in enumerate(packed.chosen))
