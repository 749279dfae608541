"""One request's output as text: a pure fold over its token ids.

Nothing but the ids pushed so far decides what is given out, so a second worker that pushes the same ids is in the same
state, and a request can be resumed anywhere. A token costs a few microseconds, however long the output is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.text.stops import StopScanner
from pdserve.text.tokenizer import Tokenizer


class TextStep(NamedTuple):
    """`text` became certain with this token. `stopped`: a stop string was found; `text` ends before it."""

    text: str
    stopped: bool


class OutputText:
    """Gives out whole characters only, and nothing that may still turn out to begin a stop string.

    Without a stop, the texts of all steps and of `flush` make up `tokenizer.decode(all ids)`.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """A stop string counts only if it is completed by token number `min_tokens` or a later one."""
        self._tokenizer = tokenizer
        self._characters = tokenizer.stream()
        self._stops = StopScanner(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    def push(self, token_id: int) -> TextStep:
        """The next output token. After a stop every token adds nothing."""
        if self._stopped:
            return TextStep("", True)
        self._num_tokens += 1
        return TextStep(self._scan(self._characters.push(self._tokenizer.token_bytes(token_id))), self._stopped)

    def flush(self) -> str:
        """The request ends here for another reason: what is still held. Empty after a stop."""
        if self._stopped:
            return ""
        text = self._scan(self._characters.flush())
        return text + self._stops.flush()

    def _scan(self, piece: str) -> str:
        text, self._stopped = self._stops.push(piece, honour=self._num_tokens >= self._min_tokens)
        return text
