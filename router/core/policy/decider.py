"""The decision where a request's prompt is computed, and the reason for it. Metrics count the reasons.

The rules come first: what the client asks for, the settings, and what the pools can do (`decide`). A request that the rules
leave free is weighed by predicted cost (`weigh`).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from pdserve.core.errors import Unavailable
from pdserve.core.sampling import Placement
from router.core.forecast import times
from router.core.policy.candidate import Candidate

MARGIN_S: Final = 0.02
"""A prompt moves to the decode worker only for a larger gain: about one decode step. Predictions leave out steps that run now
and messages, so a smaller gain is noise. Tiny prompts on an idle cluster thus stay disaggregated, and decisions do not flap."""


class Reason(Enum):
    """The reason for a placement, as reports and metrics name it."""

    REQUESTED = "requested"
    CONFIGURED = "configured"
    PREFILL_POOL_EMPTY = "prefill_pool_empty"
    PAIRS_SET_ASIDE = "pairs_set_aside"
    VERSIONS_DIFFER = "versions_differ"
    """No two workers speak a common version of the protocol between workers."""
    SHORT_PROMPT = "short_prompt"
    PREFILL_QUEUE = "prefill_queue"
    """The prompt would wait too long on the prefill worker."""
    PREFILL_SLOW = "prefill_slow"
    """The prefill worker computes too slowly."""
    CACHED_SUFFIX = "cached_suffix"
    """The decode worker has the KV of so much of the prompt that it soon computes the rest."""
    SIBLING = "sibling"
    """The decode worker has the KV of the request's leader, which has the same prompt."""
    TRANSFER = "transfer"
    """The KV would take too long to move."""
    SUSPECT = "suspect"
    """Workers died while they computed the request, so one decode worker computes all of it, and nothing else."""
    DEFAULT = "default"


_NO_PAIR: Final = {
    Reason.PAIRS_SET_ASIDE: "every pair of workers is set aside",
    Reason.VERSIONS_DIFFER: "no prefill worker and decode worker speak a common version (`pdserve status` shows the versions)",
}


def decide(
    asked: Placement | None,
    configured: Placement,
    *,
    prompt_tokens: int,
    colocate_below_tokens: int,
    has_prefill: bool,
    has_pair: bool = True,
    no_pair: Reason = Reason.PAIRS_SET_ASIDE,
) -> tuple[Placement, Reason]:
    """Return disaggregated or colocated, never AUTO. `has_pair`: KV may go from some prefill worker to some decode worker.
    `no_pair` is the reason if it may not.

    Raises `Unavailable` when disaggregation is demanded and there is no prefill worker or no pair.
    """
    explicit = asked is not None and asked is not Placement.AUTO
    wanted = asked if asked is not None else configured
    why = Reason.REQUESTED if explicit else Reason.CONFIGURED
    if wanted is Placement.COLOCATED:
        return Placement.COLOCATED, why
    if wanted is Placement.DISAGGREGATED:
        if not has_prefill:
            raise Unavailable(f"placement is disaggregated ({why.value}) and no prefill worker is ready")
        if not has_pair:
            raise Unavailable(f"placement is disaggregated ({why.value}) and {_NO_PAIR[no_pair]}")
        return Placement.DISAGGREGATED, why
    if not has_prefill:
        return Placement.COLOCATED, Reason.PREFILL_POOL_EMPTY
    if prompt_tokens < colocate_below_tokens:
        return Placement.COLOCATED, Reason.SHORT_PROMPT
    if not has_pair:
        return Placement.COLOCATED, no_pair
    return Placement.DISAGGREGATED, Reason.DEFAULT


def weigh(decoder: Candidate, lender: Candidate, prompt_tokens: int, exposed_s: float | None) -> Reason | None:
    """Return why the decode worker should compute the prompt of `prompt_tokens` itself. None: the prefill worker should, or the
    costs are unknown.

    The cost of each way is in seconds, of the request and of those that it delays. Disaggregated: the wait and the computation
    on the prefill worker, and the transfer that the second token waits for (`exposed_s`, None for unknown). Colocated: the wait
    and the computation on the decode worker, and the same computation once more for each sequence that decodes there, because
    all of them stand still for that time. At least one is counted: the worker is for decoding, and others will come.
    """
    queue_there_s, compute_there_s = times.prompt_wait_s(lender), times.compute_s(lender, prompt_tokens)
    queue_here_s, compute_here_s = times.prompt_wait_s(decoder), times.compute_s(decoder, prompt_tokens)
    if exposed_s is None or queue_there_s is None or compute_there_s is None or queue_here_s is None or compute_here_s is None:
        return None
    harm_s = compute_here_s * max(1, decoder.running)
    saved_s = {
        Reason.PREFILL_QUEUE: queue_there_s - queue_here_s,
        Reason.TRANSFER: exposed_s,
        _compute_reason(decoder, lender): compute_there_s - compute_here_s,
    }
    if sum(saved_s.values()) - harm_s <= MARGIN_S:
        return None
    return max(saved_s, key=lambda reason: saved_s[reason])


def _compute_reason(decoder: Candidate, lender: Candidate) -> Reason:
    return Reason.CACHED_SUFFIX if decoder.cached_tokens > lender.cached_tokens else Reason.PREFILL_SLOW
