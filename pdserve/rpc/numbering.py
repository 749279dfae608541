"""The numbers of a link's messages, which reveal lost and repeated messages. Pure; each link has one pair of counters."""

from __future__ import annotations

from pdserve.core.errors import ReplicaLost


class Incoming:
    """The numbers of the messages that the peer sends, from 1."""

    def __init__(self) -> None:
        self._last = 0

    @property
    def last(self) -> int:
        """The number of the last message that came. All before it came as well."""
        return self._last

    def is_new(self, number: int) -> bool:
        """Tell whether the message is new. False: it is a repeat, which the caller ignores.

        The number 0 comes from a peer that does not number. Raises `ReplicaLost` when an earlier message was lost.
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
    """The numbers of the messages that we send, in the order of writing."""

    def __init__(self) -> None:
        self._last = 0

    @property
    def last(self) -> int:
        """The number that was given last."""
        return self._last

    def next(self) -> int:
        """Return the number of the next message; the first is 1."""
        self._last += 1
        return self._last
