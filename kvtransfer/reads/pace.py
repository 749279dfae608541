"""The measured speed of reads from one peer, which sets the deadlines of further reads. Pure.

Reads from one peer share one link, so the deadline of a new read includes the bytes that are under way before it. The speed
is measured over stretches of time in which a read was under way. A measured speed can only lengthen deadlines: a link that
was fast so far may now be shared, and a deadline that is too short costs a retry over the same slow link.
"""

from __future__ import annotations

from typing import Final

from pdserve.config import LeaseConfig

STRETCH_BYTES: Final = 256 << 10
STRETCH_S: Final = 0.1
"""A stretch has at least so many bytes and seconds. A shorter one measures latency, or the moment when two reads end."""
NEWEST_WEIGHT: Final = 0.5
"""The weight of the newest stretch in the running mean. A link that gets slow shows clearly after two stretches."""
PATIENCE: Final = 4.0
"""A read is given up when it takes so many times the expected time."""


class Pace:
    """The speed and the load of the link to one peer. `now_s` is the caller's clock."""

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        self.bytes_s: float | None = None
        """The measured bytes a second. None until the first stretch has ended."""
        self._busy_since_s = 0.0  # reads have been under way since then; the stretch does not count this time yet
        self._stretch_s = 0.0
        self._stretch_bytes = 0

    def posted(self, nbytes: int, *, now_s: float) -> None:
        """Note that a read was posted."""
        if self.in_flight_bytes == 0:
            self._busy_since_s = now_s
        self.in_flight_bytes += nbytes

    def ended(self, nbytes: int, *, arrived: bool, now_s: float) -> None:
        """Note that a read has stopped. `arrived` False: the read failed, so it tells nothing about the speed."""
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
        """Return the seconds that a read of `nbytes` may take when it is posted now."""
        bytes_s = config.transfer_bandwidth_bytes_s
        if self.bytes_s is not None:
            bytes_s = min(bytes_s, self.bytes_s)
        return config.transfer_deadline_floor_s + PATIENCE * (self.in_flight_bytes + nbytes) / bytes_s

    def _measure(self, newest: float | None) -> None:
        """End a stretch. `newest` is its speed in bytes a second; None: a read failed, so the stretch does not count."""
        if newest is not None:
            before = newest if self.bytes_s is None else self.bytes_s
            self.bytes_s = before + NEWEST_WEIGHT * (newest - before)
        self._stretch_s, self._stretch_bytes = 0.0, 0
