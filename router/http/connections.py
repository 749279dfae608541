"""The number of connected clients is bounded, and a new one may push out an old one.

A connection without a request waits: for a request, or for the rest of its head. One that has been answered makes room first,
the one that has waited longest before the others, because its client can ask again. One that has only come, or has begun a
head, gets some seconds for it, and makes room when these are over. So neither idle clients nor clients that send a head very
slowly lock others out for long, and nobody is pushed out while its request is on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

PATIENCE_S: Final = 2.0
"""A head may take so long before its connection has to make room. TCP sends a lost segment again after 0.2 to 1 s."""
LEAST_REFUSED: Final = 64
REFUSED_SHARE: Final = 2
"""Half as many connections as have places may be on their way out, so that the clients of a burst get an answer that says
why."""


class Connection(Protocol):
    """A connection as the table sees it."""

    @property
    def has_unsent(self) -> bool:
        """True while a part of an answer waits for the client to take it."""

    def give_way(self) -> None:
        """End now, because another connection takes the place."""


class ConnectionTable:
    """The connections of one HTTP server, which owns this. At most `max_connections` are in it, each from `admit` to
    `forget`."""

    def __init__(
        self,
        limit: int | Callable[[], int],
        on_refused: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit`: the number, or what returns the present one. `on_refused` hears of each connection that gets no place."""
        self._limit = limit
        self._on_refused = on_refused
        self._clock = clock
        self._all: set[Connection] = set()
        self._answered: dict[Connection, None] = {}  # the one that has waited longest comes first, here and below
        self._begun_s: dict[Connection, float] = {}
        self._refused: dict[Connection, None] = {}

    @property
    def max_connections(self) -> int:
        """The number of connections that may be in the table now."""
        return self._limit() if callable(self._limit) else self._limit

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Connection) -> bool:
        """Give the connection a place, if need be the place of a waiting connection. False: no connection makes room. The
        client then gets an answer that says so. The connection stays known until `forget`, or until too many others get such an
        answer."""
        if len(self._all) >= self.max_connections:
            leaver = self._leaver()
            if leaver is None:
                self._on_refused()
                self._refuse(connection)
                return False
            self.forget(leaver)
            leaver.give_way()
        self._all.add(connection)
        self._begun_s[connection] = self._clock()
        return True

    def waits(self, connection: Connection) -> None:
        """Note that the connection has been answered and has no further request."""
        self._answered.pop(connection, None)
        self._begun_s.pop(connection, None)
        if connection in self._all:
            self._answered[connection] = None

    def begins(self, connection: Connection) -> None:
        """Note that a further head has begun to come."""
        if connection in self._answered:
            del self._answered[connection]
            self._begun_s[connection] = self._clock()

    def serves(self, connection: Connection) -> None:
        """Note that the whole head has come, so the connection has a request now."""
        self._answered.pop(connection, None)
        self._begun_s.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """Free the place of the connection, if it has one."""
        self._all.discard(connection)
        self._answered.pop(connection, None)
        self._begun_s.pop(connection, None)
        self._refused.pop(connection, None)

    def _leaver(self) -> Connection | None:
        """Return the connection that makes room. None: each has a request, or has just come."""
        for connection in self._answered:
            if not connection.has_unsent:
                return connection
        for connection, since_s in self._begun_s.items():
            return connection if self._clock() - since_s >= PATIENCE_S else None
        return None

    def _refuse(self, connection: Connection) -> None:
        if len(self._refused) >= max(LEAST_REFUSED, self.max_connections // REFUSED_SHARE):
            oldest = next(iter(self._refused))
            self.forget(oldest)
            oldest.give_way()
        self._refused[connection] = None
