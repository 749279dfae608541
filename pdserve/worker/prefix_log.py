"""The log of a worker's prefix keys: what its pool published and lost, and how much of it each link has sent. Pure.

Changes, digest and number of a delta come from one snapshot of the engine. The log is bounded: a link that has fallen off, that
is new, or whose router asks for it, gets all keys, at most once in `FULL_S`. All keys of a large pool come in several deltas,
and only when the router asks: a delta without keys, whose digest is that of all keys, lets it ask in its own time.
"""

from __future__ import annotations

from collections import deque
from functools import reduce
from itertools import islice
from operator import xor
from typing import Final

from pdserve.core.block_hash import MAX_DELTA_KEYS, MAX_TOLD, TOLD_AT_ONCE, KeyChanges, PrefixDelta

MAX_LOGGED: Final = MAX_DELTA_KEYS
"""The log has at most so many changes of keys, 8 MB. It takes a link that hears nothing for minutes to fall off."""
FULL_S: Final = 2.0
"""A link gets all keys at most once in this time: 100,000 keys take the router 15 ms."""


class PrefixLog:
    """The keys that a worker's pool holds, with the last changes. The loop owns it."""

    def __init__(self, max_logged: int = MAX_LOGGED) -> None:
        self._max_logged = max_logged
        self._held: dict[int, None] = {}
        self._digest = 0
        self._log: deque[KeyChanges] = deque()
        self._first = 0
        """The number of changes that were dropped from the log's beginning."""
        self._logged = 0
        """The number of keys in the log."""

    def note(self, changes: KeyChanges) -> None:
        """Take the changes of a snapshot."""
        for key in changes.removed:
            del self._held[key]
        self._held.update(dict.fromkeys(changes.added))
        self._digest = changes.digest
        self._log.append(changes)
        self._logged += _size(changes)
        while self._logged > self._max_logged:
            self._logged -= _size(self._log.popleft())
            self._first += 1

    @property
    def end(self) -> int:
        """The number of changes since the start."""
        return self._first + len(self._log)

    def __len__(self) -> int:
        """The number of keys that the pool holds."""
        return len(self._held)

    @property
    def digest(self) -> int:
        """The digest that the engine gave for all keys."""
        return self._digest

    def all_keys(self) -> tuple[tuple[int, ...], int]:
        """Return all keys, and the digest that the engine gave for them."""
        return tuple(self._held), self._digest

    def since(self, position: int) -> KeyChanges | None:
        """Return all changes after the first `position` changes, as a single change. A key that came and went, or went and came
        back, is not among them. None: the log no longer has them all."""
        if position < self._first:
            return None
        changed: dict[int, bool] = {}
        for changes in islice(self._log, position - self._first, None):
            for keys, held in ((changes.added, True), (changes.removed, False)):
                for key in keys:
                    if changed.pop(key, held) is held:
                        changed[key] = held
        added = tuple([key for key, held in changed.items() if held])
        return KeyChanges(added, tuple([key for key, held in changed.items() if not held]), self._digest)


class PrefixCursor:
    """The place of one link in the log. A link that is new gets all keys first."""

    def __init__(self, log: PrefixLog) -> None:
        self._log = log
        self._position: int | None = None
        """The number of changes that the link has sent. None: the router must get all keys."""
        self._asked = False
        """The router has asked for all keys, and they have not begun to go out since."""
        self._offered = False
        """The router knows that it is to ask."""
        self._number = 0
        self._full_s: float | None = None
        """The time at which the link began to get all keys. None: it never did."""
        self._rest: tuple[int, ...] = ()
        """The keys at position `_position` that the link has not been told."""
        self._digest = 0
        """The exclusive or of the keys that the link has been told, while there is a rest."""
        self._whole_digest = 0

    def ask_full(self) -> None:
        """Let the next delta have all keys, because the router asks for them."""
        self._position = None
        self._asked = True

    def next(self, *, now_s: float) -> PrefixDelta | None:
        """Return the delta that the link gets now. None: it gets none, because nothing has changed, or all keys must wait."""
        if self._position is not None and self._rest:
            return self._part()
        changes = None
        if self._position is not None:
            if self._position == self._log.end:
                return None
            changes = self._log.since(self._position)
        if changes is None:
            return self._full(now_s)
        self._position = self._log.end
        if not changes.added and not changes.removed:
            return None
        self._number += 1
        return PrefixDelta(self._number, changes.added, changes.removed, changes.digest)

    def _full(self, now_s: float) -> PrefixDelta | None:
        self._position = None
        if not self._asked and len(self._log) > TOLD_AT_ONCE:
            return self._offer()
        if self._full_s is not None and now_s - self._full_s < FULL_S:
            return None
        self._full_s = now_s
        self._asked = self._offered = False
        self._position = self._log.end
        self._rest, self._whole_digest = self._log.all_keys()
        self._digest = 0
        return self._part(full=True)

    def _offer(self) -> PrefixDelta | None:
        """Return a delta that lets the router ask for all keys, because it does not agree with itself. The first one also says
        that this worker shares blocks. None: the router knows."""
        if self._offered:
            return None
        self._offered = True
        self._number += 1
        return PrefixDelta(self._number, (), (), self._log.digest, full=self._number == 1)

    def _part(self, *, full: bool = False) -> PrefixDelta:
        """Return the next of the deltas that together have all keys. The last one has fewer than `MAX_TOLD`, by which the
        router knows it."""
        count = MAX_TOLD - (len(self._rest) == MAX_TOLD)
        told, self._rest = self._rest[:count], self._rest[count:]
        # The last digest is the engine's, so a log that differs from the pool does not agree with itself.
        self._digest = reduce(xor, told, self._digest) if self._rest else self._whole_digest
        self._number += 1
        return PrefixDelta(self._number, told, (), self._digest, full)


def _size(changes: KeyChanges) -> int:
    return len(changes.added) + len(changes.removed)
