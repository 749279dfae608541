"""One request of a benchmark, before it is sent. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class AnswerOf:
    """The tokens that an earlier request of the workload was answered with. They become a part of a later prompt."""

    number: int


Ids: TypeAlias = tuple[int, ...]
PromptPart: TypeAlias = str | Ids | AnswerOf
"""Text, token ids, or an earlier answer."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    It is sent at `send_at_s` or, where that is None, as soon as the generator has room for it. A request with `after` waits
    until all of these requests have ended, and then for `think_s`. Two requests after the same one are a fork, and one request
    after two is a join.
    """

    number: int
    """The requests of a workload count from 0, in the order in which they may be sent."""
    prompt: tuple[PromptPart, ...]
    """The parts follow each other without anything between them. Text and token ids are not mixed in one prompt."""
    max_tokens: int
    send_at_s: float | None = None
    """The time since the start of the run."""
    after: tuple[int, ...] = ()
    think_s: float = 0.0
    slo_class: str = ""
    """The class of the request. Empty: the default class."""
    session: str = ""
    """The conversation that the request belongs to. Empty: none."""
    prompt_tokens: int | None = None
    """The tokens of the prompt, where the workload knows them. A prompt with an earlier answer counts its `max_tokens`."""
