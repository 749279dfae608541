"""The policy "prefix_aware": the worker with the least cost, where KV that it holds already costs nothing.

A prefill worker costs the time until it would have computed the prompt: queued tokens plus the prompt's tokens that it does not
hold, divided by its tokens in a second.

A decode worker costs the larger of two shares once it has the request, that of its KV pool and that of its slots, plus the
share of its KV pool that must be read from another worker. Tokens that it holds take no new room and are not read. A
step takes longer in proportion to the load, and a read in proportion to its tokens; both shares of a large pool are of about
the same size in seconds, so their weights are equal.

Queued work outweighs a cached prefix as soon as it takes longer than the prefix would: no worker becomes a hot spot.
"""

from __future__ import annotations

from pdserve.core.worker import Role
from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlisted
from router.core.pools.load import prompt_s


@shortlisted(Shortlist(least_loaded=2, holders=4))
def score(candidate: Candidate, request: RequestView) -> float:
    """Return the negative cost: seconds for a prefill worker, a share of the worker for a decode worker."""
    uncached = max(0, request.prompt_tokens - candidate.cached_tokens)
    if candidate.role is Role.PREFILL:
        return -prompt_s(candidate.queued_tokens + uncached, candidate.counted_tokens_per_s)
    new_tokens = max(0, request.kv_tokens - candidate.cached_tokens)
    kv_share = (candidate.promised_tokens + new_tokens) / candidate.kv_tokens
    slot_share = (candidate.running + 1) / max(1, candidate.running + candidate.free_slots)
    return -(max(kv_share, slot_share) + uncached / candidate.kv_tokens)
