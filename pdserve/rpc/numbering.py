"""Numbers of a link's messages: what tells a loss or a repeat from silence. Pure; one pair for each stream."""

from __future__ import annotations

from pdserve.core.errors import ReplicaLost


class Incoming:
    """What the peer numbers, from 1."""

    def __init__(self) -> None:
        self._last = 0

    def is_new(self, number: int) -> bool:
        """False: a repeat, to be ignored. Raises `ReplicaLost` when a message before this one was lost.

        0 is a peer that does not number.
        """
        if number == 0:
            return True
        if number > self._last + 1:
            raise ReplicaLost(f"message {self._last + 1} of the link was lost: {number} came next")
        if number <= self._last:
            return False
        self._last = number
        return True


class Outgoing:
    """What we number, in the order of writing."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last
