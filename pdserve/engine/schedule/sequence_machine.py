"""The states of one sequence of the scheduler, and the table of the events that change them. The module is pure.

The scheduler keeps a list of the sequences in each state. A sequence that is computed step after step has no event: only the
events of this table change its list.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class SequenceState(Enum):
    """The state of one sequence. ENDED is final."""

    NEW = "new"
    """It is not in the schedule yet."""
    WAITING = "waiting"
    """It holds no blocks and waits for those of all its tokens."""
    INBOUND = "inbound"
    """A peer's KV is read into its blocks. It takes no part in steps."""
    PREFILLING = "prefilling"
    """It runs, and more than its last output token may be left to compute."""
    DECODING = "decoding"
    """It runs, and only its last output token is left to compute."""
    ABORTING = "aborting"
    """It was aborted during a step that computes it, so it keeps its blocks until the step is collected."""
    ENDED = "ended"


class SequenceEvent(Enum):
    """The events of one sequence."""

    QUEUED = "queued"
    RESERVED_LOCAL = "reserved_local"
    """It got its blocks at once, and its prompt is computed here."""
    RESERVED_INBOUND = "reserved_inbound"
    """It got its blocks at once, and its prompt's KV comes from a peer."""
    ADMITTED = "admitted"
    """It got its blocks after it had waited for them."""
    ACTIVATED = "activated"
    """The peer's KV is here, and its lease is committed."""
    PREFILLED = "prefilled"
    """Its tokens are computed, or all but its last output token are."""
    PREEMPTED = "preempted"
    """It lost its blocks to an older sequence, and is recomputed later."""
    FINISHED = "finished"
    """Its last output token was drawn."""
    FAILED = "failed"
    """No token could be drawn: its logits were not finite numbers."""
    ABORTED = "aborted"
    ABORTED_IN_STEP = "aborted_in_step"
    """It was aborted during a step that computes it."""
    COLLECTED = "collected"
    """The step during which it was aborted is collected."""


_S, _E = SequenceState, SequenceEvent

TRANSITIONS: Final[dict[tuple[SequenceState, SequenceEvent], SequenceState]] = {
    (_S.NEW, _E.QUEUED): _S.WAITING,
    (_S.NEW, _E.RESERVED_LOCAL): _S.PREFILLING,
    (_S.NEW, _E.RESERVED_INBOUND): _S.INBOUND,
    (_S.WAITING, _E.ADMITTED): _S.PREFILLING,
    (_S.WAITING, _E.ABORTED): _S.ENDED,
    (_S.INBOUND, _E.ACTIVATED): _S.DECODING,
    (_S.INBOUND, _E.ABORTED): _S.ENDED,
    (_S.PREFILLING, _E.PREFILLED): _S.DECODING,
    (_S.PREFILLING, _E.FINISHED): _S.ENDED,  # a lent sequence, which never decodes here
    (_S.DECODING, _E.FINISHED): _S.ENDED,
    **{(s, _E.PREEMPTED): _S.WAITING for s in (_S.PREFILLING, _S.DECODING)},
    **{(s, _E.FAILED): _S.ENDED for s in (_S.PREFILLING, _S.DECODING)},
    **{(s, _E.ABORTED): _S.ENDED for s in (_S.PREFILLING, _S.DECODING)},
    **{(s, _E.ABORTED_IN_STEP): _S.ABORTING for s in (_S.PREFILLING, _S.DECODING)},
    (_S.ABORTING, _E.ABORTED_IN_STEP): _S.ABORTING,  # it is aborted again
    (_S.ABORTING, _E.COLLECTED): _S.ENDED,
}

MAX_HISTORY: Final = 16
"""The most events that a sequence keeps for the message of an illegal transition. A sequence that is never preempted has at
most five."""
