"""The holders of blocks, by number."""

from __future__ import annotations

from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.ids import SeqId


def sequence(i: int) -> Holder:
    """A sequence that computes or reads the blocks."""
    return Holder(HolderKind.SEQUENCE, SeqId(i))


def lease(i: int) -> Holder:
    """A lease over the blocks."""
    return Holder(HolderKind.LEASE, SeqId(i))


def inbound(i: int) -> Holder:
    """A reservation for blocks that are read from another worker."""
    return Holder(HolderKind.INBOUND, SeqId(i))
