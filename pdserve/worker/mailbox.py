"""A mailbox from another thread to an asyncio loop: items are taken on the loop's thread in the order in which they were put.

`call_soon_threadsafe` costs its caller 50 us when the caches are cold: it makes a handle and writes to a socket. A mailbox
appends to a list, and writes eight bytes to an eventfd only if the loop has not been woken yet.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A mailbox into which one thread puts items. The owner closes it once that thread has ended."""

    def __init__(self, take: Callable[[T], None]) -> None:
        self._take = take
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._open = True
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, item: T) -> None:
        """Put an item. It never blocks, and does nothing after `detach`."""
        if self._open:
            self._items.append(item)
            if not self._woken:  # a loop that was woken has still to look, and finds this item too
                self._woken = True
                os.eventfd_write(self._fd, 1)

    def attach(self) -> None:
        """Take items from now on, first those that were put before. Call it on the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._look)

    def detach(self) -> None:
        """Take no items any more. Call it on the loop's thread."""
        self._open = False
        if self._loop is not None:
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Close the eventfd. Idempotent."""
        self._open = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _look(self) -> None:
        assert self._loop is not None
        os.eventfd_read(self._fd)
        self._woken = False  # before the items are taken, so that an item that is put now wakes the loop again
        while self._items:
            self._loop.call_soon(self._take, self._items.popleft())  # an item that fails does not stop the other ones
