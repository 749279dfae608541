"""Identifiers. Each kind has its own type, so that the type checker finds mixed-up identifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
BlockId = NewType("BlockId", int)
NULL_BLOCK: Final = BlockId(-1)
"""The entry of a block table for a dead block, which is behind the sliding window, so nothing reads or writes it; or for
a block that is not taken yet: see `WindowPool`."""
BlockSum = NewType("BlockSum", int)
"""A checksum of 64 bits over all stored bytes of one KV block, or of a part of it. It finds accidental changes.
It does not stop an attacker."""
NULL_SUM: Final = BlockSum(0)
"""The entry of a list of checksums for a dead block."""
Incarnation = NewType("Incarnation", int)
"""A random unsigned 64-bit number that names one life of a process: the time from its start, or from a role flip, to its end or
the next flip. Messages of an earlier life carry another number and are refused."""
Handle = NewType("Handle", int)
"""A number that names one (request, attempt, bind) on one link. A router incarnation never uses a handle twice."""
FIRST_DIRECT_HANDLE: Final = Handle(1 << 63)
"""Handles from this one on name direct requests, which a worker takes at a port of its own. Routers count theirs from 1."""
SeqId = NewType("SeqId", int)
"""A number that names one sequence in one engine. An engine never uses a number twice."""


@dataclass(frozen=True, slots=True, order=True)
class LeaseId:
    """The id of one lease. It is unique for ever: no incarnation is used twice, and its counter only grows."""

    incarnation: Incarnation
    counter: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}.{self.counter}"


@dataclass(frozen=True, slots=True, order=True)
class ReaderId:
    """The id of one bind of one decode worker. A lease can be committed to one reader only."""

    incarnation: Incarnation
    counter: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}/{self.counter}"
