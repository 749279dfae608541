"""Which of the router's commands the engine's counts include. Pure.

A command is on its way through a link, a queue and an engine thread that takes it between two steps. Until the engine has
counted it, only the router knows of it; so each heartbeat names the last command that its counts include.
"""

from __future__ import annotations

from collections import deque

from pdserve.core.ids import Handle, SeqId


class CountedCommands:
    """Handles of one link and sequences of one engine: both count up, in the order of the commands."""

    def __init__(self) -> None:
        self._given: deque[tuple[SeqId, Handle]] = deque()
        self._last = Handle(0)

    def give(self, seq_id: SeqId, handle: Handle) -> None:
        """This command goes to the engine as that sequence."""
        self._given.append((seq_id, handle))

    def last_handle(self, last_seq_id: SeqId) -> Handle:
        """The last command that is included in counts which were taken when `last_seq_id` was the newest sequence."""
        while self._given and self._given[0][0] <= last_seq_id:
            _, self._last = self._given.popleft()
        return self._last

    def forget(self) -> None:
        """The link has ended: another one counts its handles anew."""
        self._given.clear()
        self._last = Handle(0)
