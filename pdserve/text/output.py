"""The text of one request's output, computed from its token ids only.

The ids pushed so far decide the text, and whether they follow a text. So a second worker that pushes the same ids is in the
same state, and any worker can resume a request. A token costs a few microseconds, however long the output is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.core.sampling import SamplingParams
from pdserve.text.stops import StopScanner
from pdserve.text.tokenizer import Tokenizer


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
