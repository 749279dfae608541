"""Whether the engine still makes steps, as its loop sees it. Pure; loop thread only.

The engine owes a sign of life while commands wait that it has not taken, or when its last word was that it could go on.
An engine that waits for a command, or whose waiting sequences do not fit, owes nothing: its snapshots say so. Time counts
only while the loop itself gets to run, so a process that was stopped does not take itself for stuck when it goes on.
"""

from __future__ import annotations

from typing import Final

from pdserve.worker.messages import StepEvents

LOOK_S: Final = 0.5
"""Seconds between two looks. At most one heartbeat later the router knows as well."""
MAX_STEPS_LATE: Final = 30
"""A step may take so many times what the slowest of the largest ones took when the worker started. Measured: a worker that
shared its cores with two busy processes at a lower priority took 28 times as long as alone."""


def step_timeout_s(configured_s: float, slowest_s: float) -> float:
    """After how many seconds a step that does not end makes its worker a lost one. `slowest_s`: of the largest steps, at the
    start, which includes the compilation of kernels."""
    return max(configured_s, MAX_STEPS_LATE * slowest_s)


class EngineWatch:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.stalled_s = 0.0
        """For how long the engine has owed a step without a sign of life."""
        self._submitted = 0
        self._taken = 0
        self._has_work = False
        self._owed = False  # at the last look, and nothing was heard since

    def submitted(self) -> None:
        """One more command waits for the engine."""
        self._submitted += 1

    def heard(self, events: StepEvents) -> None:
        self.stalled_s, self._owed = 0.0, False
        if events.snapshot is not None:
            self._taken, self._has_work = events.snapshot.commands_taken, events.snapshot.has_work

    def look(self, elapsed_s: float) -> bool:
        """Called every `LOOK_S`, with the time since the last call. Returns whether the engine is stuck."""
        owes = self._has_work or self._submitted > self._taken
        # Work that came since the last look has waited for less than a look, and counts from this one. Of a look that comes
        # late, only the time that it was to take counts: nobody was there to hear the engine.
        self.stalled_s = self.stalled_s + min(elapsed_s, 2 * LOOK_S) if owes and self._owed else 0.0
        self._owed = owes
        return self.stalled_s > self.timeout_s

    @property
    def reason(self) -> str:
        """Why the engine is stuck, in words."""
        return f"the engine has made no step for {self.stalled_s:.1f} s, of at most {self.timeout_s:.1f} s, while work waits"
