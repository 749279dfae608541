"""The choice among scored workers."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.policy.candidate import Candidate


def pick(candidates: Sequence[Candidate], scores: Sequence[float]) -> Candidate | None:
    """Return the candidate with the highest score. Among equals it is the one that was picked the longest ago, and then the one
    that joined first. None: there is no candidate."""
    if not candidates:
        return None
    best = max(scores)
    equals = [c for c, s in zip(candidates, scores, strict=True) if s == best]
    return equals[0] if len(equals) == 1 else min(equals, key=_turn)


def _turn(candidate: Candidate) -> tuple[int, int]:
    return candidate.picked, candidate.link
