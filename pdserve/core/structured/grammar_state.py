"""The knowledge that a sequence and the sampler need of a grammar. Pure.

They know the library that compiles by this protocol alone, so neither the scheduler nor the sampler depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarState(Protocol):
    """The place in a grammar that the output of one sequence has reached. It depends on the output tokens alone, so it is the
    same after a preemption, a handoff and a replay. One thread uses it at a time."""

    @property
    def ended(self) -> bool:
        """True when no token may follow the known output, except the end of the sequence."""

    @property
    def failure(self) -> str | None:
        """The reason, in words, why the grammar cannot go on. None: it can. A failure is final."""

    def catch_up(self, tokens: Sequence[int], prompt_len: int) -> None:
        """Take the output tokens that are new. `tokens` is the prompt, then the output; earlier tokens must not have
        changed."""

    def mask(self) -> bytes | None:
        """Return which tokens may come next. Bit i % 8 of byte i // 8 is set if token id i may. None: the grammar has failed.

        It is computed once for each place, in up to some milliseconds without the interpreter lock.
        """

    def after(self, token_id: int) -> GrammarState | None:
        """Return the place after this token, as a state of its own whose failure changes nothing here. None: the token may not
        come next, or the grammar has failed."""

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that write the text which must come next, as the model's tokenizer writes it. Empty: there is a
        choice. Other tokens may write the same text, so these are guesses."""
