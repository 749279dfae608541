"""The policy "most_free_kv": the worker whose KV pool is the emptiest, relative to its size."""

from __future__ import annotations

from router.core.policy.candidate import Candidate, RequestView


def score(candidate: Candidate, request: RequestView) -> float:
    """Return the share of the pool that stays free after this request, in [0, 1]."""
    free = candidate.kv_tokens - candidate.promised_tokens - request.kv_tokens
    return max(0.0, free / candidate.kv_tokens)
