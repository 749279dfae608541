"""The roles of which no worker is started for a while, because the last ones could not start. Pure: time is passed in."""

from __future__ import annotations

from typing import Final

from pdserve.cluster.backoff import Backoff
from pdserve.cluster.member import HOUR_S
from pdserve.core.worker import Role

FIRST_S: Final = 60.0  # a worker that could not start has tried for about a minute by itself
LONGEST_S: Final = 600.0
MOST: Final = 4  # within an hour; then the role is given up


class Holds:
    """The holds of both roles. Each one is longer than the last; after `MOST` within an hour the role is given up."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._backoffs = {role: Backoff(MOST, HOUR_S, FIRST_S, LONGEST_S) for role in Role}
        self._until_s: dict[Role, float] = {}
        self._given_up: dict[Role, str] = {}

    def add(self, role: Role, why: str, now_s: float) -> None:
        """Hold back the role from now on, or give it up. `why` tells what happened to its last worker."""
        hold_s = self._backoffs[role].next_delay_s(now_s)
        if hold_s is None:
            self._given_up[role] = why
        else:
            self._until_s[role] = now_s + hold_s

    def is_held(self, role: Role, now_s: float) -> bool:
        """Tell whether no worker of the role may be started now."""
        return role in self._given_up or now_s < self._until_s.get(role, now_s)

    def is_given_up(self, role: Role) -> bool:
        """Tell whether no worker of the role will be started before an operator orders sizes."""
        return role in self._given_up

    def notes(self, now_s: float) -> list[str]:
        """Return a sentence for each role that is held back."""
        held = [
            f"No {role.value} worker is started for {until_s - now_s:.0f} s, because the last one could not start."
            for role, until_s in self._until_s.items()
            if until_s > now_s and role not in self._given_up
        ]
        return held + [
            f"No {role.value} worker is started until `pdserve scale` orders sizes: {why}."
            for role, why in self._given_up.items()
        ]
