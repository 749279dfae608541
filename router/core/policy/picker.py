"""The choice among scored workers."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.policy.candidate import Candidate


def pick(candidates: Sequence[Candidate], scores: Sequence[float], turn: int) -> Candidate | None:
    """Return the candidate with the highest score. `turn` chooses among equals. None: there is no candidate."""
    if not candidates:
        return None
    best = max(scores)
    equals = [c for c, s in zip(candidates, scores, strict=True) if s == best]
    return equals[turn % len(equals)]
