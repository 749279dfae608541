"""The writer of a call whose messages come from several tasks."""

from __future__ import annotations

import asyncio
from typing import Any


class Writer:
    """Writes messages one at a time, and tasks take turns. A task may be cancelled while its message is written: the message is
    still written to its end, because gRPC takes no other one before. `close` it."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def write(self, message: Any) -> None:
        """Write a message, after those that other tasks have begun."""
        async with self._turn:
            if self._writing is not None:  # the task that began this one was cancelled
                await asyncio.shield(self._writing)
            self._writing = asyncio.ensure_future(self._context.write(message))
            await asyncio.shield(self._writing)
            self._writing = None

    def close(self) -> None:
        """Give up a message that is still being written."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())
