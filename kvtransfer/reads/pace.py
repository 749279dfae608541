"""How fast KV of one peer has been coming, and so how long a read of it may take. Pure.

Reads from one peer share one link, so the deadline of a new read counts what is under way before it. The speed is measured
over stretches of time in which something was under way. It only ever lengthens deadlines: a link that was fast so far may
have got company, and a deadline that is too short costs a retry over the same slow link.
"""

from __future__ import annotations

from typing import Final

from pdserve.config import LeaseConfig

STRETCH_BYTES: Final = 256 << 10
STRETCH_S: Final = 0.1
"""Shorter stretches measure latency, or the moment in which two reads end together."""
NEWEST_WEIGHT: Final = 0.5
"""Of the last stretch in the running mean: a link that gets slow is believed after two."""
PATIENCE: Final = 4.0
"""Times longer than expected before a read is given up."""


class Pace:
    """Of one peer. `now_s` is the caller's clock."""

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        self.bytes_s: float | None = None
        """Measured; None until enough has arrived."""
        self._busy_since_s = 0.0  # something was under way all the time since, and is not yet counted
        self._stretch_s = 0.0
        self._stretch_bytes = 0

    def posted(self, nbytes: int, *, now_s: float) -> None:
        if self.in_flight_bytes == 0:
            self._busy_since_s = now_s
        self.in_flight_bytes += nbytes

    def ended(self, nbytes: int, *, arrived: bool, now_s: float) -> None:
        """A read has stopped. One that failed says nothing of the speed."""
        self.in_flight_bytes -= nbytes
        if arrived:
            self._stretch_s += now_s - self._busy_since_s
            self._stretch_bytes += nbytes
            if self._stretch_bytes >= STRETCH_BYTES and self._stretch_s >= STRETCH_S:
                self._measure(self._stretch_bytes / self._stretch_s)
        else:
            self._measure(None)
        self._busy_since_s = now_s

    def deadline_s(self, nbytes: int, config: LeaseConfig) -> float:
        """For a read of `nbytes` that is posted now."""
        bytes_s = config.transfer_bandwidth_bytes_s
        if self.bytes_s is not None:
            bytes_s = min(bytes_s, self.bytes_s)
        return config.transfer_deadline_floor_s + PATIENCE * (self.in_flight_bytes + nbytes) / bytes_s

    def _measure(self, newest: float | None) -> None:
        """End of a stretch."""
        if newest is not None:
            before = newest if self.bytes_s is None else self.bytes_s
            self.bytes_s = before + NEWEST_WEIGHT * (newest - before)
        self._stretch_s, self._stretch_bytes = 0.0, 0
