"""The interface between the choice of drafts and a drafter. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.structured.grammar_state import GrammarState

if TYPE_CHECKING:  # a sequence makes its own view
    from pdserve.engine.schedule.sequence import Ahead


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
    grammar: GrammarState | None = None
    """The place in the grammar of its output. None: it follows none."""
    draws: Callable[[], Ahead] | None = None
    """Returns the draws that come next, for a drafter that draws as the sequence does."""
    block_tables: tuple[tuple[BlockId, ...], ...] = ()
    """Its blocks in each KV group, with room for `most` more tokens. Only a drafter that computes KV gets them."""


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


class ModelDrafter(Drafter, Protocol):
    """A drafter that computes each draft with a model, one place after the other for all its sequences together."""

    kind: str
    """The kind of its drafts."""
    most: int
    """The most drafts of a sequence."""
    needs_blocks: bool
    """True when it writes KV of its drafts into the blocks of the sequences."""

    spent_s: float
    """The time that its last proposal took, in seconds."""

    def place_s(self, sequences: int, read: int) -> float:
        """Return the expected time to draft one more place of so many sequences, which have `read` tokens, in seconds."""
