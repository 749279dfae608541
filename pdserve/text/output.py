"""The text of one request's output, computed from its token ids only.

The ids pushed so far decide the text, and nothing else does. So a second worker that pushes the same ids is in the same
state, and any worker can resume a request. A token costs a few microseconds, however long the output is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.text.stops import StopScanner
from pdserve.text.tokenizer import Tokenizer


class TextStep(NamedTuple):
    """The text that one token made certain. `stopped`: a stop string was found, and `text` ends before it."""

    text: str
    stopped: bool


class OutputText:
    """The text of one output, piece by piece. It holds back incomplete characters and text that may begin a stop string.

    If nothing stops it, the texts of all steps and of `flush` together equal `tokenizer.decode(all ids)`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        keep_special: bool = False,
    ) -> None:
        """Start an empty output. A stop string counts only if token number `min_tokens` or a later one completes it.

        `include_stop`: the text ends after what stopped it instead of before it. `keep_special`: special tokens are in the
        text, in their written form."""
        self._bytes_of = tokenizer.written_bytes if keep_special else tokenizer.token_bytes
        self._characters = tokenizer.stream()
        self._stops = StopScanner(stop, include=include_stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        self._stopped = False

    def push(self, token_id: int) -> TextStep:
        """Add the next output token and return the text that it makes certain. After a stop, tokens add nothing."""
        if self._stopped:
            return TextStep("", True)
        self._num_tokens += 1
        return TextStep(self._scan(self._characters.push(self._bytes_of(token_id))), self._stopped)

    def push_stop(self, token_id: int) -> str:
        """Add the token at which the request stops, and return the rest of the text. It has the token's own text only if what
        stopped it is included. A stop string can end in this token only then."""
        if self._include_stop:
            return self.push(token_id).text + self.flush()
        self._num_tokens += 1
        return self.flush()

    def flush(self) -> str:
        """Return the text that is still held back, when the request ends without a stop string. Empty after a stop."""
        if self._stopped:
            return ""
        text = self._scan(self._characters.flush())
        return text + self._stops.flush()

    def _scan(self, piece: str) -> str:
        text, self._stopped = self._stops.push(piece, honour=self._num_tokens >= self._min_tokens)
        return text
