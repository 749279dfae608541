"""The text of one request's output, computed from its token ids only.

The ids pushed so far decide the text, and whether they follow a text. So a second worker that pushes the same ids is in the
same state, and any worker can resume a request. A token costs a few microseconds, however long the output is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.core.sampling import SamplingParams
from pdserve.text.tokenizer import Tokenizer

# Stop strings ---------------------------------------------------------------------------------------------------------
#
# The search for stop strings in a text that arrives in pieces.
#
# The result depends only on the text, and not on how it was cut into pieces: the match that *ends* first wins, and of two
# matches that end together the longer one wins.
#
# A client chooses the strings, and `pdserve.core.sampling` bounds their number and length. Each character costs at most one
# comparison with each string, by `str.endswith`, and one search among the sorted strings. The worst case is 16 strings of 1,024
# characters that differ from the text only near their end. A token of one character then costs 2 to 4 microseconds. A near miss
# of 1,000 characters costs 0.2 to 0.9 milliseconds when it breaks, which is at most once in 1,000 characters.


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


class TextStep(NamedTuple):
    """The text that one token made certain. `stopped`: a stop string was found, and `text` ends before it or behind it."""

    text: str
    stopped: bool


class OutputText:
    """The text of one output, piece by piece. It holds back incomplete characters and text that may begin a stop string.

    If no stop string is found, the texts of all steps and of `flush` together equal
    `tokenizer.decode(all ids, after=prompt_ids)`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Start an empty output that follows a prompt. A stop string counts only if token number `min_tokens` or a later one
        completes it.

        With `include_stop` the text ends behind the stop string. Without `skip_special_tokens` it has special tokens as they
        are written.
        """
        self._bytes = tokenizer.token_bytes if skip_special_tokens else tokenizer.written_bytes
        self._characters = tokenizer.stream(prompt_ids, skip_special_tokens=skip_special_tokens)
        self._include_stop = include_stop
        self._stops = StopScanner(stop, include=include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> OutputText:
        """Start the empty output of a request."""
        return cls(
            tokenizer,
            prompt_ids,
            stop=params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    @property
    def stopped(self) -> bool:
        """True when a stop string was found."""
        return self._stopped

    @property
    def stop_string(self) -> str:
        """The stop string that was found. Empty: none was."""
        return self._stops.found

    def push(self, token_id: int) -> TextStep:
        """Add the next output token and return the text that it makes certain. After a stop, tokens add nothing."""
        if self._stopped:
            return TextStep("", True)
        self._num_tokens += 1
        return TextStep(self._scan(self._characters.push(self._bytes(token_id))), self._stopped)

    def push_stop(self, token_id: int) -> str:
        """Add the token at which the request stops, and return the rest of the text. It has the token's own text only if what
        stopped it is included, as in vLLM. A stop string can end in this token only then."""
        if self._include_stop:
            return self.push(token_id).text + self.flush()
        self._num_tokens += 1
        return self.flush()

    def flush(self) -> str:
        """Return the text that is still held back, when the request ends without a stop string. Empty after a stop. The
        replacement of half a character may complete a stop string: `stopped` then tells so."""
        if self._stopped:
            return ""
        text = self._scan(self._characters.flush())
        return text + self._stops.flush()

    def _scan(self, piece: str) -> str:
        text, self._stopped = self._stops.push(piece, honour=self._num_tokens >= self._min_tokens)
        return text
