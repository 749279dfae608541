"""The subscriptions of all Watch streams, and the views that each stream has still to get.

A stream that is slow to read gets the newest view of each lease, never a backlog.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pdserve.core.ids import LeaseId
from pdserve.core.lease import LeaseView

MAX_WATCHED: Final = 8192
"""The most subscriptions and pending views of one stream together: many times what a decode worker can bind."""


class TooManyWatched(Exception):
    """A stream asked for more subscriptions than `MAX_WATCHED` allows."""


class Watcher:
    """One Watch stream: its subscriptions, and the views that wait to be sent."""

    def __init__(self) -> None:
        self.subscriptions: set[LeaseId] = set()
        self._pending: dict[LeaseId, LeaseView] = {}
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def load(self) -> int:
        """The number of subscriptions and pending views, which the server keeps for this stream."""
        return len(self.subscriptions) + len(self._pending)

    def push(self, view: LeaseView) -> None:
        """Queue a view; it replaces an older one of the same lease."""
        self._pending[view.lease_id] = view
        self._wake.set()

    def close(self) -> None:
        """End the stream: `take` returns None once the pending views are taken."""
        self._closed = True
        self._wake.set()

    async def take(self) -> list[LeaseView] | None:
        """Wait for a change, and return the newest view of each changed lease. None: the stream is closed."""
        await self._wake.wait()
        if not self._closed:
            self._wake.clear()
        views, self._pending = list(self._pending.values()), {}
        return None if self._closed and not views else views


class Watchers:
    """The owner of all subscriptions. It is used on one loop."""

    def __init__(self) -> None:
        self._by_lease: dict[LeaseId, list[Watcher]] = {}

    @property
    def num_subscriptions(self) -> int:
        """The number of subscriptions of all streams."""
        return sum(len(watchers) for watchers in self._by_lease.values())

    def subscribe(self, watcher: Watcher, view: LeaseView) -> None:
        """Push `view` now, and each view of this lease that is published later. Raises `TooManyWatched`."""
        if watcher.load >= MAX_WATCHED:
            raise TooManyWatched(f"a stream may hold {MAX_WATCHED} subscriptions and pending views")
        if view.held and view.lease_id not in watcher.subscriptions:
            watcher.subscriptions.add(view.lease_id)
            self._by_lease.setdefault(view.lease_id, []).append(watcher)
        watcher.push(view)

    def publish(self, view: LeaseView) -> None:
        """Push a view to all watchers of its lease. GONE also ends their subscriptions to it."""
        watchers = self._by_lease.get(view.lease_id, []) if view.held else self._by_lease.pop(view.lease_id, [])
        for watcher in watchers:
            watcher.push(view)
            if not view.held:
                watcher.subscriptions.discard(view.lease_id)

    def drop(self, watcher: Watcher) -> None:
        """Remove the subscriptions of a stream that has ended."""
        for lease_id in watcher.subscriptions:
            remaining = [other for other in self._by_lease.pop(lease_id, []) if other is not watcher]
            if remaining:
                self._by_lease[lease_id] = remaining
        watcher.subscriptions.clear()
