"""The prediction of a new request's first token, and its early rejection when the class's target will be missed. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pdserve.core.errors import Overloaded
from pdserve.core.slo import SloClass
from router.core.forecast import times
from router.core.policy.candidate import Candidate
from router.core.queue.limits import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S


class Prediction(NamedTuple):
    """The time to a request's first token if it were placed as things are now."""

    wait_s: float  # for a place on a decode worker, and for the prompts before it
    compute_s: float  # of its own prompt

    @property
    def ttft_s(self) -> float:
        """The time from now to the first token."""
        return self.wait_s + self.compute_s


class Outlook(NamedTuple):
    """The prospects of a new request, as things are now."""

    computer: Candidate  # the worker that would compute its prompt
    has_room: bool  # some decode worker would take the request at once


def predict(computer: Candidate, prompt_tokens: int, queue_wait_s: float | None) -> Prediction | None:
    """Predict for a request whose prompt the worker `computer` would compute, after a wait in the router's queue. None: a rate
    that it depends on is unknown."""
    wait_s = times.total(queue_wait_s, times.prompt_wait_s(computer))
    compute_s = times.compute_s(computer, prompt_tokens)
    return None if wait_s is None or compute_s is None else Prediction(wait_s, compute_s)


def check_target(slo: SloClass, prediction: Prediction | None, *, late_s: float = 0.0) -> None:
    """Check that a new request probably gets its first token in time. `late_s` is the part of the time that has passed since it
    arrived.

    Raises `Overloaded` when it would be too late and would wait first: later, when others have gone, it need not wait. The
    client should try again after the excess, within the bounds of any refusal. A request that would not wait is never refused,
    because no later time is better. So an idle cluster takes every request, also one whose own prompt takes longer than its
    target. Without a target or without a prediction no request is refused.
    """
    if slo.ttft_s is None or prediction is None or prediction.wait_s <= 0:
        return
    excess_s = late_s + prediction.ttft_s - slo.ttft_s
    if excess_s > 0:
        raise Overloaded(
            f"class {slo.name}: the first token would come after {late_s + prediction.ttft_s:.3g} s, and its target ttft_s is "
            f"{slo.ttft_s:.3g} s; the request would wait {prediction.wait_s:.3g} s before its prompt is computed",
            retry_after_s=min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, excess_s)),
            reason="predicted_late",
        )
