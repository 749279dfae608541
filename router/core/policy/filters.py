"""Filters keep the workers that may take a request. Each is a pure function of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable

from router.core.policy.candidate import Candidate


def alive(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Keep the workers that make steps and are not silent."""
    return [c for c in candidates if not c.suspect]


def long_enough(candidates: Iterable[Candidate], max_len: int) -> list[Candidate]:
    """Keep the workers whose sequences may be `max_len` tokens long."""
    return [c for c in candidates if c.max_model_len >= max_len]


def with_room(candidates: Iterable[Candidate], need_tokens: int) -> list[Candidate]:
    """Keep the workers that would probably reserve. A worker with nothing promised is always asked, because the estimate may be
    wrong."""
    return [
        c
        for c in candidates
        if not c.refused
        and not c.claimed
        and c.free_slots > 0
        and (c.promised_tokens == 0 or c.promised_tokens + need_tokens <= c.kv_tokens)
    ]
