"""How many clients may be connected, and who goes when one more comes.

A connection that serves no request waits: for a request, or for the rest of its head. Whoever has waited longest makes
room, so that neither idle clients nor those that dribble a head lock others out.
"""

from __future__ import annotations

from typing import Protocol


class Connection(Protocol):
    def give_way(self) -> None:
        """End now: another connection takes the place."""


class ConnectionTable:
    """Owner: one HTTP server. Bounded by `max_connections`; a connection is in it from `admit` to `forget`."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # who has waited longest first

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Connection) -> bool:
        """False: all places are taken by connections that serve requests."""
        if len(self._all) >= self.max_connections:
            if not self._waiting:
                return False
            oldest = next(iter(self._waiting))
            self.forget(oldest)
            oldest.give_way()
        self._all.add(connection)
        self.waits(connection)
        return True

    def waits(self, connection: Connection) -> None:
        """From now on this connection has no request."""
        self._waiting.pop(connection, None)
        if connection in self._all:
            self._waiting[connection] = None

    def serves(self, connection: Connection) -> None:
        """The whole head has come, so this connection has a request now."""
        self._waiting.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._waiting.pop(connection, None)
