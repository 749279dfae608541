"""Service classes: what each class of requests may expect, and how it stands beside the others. Pure.

A class has a target for TTFT, a target for TPOT, or both. A request that names no class belongs to `DEFAULT_CLASS`, which has
no target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SloClass:
    """One class of requests. A target of None is none: no wait and no gap misses it."""

    name: str
    ttft_s: float | None = None
    """The first token should leave the router so long after the request has arrived."""
    tpot_s: float | None = None
    """The later tokens should come so far apart on average."""
    priority: int = 0
    """It is added to the priority of each request of the class."""
    queue_share: float = 1.0
    """The requests of the class may fill this share of the queue."""


DEFAULT_CLASS: Final = SloClass("default")

BUILT_IN: Final = {
    one.name: one
    for one in (
        DEFAULT_CLASS,
        SloClass("voice", ttft_s=0.15),
        SloClass("code", ttft_s=0.2),
        SloClass("chat", ttft_s=0.5, tpot_s=0.05),
        SloClass("batch", ttft_s=2.0, queue_share=0.5),
    )
}
"""The classes that every router knows, by name. The settings may change them and add others."""
