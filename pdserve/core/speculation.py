"""Counts of speculative decoding: the drafts that were verified, and how many of them were right. Pure.

A *draft* is a guess of one of the next tokens of a sequence. A step verifies the drafts of a sequence in one slice, and accepts
those before the first wrong one. So a slice gives its accepted drafts and one token more.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import islice, zip_longest
from typing import Any, Final, NamedTuple, Protocol

MAX_DRAFTS: Final = 64
"""The most drafts of one slice that a request may allow, and the most places that a message tells. A draft is right only behind
right ones, so even with nine of ten right, one slice in a thousand gives as many."""


class ToldCounts(Protocol):
    """Counts as they cross the wire. `DraftCounts` explains each of them. Without slices there are no counts."""

    @property
    def num_drafts(self) -> int:
        """The slices with drafts."""

    @property
    def num_draft_tokens(self) -> int:
        """The drafts."""

    @property
    def num_accepted_tokens(self) -> int:
        """The accepted drafts."""

    @property
    def num_accepted_tokens_per_pos(self) -> Iterable[int]:
        """The accepted drafts by their place in their slice."""


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

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Return what was counted after `earlier`. A count that fell has counted nothing."""
        mine, others = self.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos
        by_place = [max(0, one - another) for one, another in zip_longest(mine, others, fillvalue=0)]
        return DraftCounts(
            max(0, self.num_drafts - earlier.num_drafts),
            max(0, self.num_draft_tokens - earlier.num_draft_tokens),
            max(0, self.num_accepted_tokens - earlier.num_accepted_tokens),
            tuple(by_place),
        )

    @classmethod
    def told(cls, counts: ToldCounts) -> DraftCounts:
        """Return counts that crossed the wire. Places after `MAX_DRAFTS` are dropped."""
        by_place = tuple(islice(counts.num_accepted_tokens_per_pos, MAX_DRAFTS))
        return cls(counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens, by_place)

    @property
    def acceptance_rate(self) -> float:
        """The share of drafts that were right. 0: there were no drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """The mean number of tokens of a slice with drafts, at least 1: its accepted drafts and one token more. 0: there was no
        such slice."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    def summary(self) -> dict[str, Any]:
        """Return what clients are told of their request's drafts, by the field names of `Speculation` in inference.proto."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_rate": round(self.acceptance_rate, 6),
            "acceptance_length": round(self.acceptance_length, 6),
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
        }


NO_COUNTS: Final = DraftCounts()


def total(counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """Return the sum of several counts, of which None are none. None: all of them are."""
    told = [one for one in counts if one is not None]
    return reduce(DraftCounts.plus, told) if told else None
