"""The policy "session_affinity": the worker of the session's last turn, unless it is much more loaded than the least loaded.

A prefill worker is much more loaded if its queue is longer by the time in which it computes this prompt, since the KV that it
may still have saves no more. A decode worker is much more loaded if it is fuller by `SLACK_SHARE` of its KV or slots.
A request without a session goes to the least loaded worker.

This policy needs no knowledge of prefixes: it serves where workers do not tell what they hold, and costs the same for any
prompt.
"""

from __future__ import annotations

from typing import Final

from pdserve.core.worker import Role
from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.shortlist import Shortlist, shortlisted
from router.core.pools.load import prompt_s

SLACK_SHARE: Final = 0.25
"""The load moves by less than this when turns of others come and go, so a session stays where it is. A full worker is a quarter
fuller than one at three quarters, so no session holds on to it while others have much room."""


@shortlisted(Shortlist(session=True, least_loaded=1))
def score(candidate: Candidate, request: RequestView) -> float:
    """Return the negative load, less what a session's worker may have more than others."""
    return (_slack(candidate, request) if candidate.session else 0.0) - candidate.load


def _slack(candidate: Candidate, request: RequestView) -> float:
    if candidate.role is Role.PREFILL:
        return prompt_s(request.prompt_tokens, candidate.counted_tokens_per_s)
    return SLACK_SHARE
