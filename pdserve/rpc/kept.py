"""The messages that one end of a link keeps until the other end has said that it has them. Pure.

A stream that breaks may have lost what was under way. Whoever takes it up again sends what the other end lacks, out of here.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from pdserve.core.errors import ReplicaLost
from pdserve.rpc.v1 import link_pb2

MAX_KEPT_BYTES: Final = 4 << 20
"""At most so many bytes are kept. A decode worker with 256 sequences sends 0.5 MB between two heartbeats, whose answers say
what has come."""

Message = TypeVar("Message", link_pb2.WorkerMessage, link_pb2.RouterMessage)


class Kept(Generic[Message]):
    """Numbered messages, in order. Beyond the limit the oldest are given up, and with them the chance to go on from there."""

    def __init__(self, last: int, limit_bytes: int = MAX_KEPT_BYTES) -> None:
        """Keep the messages after number `last`."""
        self._messages: deque[tuple[Message, int]] = deque()
        self._bytes = 0
        self._limit_bytes = limit_bytes
        self._had = last  # the peer has all up to this one, or they were given up
        self._last = last

    def add(self, message: Message) -> None:
        """Keep a message that gets written for the first time."""
        assert message.number == self._last + 1
        self._last = message.number
        size_bytes = message.ByteSize()
        self._messages.append((message, size_bytes))
        self._bytes += size_bytes
        while self._bytes > self._limit_bytes:
            self._drop()

    def confirm(self, number: int) -> None:
        """Forget the messages that the peer has: all up to this number."""
        while self._had < min(number, self._last):
            self._drop()

    def after(self, number: int) -> list[Message]:
        """Return the messages that a peer lacks which has all up to this number. Raises `ReplicaLost` when one of them was
        given up, and when the peer says that it has a message that was never sent."""
        if number < self._had:
            raise ReplicaLost(f"message {number + 1} of the link is not kept any more, nor are others up to {self._had}")
        if number > self._last:
            raise ReplicaLost(f"the peer says that it has message {number} of the link; {self._last} is the last that was sent")
        self.confirm(number)
        return [message for message, _ in self._messages]

    def _drop(self) -> None:
        message, size_bytes = self._messages.popleft()
        self._bytes -= size_bytes
        self._had = message.number
