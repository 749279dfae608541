"""The interface between the choice of drafts and a drafter. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pdserve.core.ids import BlockId, SeqId


class DraftView(NamedTuple):
    """A decoding sequence, as a drafter sees it. The sequence owns the list of its tokens, which a drafter only reads."""

    seq_id: SeqId
    tokens: list[int]
    """The prompt, then the output so far. KV exists for all of them but the last."""
    prompt_len: int
    group: bytes
    """Sequences of one group may learn from each other's tokens: they have one cache salt, and one adapter."""
    most: int
    """The most drafts that the sequence may have now; at least 1."""
    block_tables: tuple[tuple[BlockId, ...], ...] = ()
    """Its blocks in each KV group, with room for `most` more tokens. Empty: the drafter has not asked for them."""


class Draft(NamedTuple):
    """A guess of the next tokens of one sequence."""

    token_ids: tuple[int, ...]
    kind: str
    """Drafts of one kind have similar odds, which are learned for each kind, such as "lookup 4": the last four tokens occurred
    before."""


NO_DRAFT = Draft((), "")


class Drafter(Protocol):
    """A way to guess tokens. The engine thread owns it. A wrong guess costs time and changes no output."""

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return a draft for each of these sequences, with at most `most` tokens; `NO_DRAFT` where it has no guess."""

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Forget a sequence, which has ended with these tokens. It may be unknown to the drafter."""
