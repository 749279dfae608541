"""The policy "goodput": the worker on which the request probably meets its class's targets for TTFT and TPOT.

Each score is a band, and a place within the band, which is in (0, 1]:

    3  the request meets every target it has, as predicted by `router.core.forecast.times`
    2  a rate that a prediction needs is unknown
    1  it misses one target
    0  it misses both

The place falls with `predicted / allowed`, summed over the targets: more slack or less lateness, relative to what is allowed,
is better. It falls with the load where the request has no targets or a rate is unknown. A worker with an unknown rate goes
before those that would be late: it has computed nothing of late, and it gets a rate only from work.

A prefill worker decides about TTFT, a decode worker about TPOT, and about TTFT if it computes the prompt. The request has only
the targets that the worker decides about.
"""

from __future__ import annotations

from typing import Final

from router.core.forecast import times
from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlisted

BANDS: Final = 4
LEAST_ALLOWED_S: Final = 1e-3
"""A request that is late already has no time left. It counts as if it had this much, so that it prefers the shortest queue."""


@shortlisted(Shortlist(least_loaded=4, holders=4))
def score(candidate: Candidate, request: RequestView) -> float:
    """Return a number in (0, 1]. It never rises with the worker's queue, its sequences, its load or its times."""
    met, lateness, known = 0, 0.0, True
    targets = _targets(candidate, request)
    for predicted_s, allowed_s in targets:
        if predicted_s is None:
            known = False
        else:
            met += predicted_s <= allowed_s
            lateness += predicted_s / max(allowed_s, LEAST_ALLOWED_S)
    if not targets or not known:
        return _in_band(2 if targets else 3, candidate.load)
    missed = len(targets) - met
    return _in_band((3, 1, 0)[missed], lateness)


def _targets(candidate: Candidate, request: RequestView) -> list[tuple[float | None, float]]:
    """Return the predicted and the allowed time for each target that the request has."""
    targets = []
    if request.ttft_left_s is not None:
        targets.append((times.ttft_s(_counted(candidate), request.prompt_tokens), request.ttft_left_s))
    if request.tpot_s is not None:
        targets.append((times.tpot_s(candidate), request.tpot_s))
    return targets


def _counted(candidate: Candidate) -> Candidate:
    """Return the candidate with the rate as it counts, if it is known: equal workers take turns whatever they measured."""
    known = candidate.prompt_tokens_per_s > 0 and candidate.counted_tokens_per_s > 0
    return candidate._replace(prompt_tokens_per_s=candidate.counted_tokens_per_s) if known else candidate


def _in_band(band: int, burden: float) -> float:
    return (band + 1 / (1 + burden)) / BANDS
