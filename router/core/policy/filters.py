"""Which workers may take a request. Each filter is a pure function of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable

from router.core.policy.candidate import Candidate


def alive(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Without those that have fallen silent."""
    return [c for c in candidates if not c.suspect]


def long_enough(candidates: Iterable[Candidate], max_len: int) -> list[Candidate]:
    """Those whose sequences may be `max_len` tokens long."""
    return [c for c in candidates if c.max_model_len >= max_len]


def with_room(candidates: Iterable[Candidate], need_tokens: int) -> list[Candidate]:
    """Those that would probably reserve. One with nothing promised is always asked: the estimate may be wrong."""
    return [
        c
        for c in candidates
        if not c.refused
        and not c.claimed
        and c.free_slots > 0
        and (c.promised_tokens == 0 or c.promised_tokens + need_tokens <= c.kv_tokens)
    ]
