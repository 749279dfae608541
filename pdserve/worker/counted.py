"""The record of which router commands the engine's counts include. Pure.

A command passes a link and a queue, and the engine thread takes it between two steps. Until the engine has counted it, only
the router knows of it. So each heartbeat names the last command that its counts include.
"""

from __future__ import annotations

from collections import deque

from pdserve.core.ids import Handle, SeqId


class CountedCommands:
    """The handles of one link and the sequences of one engine. The numbers of the sequences grow."""

    def __init__(self) -> None:
        self._given: deque[tuple[SeqId, Handle]] = deque()
        self._last = Handle(0)

    def give(self, seq_id: SeqId, handle: Handle) -> None:
        """Note that the command `handle` goes to the engine as sequence `seq_id`."""
        self._given.append((seq_id, handle))

    def last_handle(self, last_seq_id: SeqId) -> Handle:
        """Return the last command that is in the counts taken when `last_seq_id` was the newest sequence. 0: no command."""
        while self._given and self._given[0][0] <= last_seq_id:
            _, handle = self._given.popleft()
            self._last = max(self._last, handle)  # a request that waited for its grammar comes after later ones
        return self._last

    def forget(self) -> None:
        """Forget all commands, because the link has ended; the handles of the next link count from the start."""
        self._given.clear()
        self._last = Handle(0)
