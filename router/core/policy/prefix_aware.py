"""The policy "prefix_aware": the worker with the least cost, where KV that it holds already costs nothing.

A prefill worker costs the time until it would have computed the prompt: queued tokens plus the prompt's tokens that it does not
hold, divided by its tokens in a second. This is multiplied by 1 + `RECOMPUTE_WEIGHT` times the share of the prompt that it does
not hold: tokens that are computed again also delay all requests behind this one, and evict what others could have used.

A decode worker costs the larger of two shares once it has the request, that of its KV pool and that of its slots, plus the
share of its KV pool that must be read from another worker. Tokens that it holds take no new room and are not read. A
step takes longer in proportion to the load, and a read in proportion to its tokens; both shares of a large pool are of about
the same size in seconds, so their weights are equal.

Queued work outweighs a cached prefix at the latest when it takes three times as long as the prefix would, so no worker becomes
a hot spot.
"""

from __future__ import annotations

from typing import Final

from pdserve.core.worker import Role
from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlisted
from router.core.pools.load import prompt_s

RECOMPUTE_WEIGHT: Final = 2.0
"""Simulated on 100 workers under a public trace, at a load that saturates them, 2 met the targets of 77 % of the requests, and
0 of 22 %. At half that load they are alike. With 4, the p99 of TTFT at half load rises (docs/design/0028-placement.md)."""


@shortlisted(Shortlist(least_loaded=2, holders=4))
def score(candidate: Candidate, request: RequestView) -> float:
    """Return the negative cost: seconds for a prefill worker, a share of the worker for a decode worker."""
    uncached = max(0, request.prompt_tokens - candidate.cached_tokens)
    if candidate.role is Role.PREFILL:
        anew = uncached / max(1, request.prompt_tokens)
        own_s = prompt_s(candidate.queued_tokens + uncached, candidate.counted_tokens_per_s)
        return -own_s * (1 + RECOMPUTE_WEIGHT * anew)
    new_tokens = max(0, request.kv_tokens - candidate.cached_tokens)
    kv_share = (candidate.promised_tokens + new_tokens) / candidate.kv_tokens
    slot_share = (candidate.running + 1) / max(1, candidate.running + candidate.free_slots)
    return -(max(kv_share, slot_share) + uncached / candidate.kv_tokens)
