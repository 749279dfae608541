"""The explanation of a request: what its router and its workers wrote down about it. All times are of the router's clock."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.observe.story import StoryEntry


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """One worker's part of a request. `role` is "prefill" or "decode". `missing` says why there is no part, or is empty."""

    worker_id: str
    role: str
    entries: tuple[StoryEntry, ...] = ()
    left_out: int = 0
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known of a request. `others` are ids of older requests to which the client gave the same id."""

    request_id: str
    correlation_id: str
    arrived_s: float
    outcome: str
    """The state in which the request has ended. Empty: it runs."""
    entries: tuple[StoryEntry, ...]
    left_out: int
    parts: tuple[WorkerPart, ...]
    others: tuple[str, ...]
