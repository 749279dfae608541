"""From another thread to an asyncio loop: what is put is taken on the loop's thread, in order.

`call_soon_threadsafe` costs its caller 50 us when the caches are cold: Python, a handle, a socket. This is one append,
and eight bytes to an eventfd where the loop has not been woken yet.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """One thread puts; whoever made it closes it once that thread has ended."""

    def __init__(self, take: Callable[[T], None]) -> None:
        self._take = take
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._open = True
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, item: T) -> None:
        """Never blocks. After `detach` it does nothing."""
        if self._open:
            self._items.append(item)
            if not self._woken:  # else the loop is still to look, and finds this one too
                self._woken = True
                os.eventfd_write(self._fd, 1)

    def attach(self) -> None:
        """On the loop's thread: items are taken from now on, those of before first."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._look)

    def detach(self) -> None:
        """On the loop's thread: nothing is taken any more."""
        self._open = False
        if self._loop is not None:
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Idempotent."""
        self._open = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _look(self) -> None:
        assert self._loop is not None
        os.eventfd_read(self._fd)
        self._woken = False  # before the items: one that is put now wakes the loop again
        while self._items:
            self._loop.call_soon(self._take, self._items.popleft())  # one that fails does not take the others along
