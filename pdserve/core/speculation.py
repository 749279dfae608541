"""Counts of speculative decoding: the drafts that were verified, and how many of them were right. Pure.

A *draft* is a guess of one of the next tokens of a sequence. A step verifies the drafts of a sequence in one slice, and accepts
those before the first wrong one. So a slice gives its accepted drafts and one token more.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Final, NamedTuple


class DraftCounts(NamedTuple):
    """The drafts of one sequence, or of all sequences of an engine, since its start. The names are those of vLLM's metrics."""

    num_drafts: int = 0
    """The slices with drafts. vLLM counts a proposal of several tokens as one draft."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """The accepted drafts by their place in their slice, first place first."""

    def add(self, drafted: int, accepted: int) -> DraftCounts:
        """Return the counts with one more slice of `drafted` drafts, of which the first `accepted` were right."""
        return self.plus(DraftCounts(1, drafted, accepted, (1,) * accepted))

    def plus(self, other: DraftCounts) -> DraftCounts:
        """Return the sum of two counts."""
        mine, others = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        by_place = tuple([one + another for one, another in zip_longest(mine, others, fillvalue=0)])
        return DraftCounts(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            by_place,
        )

    @property
    def acceptance_rate(self) -> float:
        """The share of drafts that were right. 0: there were no drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """The mean number of tokens of a slice with drafts, at least 1: its accepted drafts and one token more. 0: there was no
        such slice."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0


NO_COUNTS: Final = DraftCounts()
