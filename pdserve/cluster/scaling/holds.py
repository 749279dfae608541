"""The roles of which no worker is started for a while, because one died too often. Pure: time is passed in."""

from __future__ import annotations

import sys
from typing import Final

from pdserve.cluster.backoff import Backoff
from pdserve.core.worker import Role

DAY_S: Final = 86_400.0
FIRST_S: Final = 60.0  # a worker that died too often has tried for about two minutes by itself
LONGEST_S: Final = 3600.0  # what kept workers from starting may be mended by others, and nobody may be there to say so


class Holds:
    """The holds of both roles. Each hold is twice as long as the last hold of the day, and none is longer than an hour."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._backoffs = {role: Backoff(sys.maxsize, DAY_S, FIRST_S, LONGEST_S) for role in Role}
        self._until_s: dict[Role, float] = {}

    def add(self, role: Role, now_s: float) -> None:
        """Hold back the role from now on. Workers that die while it is held have the same reason, and make it no longer."""
        if not self.is_held(role, now_s):
            self._until_s[role] = now_s + (self._backoffs[role].next_delay_s(now_s) or LONGEST_S)

    def is_held(self, role: Role, now_s: float) -> bool:
        """Tell whether no worker of the role may be started now."""
        return now_s < self._until_s.get(role, now_s)

    def notes(self, now_s: float) -> list[str]:
        """Return a sentence for each role that is held back."""
        return [
            f"No {role.value} worker is started for {until_s - now_s:.0f} s, because one died too often; `pdserve scale` "
            "starts it at once."
            for role, until_s in self._until_s.items()
            if until_s > now_s
        ]
