"""The part of a policy that says which workers it needs scored. A choice then costs the same in a pool of any size.

The pool puts the shortlist together from orders that it keeps: only workers that may take the request are on it, and at least
one is when there is one. A policy without a shortlist of its own scores all workers that may take the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

from router.core.policy.candidate import Candidate


class Why(Enum):
    """The reason why a worker was picked, as stories and metrics name it."""

    __hash__ = object.__hash__  # members are singletons; a hash of their names is computed in Python at each look-up

    SESSION = "session"
    CACHED_PREFIX = "cached_prefix"
    LEAST_LOADED = "least_loaded"
    TURN = "turn"
    DRAWN = "drawn"
    SCORE = "score"
    """A policy that scores all workers picked it. Its author knows more."""
    LEADER = "leader"
    """The worker has the KV of the request's leader, which has the same prompt."""
    ALONE = "alone"
    """The request is suspected of ending its workers, and this one serves nobody else."""
    PROBE = "probe"
    """The router has to find out whether KV passes through this worker."""


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The candidates that a policy needs scored. The groups are joined, and a worker is in it once."""

    least_loaded: int = 0
    """The number of workers with the least load."""
    holders: int = 0
    """The number of workers that hold the longest beginnings of the prompt."""
    least_recent: int = 0
    """The number of workers that were picked the longest ago."""
    drawn: int = 0
    """The number of workers that are drawn by chance."""
    session: bool = False
    """The worker of the session's last turn is on the list."""
    everyone: bool = False
    """All workers that may take the request are on the list."""


EVERYONE: Final = Shortlist(everyone=True)
"""The shortlist of a policy without one of its own."""

_F = TypeVar("_F", bound=Callable[..., object])


def shortlisted(shortlist: Shortlist) -> Callable[[_F], _F]:
    """Return a decorator that gives a policy its shortlist."""

    def mark(policy: _F) -> _F:
        policy.shortlist = shortlist  # type: ignore[attr-defined]
        return policy

    return mark


def shortlist_of(policy: Callable[..., object]) -> Shortlist:
    """Return the shortlist of a policy. A policy without one scores everyone."""
    found = getattr(policy, "shortlist", EVERYONE)
    return found if isinstance(found, Shortlist) else EVERYONE


def why(picked: Candidate, shortlist: Shortlist) -> Why:
    """Return the reason of a pick: the strongest one that the shortlist and the picked worker have in common."""
    if shortlist.everyone:
        return Why.SCORE
    if shortlist.session and picked.session:
        return Why.SESSION
    if shortlist.holders and picked.cached_tokens:
        return Why.CACHED_PREFIX
    if shortlist.drawn:
        return Why.DRAWN
    return Why.LEAST_LOADED if shortlist.least_loaded else Why.TURN
