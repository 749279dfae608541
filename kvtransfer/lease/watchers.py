"""Who watches which lease, and what each stream has still to be told.

A lease's state is level state: a stream that is slow to read gets the newest view of each lease, never a backlog.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pdserve.core.ids import LeaseId
from pdserve.core.lease import LeaseView

MAX_WATCHED: Final = 8192
"""Subscriptions and untold views of one stream together: many times what a decode worker can bind."""


class TooManyWatched(Exception):
    """A stream asked for more than `MAX_WATCHED` allows."""


class Watcher:
    """One Watch stream."""

    def __init__(self) -> None:
        self.subscriptions: set[LeaseId] = set()
        self._pending: dict[LeaseId, LeaseView] = {}
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def load(self) -> int:
        """What this stream makes the server remember."""
        return len(self.subscriptions) + len(self._pending)

    def push(self, view: LeaseView) -> None:
        self._pending[view.lease_id] = view
        self._wake.set()

    def close(self) -> None:
        """No more subscriptions will come: `take` answers None once the pending views are taken."""
        self._closed = True
        self._wake.set()

    async def take(self) -> list[LeaseView] | None:
        """The newest view of each lease that changed since the last call; waits for one. None: closed."""
        await self._wake.wait()
        if not self._closed:
            self._wake.clear()
        views, self._pending = list(self._pending.values()), {}
        return None if self._closed and not views else views


class Watchers:
    """Owner of all subscriptions. One loop."""

    def __init__(self) -> None:
        self._by_lease: dict[LeaseId, list[Watcher]] = {}

    @property
    def num_subscriptions(self) -> int:
        return sum(len(watchers) for watchers in self._by_lease.values())

    def subscribe(self, watcher: Watcher, view: LeaseView) -> None:
        """Push `view` now and what is published later. Raises `TooManyWatched`."""
        if watcher.load >= MAX_WATCHED:
            raise TooManyWatched(f"a stream may hold {MAX_WATCHED} subscriptions and untold views")
        if view.held and view.lease_id not in watcher.subscriptions:
            watcher.subscriptions.add(view.lease_id)
            self._by_lease.setdefault(view.lease_id, []).append(watcher)
        watcher.push(view)

    def publish(self, view: LeaseView) -> None:
        watchers = self._by_lease.get(view.lease_id, []) if view.held else self._by_lease.pop(view.lease_id, [])
        for watcher in watchers:
            watcher.push(view)
            if not view.held:
                watcher.subscriptions.discard(view.lease_id)

    def drop(self, watcher: Watcher) -> None:
        """The stream has ended."""
        for lease_id in watcher.subscriptions:
            remaining = [other for other in self._by_lease.pop(lease_id, []) if other is not watcher]
            if remaining:
                self._by_lease[lease_id] = remaining
        watcher.subscriptions.clear()
