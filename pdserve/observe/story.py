"""The story of one request: what happened to it and why, as one process saw it. Pure and bounded.

A story holds ids, counts, times and messages of errors. It never holds a prompt, an output, token ids or a ticket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from pdserve.core.ids import LeaseId, WorkerId

Shown = str | int | float
Scores = tuple[tuple[WorkerId, float], ...]
Value = Shown | Enum | LeaseId | Scores
"""The value of a field. No such value changes, so it becomes text only when somebody reads the story."""

MAX_ENTRIES: Final = 64
"""A request that nothing disturbs has 9 entries in the router, and 10 if it waits for room. A retry adds 9, and a rebind 4.
Four attempts, the default limit, with a rebind in each make 10 + 3 * 9 + 4 * 4 = 53. A request that is refused room again and
again has more."""
KEPT_FIRST: Final = MAX_ENTRIES // 2
"""The first entries say how the request began, the last ones why it ended. Entries between them are left out."""
MAX_TEXT_CHARS: Final = 240
"""The longest text of a field. A longer one is cut. Most messages of errors are shorter than 150 characters."""


def cut(text: str) -> str:
    """Return a text of at most `MAX_TEXT_CHARS` characters, with an ellipsis where it was longer."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


class StoryEntry(NamedTuple):
    """One thing that happened, as it is read. `at_s` is a time on the clock of the process that wrote the entry."""

    at_s: float
    kind: str
    fields: tuple[tuple[str, Shown], ...] = ()


class Story:
    """The entries of one request in order. It keeps the first `KEPT_FIRST` of them and as many of the last ones.

    Every entry takes bounded memory, about 0.4 KiB and at most 4 KiB, so a count of entries bounds bytes.
    """

    __slots__ = ("_notes", "left_out")

    def __init__(self) -> None:
        self.left_out = 0
        """The number of entries between the first and the last ones that were not kept."""
        self._notes: list[tuple[float, Enum, dict[str, Value]]] = []

    def note(self, at_s: float, kind: Enum, **fields: Value) -> int:
        """Write down what has just happened. Return by how many entries the story has grown: 0 when another one is left out
        from now on."""
        self._notes.append((at_s, kind, fields))
        if len(self._notes) <= MAX_ENTRIES:
            return 1
        del self._notes[KEPT_FIRST]
        self.left_out += 1
        return 0

    @property
    def entries(self) -> tuple[StoryEntry, ...]:
        """The entries that were kept, in order."""
        return tuple(
            [
                StoryEntry(at_s, kind.value, tuple([(n, _shown(v)) for n, v in given.items()]))
                for at_s, kind, given in self._notes
            ]
        )

    @property
    def last_kind(self) -> Enum | None:
        """The kind of the newest entry. None: there is none."""
        return self._notes[-1][1] if self._notes else None

    def __len__(self) -> int:
        """Return the number of entries that were kept."""
        return len(self._notes)


def _shown(value: Value) -> Shown:
    if isinstance(value, int | float):
        return value
    if isinstance(value, tuple):
        return cut(", ".join(f"{worker_id} {score:.3g}" for worker_id, score in value))
    return cut(str(value.value if isinstance(value, Enum) else value))


S = TypeVar("S", bound=Story)


class StoryRing(Generic[S]):
    """The latest stories by request id. The oldest one leaves when there are too many stories or too many entries."""

    def __init__(self, *, max_stories: int, max_entries: int) -> None:
        self.max_stories = max_stories
        self._max_entries = max_entries
        self._stories: OrderedDict[str, S] = OrderedDict()
        self._entries = 0

    def keep(self, request_id: str, story: S) -> None:
        """Take in the story of a request. It replaces an earlier one of the same id."""
        earlier = self._stories.pop(request_id, None)
        if earlier is not None:
            self._entries -= len(earlier)
        self._stories[request_id] = story
        self.grew(len(story))

    def grew(self, entries: int) -> None:
        """Note that a story of the ring has grown by so many entries, and drop the oldest ones beyond the bounds. The newest
        one always stays."""
        self._entries += entries
        while len(self._stories) > 1 and (len(self._stories) > self.max_stories or self._entries > self._max_entries):
            _, oldest = self._stories.popitem(last=False)
            self._entries -= len(oldest)

    def get(self, request_id: str) -> S | None:
        """Return the story of a request. None: the ring holds none."""
        return self._stories.get(request_id)

    def __iter__(self) -> Iterator[S]:
        return iter(self._stories.values())

    def __len__(self) -> int:
        return len(self._stories)

    def check_invariants(self) -> None:
        """Assert that the entries are counted right and both bounds hold."""
        assert self._entries == sum(len(story) for story in self)
        assert len(self) <= 1 or (len(self) <= self.max_stories and self._entries <= self._max_entries)
