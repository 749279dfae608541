"""The search for stop strings in a text that arrives in pieces.

The result depends only on the text, and not on how it was cut into pieces: the match that *ends* first wins, and of two
matches that end together the longer one wins.

A client chooses the strings, and `pdserve.core.sampling` bounds their number and length. Each character costs at most one
comparison with each string, by `str.endswith`, and one search among the sorted strings. The worst case is 16 strings of
1,024 characters that differ from the text only near their end. A token of one character then costs 2 to 4 microseconds. A
near miss of 1,000 characters costs 0.2 to 0.9 milliseconds when it breaks, which is at most once in 1,000 characters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class StopScanner:
    """The scanner of one text. It gives out only text that cannot become part of a stop string any more."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Start an empty text. With `include` the match belongs to the text that is given out."""
        assert all(stops)
        self._include = include
        self._stops = tuple(sorted(stops))
        self._longest = max(map(len, stops), default=0)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""  # the longest suffix of the text so far that begins a stop string and is shorter than the string
        self.found = ""
        """The stop string that was completed. Empty: none was."""

    def push(self, piece: str, *, honour: bool = True) -> tuple[str, bool]:
        """Add a piece. Return (text that is certain, True if a stop string was completed). The text ends before the match,
        or behind it.

        With `honour` False, stop strings that this piece completes are ordinary text. A string that only begins in this
        piece still counts when a later piece completes it.
        """
        if not self._held and self._firsts.isdisjoint(piece):
            return piece, False  # no string has begun, and none begins here
        text = self._held + piece
        if honour:
            for end in range(len(self._held) + 1, len(text) + 1):
                if text.endswith(self._stops, 0, end):
                    self._held = ""
                    self.found = max((stop for stop in self._stops if text.endswith(stop, 0, end)), key=len)
                    return text[: end if self._include else end - len(self.found)], True
        certain = self._certain(text)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """Return the text that is held back. The text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _certain(self, text: str) -> int:
        """Return the number of characters before the longest suffix of `text` that begins a stop string.

        In sorted order, the stop strings that begin with a suffix directly follow that suffix. A suffix that begins none
        loses its first character for good, so over the whole text each character is dropped at most once.
        """
        end = text[max(0, len(text) - self._longest + 1) :]
        while end:
            if end[0] in self._firsts:
                index = bisect_right(self._stops, end)
                if index < len(self._stops) and self._stops[index].startswith(end):
                    break
            end = end[1:]
        return len(text) - len(end)
