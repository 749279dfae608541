"""A scaling policy for the prefill pool: one worker for so many waiting prompt tokens.

    PYTHONPATH=examples pdserve up --autoscaling --max-workers 8 --set prefill.scaling_policy=scaling_policy:prefill_workers

docs/autoscaling.md lists all that a policy gets. The limits of the pool and of the cluster are applied to what it returns.
"""

from __future__ import annotations

import math

from pdserve.planner.policy import ScalingContext

WAITING_TOKENS = 20_000
"""The prompt tokens that one worker should have before it at most: those that it computes within about a second."""


def prefill_workers(context: ScalingContext) -> int:
    """Grow to the queue at once, and shrink by one worker an interval. None means that a value is not known."""
    waiting = (context.observations.demand.queued_prompt_tokens or 0) + (context.pool.queued_tokens or 0)
    return max(math.ceil(waiting / WAITING_TOKENS), context.workers - 1, 1)
