"""The prompt of a request whose parts are earlier answers, and the answers that are kept for it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve_bench.load.failures import ANSWER_GONE, MIXED_PROMPT
from pdserve_bench.load.target import LoadAnswer
from pdserve_bench.workload.request import AnswerOf, BenchRequest, Ids

MAX_KEPT_TOKENS: Final = 1 << 22
"""Tokens of answers that are kept. They need some 40 MiB."""

Encode = Callable[[str], Ids]


class CannotFill(Exception):
    """A prompt has a part that cannot be filled in. The argument is the reason for the row."""


@dataclass(frozen=True, slots=True)
class _Kept:
    text: str
    ids: array[int]
    tokens: int


class KeptAnswers:
    """The latest answers. The oldest ones are dropped first."""

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._answers: dict[int, _Kept] = {}
        self._order: deque[int] = deque()

    def keep(self, number: int, answer: LoadAnswer) -> None:
        """Keep the answer of a request that was answered whole."""
        kept = _Kept("".join(answer.texts), array("I", answer.ids), sum(count for _, count in answer.arrivals))
        self._answers[number] = kept
        self._order.append(number)
        self._tokens += kept.tokens
        while self._tokens > self._max_tokens:
            self._tokens -= self._answers.pop(self._order.popleft()).tokens

    def text(self, number: int) -> str:
        """Return the text of an answer. Raises `CannotFill`."""
        return self._get(number).text

    def ids(self, number: int, encode: Encode | None) -> Ids:
        """Return the tokens of an answer. Raises `CannotFill`."""
        kept = self._get(number)
        if kept.ids or not kept.text:
            return tuple(kept.ids)
        if encode is None:
            raise CannotFill(ANSWER_GONE)
        return encode(kept.text)

    def _get(self, number: int) -> _Kept:
        if number not in self._answers:
            raise CannotFill(ANSWER_GONE)
        return self._answers[number]


def fill(request: BenchRequest, kept: KeptAnswers, encode: Encode | None) -> str | Ids:
    """Return the whole prompt of a request: token ids if a part has ids, else text. Raises `CannotFill`."""
    parts = request.prompt
    if len(parts) == 1 and not isinstance(parts[0], AnswerOf):
        return parts[0]
    if not any(isinstance(part, tuple) for part in parts):
        return "".join(kept.text(part.number) if isinstance(part, AnswerOf) else str(part) for part in parts)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            raise CannotFill(MIXED_PROMPT)
        ids += kept.ids(part.number, encode) if isinstance(part, AnswerOf) else part
    return tuple(ids)
