"""The prompt tokens that a step may compute beside sequences that decode, by the target of these. Pure.

A target for the time between tokens (TPOT) bounds the time of a step, since each decoding sequence gets one token a step.
"""

from __future__ import annotations

from typing import Final

from pdserve.engine.schedule.step_rates import StepCost

TARGET_SHARE: Final = 0.8
"""The planned time of a step, as a share of the target. The rest is for what a plan does not know: later chunks
of a prompt cost more than the mean one, and a token still passes the worker's loop, the link and the router."""


def chunk_budget(target_s: float, cost: StepCost | None, *, decodes: int, floor: int, ceiling: int) -> int:
    """Return the largest number of prompt tokens with which a step still meets the target.

    target_s: the target in seconds; 0: there is none. cost: the expected time of steps; None: nobody knows it. decodes: tokens
    of the step that are no prompt's. floor: the step computes at least so many prompt tokens, whatever the target, so that
    prompts go on. ceiling: it has memory for so many at most, which also bounds the floor.
    """
    if target_s <= 0.0 or cost is None:
        return ceiling
    left_s = target_s * TARGET_SHARE - cost.step_s(decodes)
    if left_s >= cost.token_s * ceiling:
        return ceiling
    if left_s <= cost.token_s * floor:
        return min(floor, ceiling)
    return int(left_s / cost.token_s)
