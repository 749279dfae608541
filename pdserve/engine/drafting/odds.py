"""The odds that a draft is right, learned from the drafts that were verified. Pure.

A draft counts only if all drafts before it in its slice are right. So for each kind of draft and each place, the share of right
drafts is learned among those whose predecessors were right, and the product of the shares up to a place is the probability
that the draft there *survives*. A text is easier or harder than the mean of its kind, so each sequence has a
factor as well. It is that of a family of kinds, their first word: what lookups are worth in a text says nothing of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.core.ids import SeqId

WINDOW: Final = 128.0
"""The shares of a kind forget drafts by e in so many: an application that comes or goes is noticed within seconds."""
OWN_WINDOW: Final = 16.0
"""The same of the factor of one sequence, whose text changes from prose to a copy and back within some tens of tokens."""
FIRST_SHARE: Final = 0.5
"""The share that an unknown kind begins with, as if `PRIOR` drafts had been seen. Half is enough to try a kind where steps of
few rows are nearly free, and not where they are not."""
PRIOR: Final = 2.0
OWN_PRIOR: Final = 3.0
KINDS: Final = 256  # more than all drafters have together; a bound


class _Share:
    """The share of right drafts at one place of one kind."""

    __slots__ = ("right", "tried")

    def __init__(self) -> None:
        self.right = self.tried = 0.0

    def add(self, right: bool) -> None:
        """Count one draft."""
        keep = 1.0 - 1.0 / WINDOW
        self.right = self.right * keep + right
        self.tried = self.tried * keep + 1.0

    def of(self, prior: float) -> float:
        """Return the share, which is near `prior` while few drafts were tried."""
        return (self.right + PRIOR * prior) / (self.tried + PRIOR)


class Odds:
    """The odds of all kinds of drafts of one engine."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[_Share]] = {}
        # Of a sequence and a family of kinds: the right drafts, and those that were expected.
        self._own: dict[SeqId, dict[str, tuple[float, float]]] = {}

    def survival(self, seq_id: SeqId, kind: str, count: int) -> list[float]:
        """Return the probability that each of `count` drafts of a sequence is right, with all drafts before it."""
        right, expected = self._own.get(seq_id, {}).get(kind.partition(" ")[0], (0.0, 0.0))
        factor = (right + OWN_PRIOR) / (expected + OWN_PRIOR)
        survivals, product = list[float](), 1.0
        for share in self._shares(kind, count):
            product *= share * factor if factor <= 1.0 else 1.0 - (1.0 - share) / factor
            survivals.append(product)
        return survivals

    def learn(self, seq_id: SeqId, kind: str, drafted: int, accepted: int) -> None:
        """Learn from a slice of `drafted` drafts, of which the first `accepted` were right."""
        tried = min(drafted, accepted + 1)
        own, family = self._own.setdefault(seq_id, {}), kind.partition(" ")[0]
        right, expected = own.get(family, (0.0, 0.0))
        keep = 1.0 - 1.0 / OWN_WINDOW
        shares = self._kinds.setdefault(kind, []) if kind in self._kinds or len(self._kinds) < KINDS else []
        for place, share in enumerate(self._shares(kind, tried)):
            if place == len(shares):
                shares.append(_Share())
            shares[place].add(place < accepted)
            right, expected = right * keep + (place < accepted), expected * keep + share
        own[family] = right, expected

    def forget(self, seq_id: SeqId) -> None:
        """Forget a sequence that has ended."""
        self._own.pop(seq_id, None)

    def _shares(self, kind: str, count: int) -> Sequence[float]:
        """Return the share of right drafts at each place. A place of which little is known is like the one before it."""
        known, shares, prior = self._kinds.get(kind, ()), list[float](), FIRST_SHARE
        for place in range(count):
            if place < len(known):
                prior = known[place].of(prior)
            shares.append(prior)
        return shares
