"""The number of connected clients is bounded, and a new one may push out an old one.

A connection without a request waits: for a request, or for the rest of its head. The one that has waited longest makes room, so
that neither idle clients nor clients that send a head very slowly lock others out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Connection(Protocol):
    """A connection as the table sees it."""

    def give_way(self) -> None:
        """End now, because another connection takes the place."""


class ConnectionTable:
    """The connections of one HTTP server, which owns this. At most `max_connections` are in it, each from `admit` to
    `forget`."""

    def __init__(self, limit: int | Callable[[], int], on_refused: Callable[[], None] = lambda: None) -> None:
        """`limit`: the number, or what returns the present one. `on_refused` hears of each connection that gets no place."""
        self._limit = limit
        self._on_refused = on_refused
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # the one that has waited longest comes first

    @property
    def max_connections(self) -> int:
        """The number of connections that may be in the table now."""
        return self._limit() if callable(self._limit) else self._limit

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Connection) -> bool:
        """Give the connection a place, if need be that of the one that has waited longest. False: all places serve requests."""
        if len(self._all) >= self.max_connections:
            if not self._waiting:
                self._on_refused()
                return False
            oldest = next(iter(self._waiting))
            self.forget(oldest)
            oldest.give_way()
        self._all.add(connection)
        self.waits(connection)
        return True

    def waits(self, connection: Connection) -> None:
        """Note that the connection has no request now."""
        self._waiting.pop(connection, None)
        if connection in self._all:
            self._waiting[connection] = None

    def serves(self, connection: Connection) -> None:
        """Note that the whole head has come, so the connection has a request now."""
        self._waiting.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """Free the place of the connection, if it has one."""
        self._all.discard(connection)
        self._waiting.pop(connection, None)
