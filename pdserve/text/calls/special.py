"""The removal of special tokens from a text in pieces. A worker writes them for a parser whose marks are special tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable


class SpecialTokenFilter:
    """Removes the spellings of special tokens from one text. Of two that begin at the same place the shorter one counts."""

    def __init__(self, spellings: Iterable[str]) -> None:
        """`spellings` are those of the tokens that are removed. None of them is empty."""
        self._sorted = sorted(set(spellings))
        self._longest = max(map(len, self._sorted), default=0)
        by_length = sorted(self._sorted, key=len)
        self._pattern = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece. Return the text that is certain."""
        if self._pattern is None:
            return text
        rest = self._held + text
        kept: list[str] = []
        while True:
            found, begun = self._pattern.search(rest), self._begun(rest)
            if found is None or begun < found.start():
                self._held = rest[begun:]
                return "".join([*kept, rest[:begun]])
            kept.append(rest[: found.start()])
            rest = rest[found.end() :]

    def flush(self) -> str:
        """Return what is held back. The text has ended."""
        rest, self._held = self._held, ""
        return rest if self._pattern is None else self._pattern.sub("", rest)

    def _begun(self, text: str) -> int:
        """Return where the longest end of `text` begins that is the beginning of a spelling, but not all of it."""
        for place in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[place:]
            index = bisect_right(self._sorted, end)
            if index < len(self._sorted) and self._sorted[index].startswith(end):
                return place
        return len(text)
