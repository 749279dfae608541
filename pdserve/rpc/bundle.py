"""The messages of one end of a link: their numbers, those that wait to be written, the bundles in which they travel, and those
that are kept until the other end has said that it has them.

Numbers reveal lost and repeated messages; each link has one pair of counters.

grpc.aio takes 30 to 70 us of CPU for each message that it moves, whatever the message holds. All messages that wait when the
writer is free therefore go as one message, a bundle, if the peer has said that it takes bundles. The writer never waits for a
bundle to fill. A bundle has one number, because it is lost or repeated as a whole.

Where both ends can take a broken stream up again, written messages are kept until the peer has said that it has them, and each
message says what has come from the peer. A stream that breaks may have lost what was under way. Whoever takes it up again
sends what the other end lacks, out of these.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError

from pdserve.core.errors import ReplicaLost
from pdserve.rpc.v1 import link_pb2


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


MAX_BUNDLE_MESSAGES: Final = 256
"""A bundle has at most so many messages. Each of these already costs the link little more than its own bytes."""
MAX_BUNDLE_BYTES: Final = 1 << 20
"""A bundle has at most so many bytes of messages, far fewer than either side receives. A larger message travels alone."""


class Outbound(Generic[Message]):
    """The messages that wait, in order, for one link. All calls come from the loop of the link."""

    def __init__(self, limit: int, incoming: Incoming | None = None) -> None:
        """Make an empty queue, which holds up to `limit` messages. `incoming` has the numbers of the peer's messages."""
        self._incoming = incoming or Incoming()
        self._kept: Kept[Message] | None = None
        self._again: deque[Message] = deque()  # what the peer lacks of what was written
        self.bundles = False
        """True once the peer has said that it takes bundles."""
        self._limit = limit
        self._waiting: deque[Message] = deque()
        self._some = asyncio.Event()
        self._numbers = Outgoing()

    def put(self, message: Message) -> None:
        """Add a message. Raises `asyncio.QueueFull` when too many wait."""
        if len(self._waiting) >= self._limit:
            raise asyncio.QueueFull
        self._waiting.append(message)
        self._some.set()

    def keep(self) -> None:
        """Keep what is written from now on, so that a broken stream can be taken up again."""
        self._kept = Kept(self._numbers.last)

    def confirm(self, number: int) -> None:
        """Note that the peer has all messages up to this number."""
        if self._kept is not None:
            self._kept.confirm(number)

    def again(self, number: int) -> None:
        """Write, before anything else, all that a peer lacks which has the messages up to this number. Raises `ReplicaLost`
        when that is not kept."""
        if self._kept is None:
            raise ReplicaLost("nothing of this link was kept")
        self._again = deque(self._kept.after(number))
        self._some.set()

    async def next(self) -> Message:
        """Wait until there is a message. Return the numbered message to write: this one, or a bundle of several."""
        while not self._waiting and not self._again:
            self._some.clear()
            await self._some.wait()
        message = self._again.popleft() if self._again else self._numbered()
        if self._kept is not None:
            message.received = self._incoming.last
        return message

    def _numbered(self) -> Message:
        """Take the messages that go now, one of them at least, and number them as one."""
        message = self._waiting.popleft()
        if self.bundles and self._waiting:
            taken, size_bytes = [message], message.ByteSize()
            while self._waiting and len(taken) < MAX_BUNDLE_MESSAGES:
                size_bytes += self._waiting[0].ByteSize()
                if size_bytes > MAX_BUNDLE_BYTES:
                    break
                taken.append(self._waiting.popleft())
            if len(taken) > 1:
                message = type(message)(bundle=[one.SerializeToString() for one in taken])
        message.number = self._numbers.next()
        if self._kept is not None:
            self._kept.add(message)
        return message


def unbundled(message: Message) -> Sequence[Message]:
    """Return the messages of a bundle in their order, or the message itself. Raises `ReplicaLost` when one cannot be read, and
    for more than `MAX_BUNDLE_MESSAGES`: empty messages take two bytes on the wire and hundreds in memory."""
    if not message.bundle:
        return (message,)
    if len(message.bundle) > MAX_BUNDLE_MESSAGES:
        most = f"at most {MAX_BUNDLE_MESSAGES} are allowed"
        raise ReplicaLost(f"bundle {message.number} of the link has {len(message.bundle)} messages; {most}")
    try:
        return [type(message).FromString(one) for one in message.bundle]
    except DecodeError as exc:
        raise ReplicaLost(f"bundle {message.number} of the link cannot be read: {exc}") from exc
