"""Where a request's prompt is computed, and why. The reasons are counted in metrics."""

from __future__ import annotations

from enum import Enum

from pdserve.core.errors import Unavailable
from pdserve.core.sampling import Placement


class Reason(Enum):
    REQUESTED = "requested"
    CONFIGURED = "configured"
    PREFILL_POOL_EMPTY = "prefill_pool_empty"
    SHORT_PROMPT = "short_prompt"
    DEFAULT = "default"


def decide(
    asked: Placement | None,
    configured: Placement,
    *,
    prompt_tokens: int,
    colocate_below_tokens: int,
    has_prefill: bool,
) -> tuple[Placement, Reason]:
    """Never AUTO. Raises `Unavailable` when disaggregation is demanded and no prefill worker is there."""
    explicit = asked is not None and asked is not Placement.AUTO
    wanted = asked if asked is not None else configured
    why = Reason.REQUESTED if explicit else Reason.CONFIGURED
    if wanted is Placement.COLOCATED:
        return Placement.COLOCATED, why
    if wanted is Placement.DISAGGREGATED:
        if not has_prefill:
            raise Unavailable(f"placement is disaggregated ({why.value}) and no prefill worker is ready")
        return Placement.DISAGGREGATED, why
    if not has_prefill:
        return Placement.COLOCATED, Reason.PREFILL_POOL_EMPTY
    if prompt_tokens < colocate_below_tokens:
        return Placement.COLOCATED, Reason.SHORT_PROMPT
    return Placement.DISAGGREGATED, Reason.DEFAULT
