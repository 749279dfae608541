"""The decision where a request's prompt is computed, and the reason for it. Metrics count the reasons."""

from __future__ import annotations

from enum import Enum

from pdserve.core.errors import Unavailable
from pdserve.core.sampling import Placement


class Reason(Enum):
    """The reason for a placement, as reports and metrics name it."""

    REQUESTED = "requested"
    CONFIGURED = "configured"
    PREFILL_POOL_EMPTY = "prefill_pool_empty"
    PAIRS_SET_ASIDE = "pairs_set_aside"
    SHORT_PROMPT = "short_prompt"
    DEFAULT = "default"


def decide(
    asked: Placement | None,
    configured: Placement,
    *,
    prompt_tokens: int,
    colocate_below_tokens: int,
    has_prefill: bool,
    has_pair: bool = True,
) -> tuple[Placement, Reason]:
    """Return disaggregated or colocated, never AUTO. `has_pair`: KV may go from some prefill worker to some decode worker.

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
            raise Unavailable(f"placement is disaggregated ({why.value}) and every pair of workers is set aside")
        return Placement.DISAGGREGATED, why
    if not has_prefill:
        return Placement.COLOCATED, Reason.PREFILL_POOL_EMPTY
    if prompt_tokens < colocate_below_tokens:
        return Placement.COLOCATED, Reason.SHORT_PROMPT
    if not has_pair:
        return Placement.COLOCATED, Reason.PAIRS_SET_ASIDE
    return Placement.DISAGGREGATED, Reason.DEFAULT
