"""Log-probabilities of output tokens. They are immutable, because they cross threads and, packed, the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pdserve.core.errors import InvalidRequest

MAX_PROMPT_LOGPROBS_BYTES: Final = 3 << 20
"""Bytes that the log-probabilities of one prompt may take on the wire. A message of a link has at most 8 MiB, and one step
ends at most two prompts that are scored; clients of gRPC take 4 MiB unless told otherwise."""
_TOKEN_BYTES: Final = 4
_TOP_BYTES: Final = 8  # a float and an id, which has up to 4 bytes below 2^28


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one output token: natural logarithms of the model's own probabilities, before temperature,
    penalties, bias and filters.

    `top` has (id, log-probability) of the most likely tokens, most likely first; the lower id comes first among equals. The
    drawn token is not added to `top`.
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


def check_prompt_logprobs(prompt_len: int, count: int | None) -> None:
    """Check that the log-probabilities of a prompt, with `count` likeliest tokens each, fit one message. Raises
    `InvalidRequest`."""
    if count is None:
        return
    most = MAX_PROMPT_LOGPROBS_BYTES // (_TOKEN_BYTES + _TOP_BYTES * count)
    if prompt_len > most:
        raise InvalidRequest(
            f"{count} likeliest tokens are possible for prompts of at most {most} tokens, and this one has {prompt_len}",
            field="prompt_logprobs",
        )


def unpack_logprobs(packed: PackedLogprobs, count: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of each of `count` tokens. Raises ValueError when `packed` holds another number."""
    width, rest = divmod(len(packed.top), max(count, 1))
    if len(packed.chosen) != count or rest:
        raise ValueError(
            f"{len(packed.chosen)} log-probabilities and {len(packed.top)} likeliest tokens came, {count} tokens were expected"
        )
    if any(map(math.isnan, packed.chosen)) or any(map(math.isnan, packed.top)):
        raise ValueError("a log-probability is not a number")
    top = tuple(zip(packed.top_ids, packed.top, strict=True))
    return tuple(TokenLogprobs(value, top[i * width : (i + 1) * width]) for i, value in enumerate(packed.chosen))
