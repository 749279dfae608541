"""Identifiers. Each is its own type, so that mixing two up fails the type check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
BlockId = NewType("BlockId", int)
BlockSum = NewType("BlockSum", int)
"""A checksum of 64 bits over all stored bytes of one KV block. It finds what changed by accident; it is no secret."""
Incarnation = NewType("Incarnation", int)
"""A random unsigned 64-bit number, new at every process start: fences all that an earlier process said."""
Handle = NewType("Handle", int)
"""Names one (request, attempt, bind) on one router-worker link; never used twice by a router incarnation."""
SeqId = NewType("SeqId", int)
"""Names one sequence in one engine; never used twice by an engine."""


@dataclass(frozen=True, slots=True, order=True)
class LeaseId:
    """Unique for ever: an incarnation is never used twice and its counter only grows."""

    incarnation: Incarnation
    counter: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}.{self.counter}"


@dataclass(frozen=True, slots=True, order=True)
class ReaderId:
    """One bind of one decode worker: the only reader that a lease can be committed to."""

    incarnation: Incarnation
    counter: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}/{self.counter}"
