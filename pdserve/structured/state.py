"""The place in a grammar that one sequence has reached. It is made from the output tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import llguidance

MOST_CHARS: Final = 400
"""The most characters of a line of the library's errors. Some quote a whole grammar, which may have 64 KiB."""


class ConstraintState:
    """The state of one sequence. It fulfils the protocol `GrammarState`. One thread uses it at a time."""

    __slots__ = ("_accepted", "_failed", "_failure", "_mask", "_matcher")

    def __init__(self, matcher: llguidance.LLMatcher, failed: Callable[[], None] = lambda: None) -> None:
        """Start at the beginning of the grammar. `matcher` belongs to this state. `failed` is called when the grammar fails."""
        self._matcher = matcher
        self._accepted = 0
        self._failure: str | None = None
        self._failed = failed
        self._mask: bytes | None = None

    @property
    def accepted(self) -> int:
        """The number of output tokens so far."""
        return self._accepted

    @property
    def failure(self) -> str | None:
        """The reason, in words, why the grammar cannot go on. None: it can."""
        return self._failure

    @property
    def ended(self) -> bool:
        """True when no token may follow, except the end of the sequence. A grammar that has failed has not ended."""
        return self._failure is None and bool(self._matcher.is_stopped())

    @property
    def is_accepting(self) -> bool:
        """True when the output so far is a whole text of the grammar."""
        return self._failure is None and bool(self._matcher.is_accepting())

    def accept(self, token_id: int) -> bool:
        """Take the next output token. Return False, and fail, if the grammar does not allow it here.

        After the end of the grammar, only the end of the sequence is allowed.
        """
        if self._failure is None:
            self._mask = None
            self._accepted += 1
            if not self._matcher.consume_token(token_id):
                self._fail(f"output token {self._accepted - 1} (id {token_id}) is not allowed")
        return self._failure is None

    def catch_up(self, tokens: Sequence[int], prompt_len: int) -> None:
        """Take the output tokens that are new. `tokens` is the prompt, then the output."""
        for position in range(prompt_len + self._accepted, len(tokens)):
            if not self.accept(tokens[position]):
                return

    def mask(self) -> bytes | None:
        """Return the mask of the next token: bit i % 8 of byte i // 8 for token id i. None: the grammar has failed."""
        if self._mask is None and self._failure is None:
            mask = bytes(self._matcher.compute_bitmask())
            if self._matcher.is_error():  # the library then returns a mask that would end the output
                self._fail(f"the mask of output token {self._accepted} needs too much work")
            else:
                self._mask = mask
        return self._mask

    def after(self, token_id: int) -> ConstraintState | None:
        """Return the place after this token, as a state of its own. None: the token may not come next."""
        if self._failure is not None:
            return None
        further = ConstraintState(self._matcher.deep_copy())
        further._accepted = self._accepted
        return further if further.accept(token_id) else None

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that write the text which must come next."""
        # A copy, since a search that takes too much work makes the library's object useless.
        return () if self._failure is not None else tuple(self._matcher.deep_copy().compute_ff_tokens())

    def _fail(self, what: str) -> None:
        self._mask = None
        self._failure = f"{what}: {one_line(self._matcher.get_error())}"
        self._failed()


def one_line(message: str) -> str:
    """Return the reason that an error of the library gives. Its other lines quote the library's state, or point into a text.

    The middle of a long line is left out, since the quoted grammar stands there.
    """
    first, *others = message.strip().split("\n")
    reason = " ".join(map(_shortened, [first, *(line for line in others if line.startswith("error: "))]))
    return reason[: 2 * MOST_CHARS] or "no reason is known"


def _shortened(line: str) -> str:
    half = MOST_CHARS // 2
    return line if len(line) <= MOST_CHARS else f"{line[:half]} ... {line[-half:]}"
