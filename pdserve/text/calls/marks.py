"""Marks that are special tokens, put back into a text that was made without special tokens.

A worker's text has no special tokens, but the ids that come with it do. So the place of each mark is known exactly. A text that
a model spells like a mark with other tokens is read as one too: some models have no special tokens for their marks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pdserve.text.tokenizer import Utf8Stream


class MarkInserter:
    """Puts marks into the text of one output. The text may come later than its tokens, and may be cut at its end."""

    def __init__(self, marks: Mapping[int, str], token_bytes: Callable[[int], bytes], stream: Utf8Stream) -> None:
        """`marks` has the spelling of each token that is a mark. `token_bytes` and `stream` are those of the tokenizer."""
        self._marks = marks
        self._token_bytes = token_bytes
        self._stream = stream
        self._decoded = 0
        """The number of characters of all tokens so far."""
        self._told = 0
        """The number of characters of the text so far."""
        self._due: deque[tuple[int, str]] = deque()
        """The place of each mark that is still to be told, in characters of the text."""

    def push(self, ids: Sequence[int], text: str) -> str:
        """Return the text with the marks that belong before its end. `ids` are the tokens that came with it."""
        for token_id in ids:
            if token_id in self._marks:
                self._due.append((self._decoded, self._marks[token_id]))
            else:
                self._decoded += len(self._stream.push(self._token_bytes(token_id)))
        begin, end, done = self._told, self._told + len(text), 0
        self._told = end
        if not self._due or self._due[0][0] > end:
            return text
        parts = []
        while self._due and self._due[0][0] <= end:
            place, mark = self._due.popleft()
            parts += [text[done : place - begin], mark]
            done = place - begin
        return "".join([*parts, text[done:]])
