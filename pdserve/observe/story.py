"""The story of one request: what happened to it and why, as one process saw it. Pure and bounded.

A story holds ids, counts, times and messages of errors. It never holds a prompt, an output, token ids or a ticket.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final, Generic, NamedTuple, TypeVar

Value = str | int | float

MAX_ENTRIES: Final = 64
"""A request that nothing disturbs has 9 entries in the router, and 10 if it waits for room. A retry adds 9, and a rebind 4.
Four attempts, the default limit, with a rebind in each make 10 + 3 * 9 + 4 * 4 = 53. A request that is refused room again and
again has more."""
KEPT_FIRST: Final = MAX_ENTRIES // 2
"""The first entries say how the request began, the last ones why it ended. Entries between them are left out."""
MAX_TEXT_CHARS: Final = 240
"""The longest text of a field. A longer one is cut. Most messages of errors are shorter than 150 characters."""
ENTRY_BYTES: Final = 240
FIELD_BYTES: Final = 120
"""An entry with `n` fields takes about `ENTRY_BYTES + n * FIELD_BYTES` bytes, and one byte for each character of its texts. The
numbers were measured by `sys.getsizeof` of its parts."""


def cut(text: str) -> str:
    """Return a text of at most `MAX_TEXT_CHARS` characters, with an ellipsis where it was longer."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


class Entry(NamedTuple):
    """One thing that happened. `at_s` is a time on the clock of the process that wrote the entry."""

    at_s: float
    kind: str
    fields: tuple[tuple[str, Value], ...] = ()

    @property
    def num_bytes(self) -> int:
        """The estimate of the memory that the entry takes."""
        texts = sum(len(value) for _, value in self.fields if isinstance(value, str))
        return ENTRY_BYTES + FIELD_BYTES * len(self.fields) + texts


class Story:
    """The entries of one request in order. It keeps the first `KEPT_FIRST` of them and as many of the last ones."""

    __slots__ = ("_first", "_last", "left_out")

    def __init__(self) -> None:
        self.left_out = 0
        """The number of entries between the first and the last ones that were not kept."""
        self._first: list[Entry] = []
        self._last: deque[Entry] = deque()

    def add(self, at_s: float, kind: str, **fields: Value) -> tuple[Entry, Entry | None]:
        """Add an entry, and cut its texts to `MAX_TEXT_CHARS`. Return it, and the entry that is dropped for it, or None."""
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = cut(value)
        entry = Entry(at_s, kind, tuple(fields.items()))
        if len(self._first) < KEPT_FIRST:
            self._first.append(entry)
            return entry, None
        self._last.append(entry)
        if len(self._last) <= MAX_ENTRIES - KEPT_FIRST:
            return entry, None
        self.left_out += 1
        return entry, self._last.popleft()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries that were kept, in order."""
        return (*self._first, *self._last)

    @property
    def last_kind(self) -> str:
        """The kind of the newest entry. Empty: there is none."""
        entries = self._last or self._first
        return entries[-1].kind if entries else ""

    @property
    def num_bytes(self) -> int:
        """The estimate of the memory that the story takes."""
        return sum(entry.num_bytes for entry in self.entries)


S = TypeVar("S", bound=Story)


class StoryRing(Generic[S]):
    """The latest stories by request id. The oldest one leaves when there are too many stories or too many bytes."""

    def __init__(self, *, max_stories: int, max_bytes: int) -> None:
        self.max_stories = max_stories
        self._max_bytes = max_bytes
        self._stories: OrderedDict[str, S] = OrderedDict()
        self._bytes = 0

    def keep(self, request_id: str, story: S) -> None:
        """Take in the story of a request. It replaces an earlier one of the same id."""
        earlier = self._stories.pop(request_id, None)
        if earlier is not None:
            self._bytes -= earlier.num_bytes
        self._stories[request_id] = story
        self.grew(story.num_bytes)

    def grew(self, num_bytes: int) -> None:
        """Note that a story of the ring has grown by `num_bytes`, and drop the oldest ones beyond the bounds. The newest one
        always stays."""
        self._bytes += num_bytes
        while len(self._stories) > 1 and (len(self._stories) > self.max_stories or self._bytes > self._max_bytes):
            _, oldest = self._stories.popitem(last=False)
            self._bytes -= oldest.num_bytes

    def get(self, request_id: str) -> S | None:
        """Return the story of a request. None: the ring holds none."""
        return self._stories.get(request_id)

    def __iter__(self) -> Iterator[S]:
        return iter(self._stories.values())

    def __len__(self) -> int:
        return len(self._stories)

    def check_invariants(self) -> None:
        """Assert that the bytes are counted right and both bounds hold."""
        assert self._bytes == sum(story.num_bytes for story in self)
        assert len(self) <= 1 or (len(self) <= self.max_stories and self._bytes <= self._max_bytes)
