"""Log-probabilities of one output token. Immutable: crosses threads and, packed, the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature, penalties, bias and filters.

    top: (id, log-probability) of the most likely tokens, most likely first, the lower id first among equals; the drawn
    token is among them only if it is one of them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
