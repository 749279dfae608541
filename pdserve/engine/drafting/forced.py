"""The drafts that a grammar gives for nothing: the text that must come next. Pure.

The model may write this text with other tokens than its tokenizer does, so these tokens are drafts, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.core.ids import SeqId
from pdserve.engine.drafting.api import NO_DRAFT, Draft, DraftView


class ForcedDrafter:
    """Drafts the text that the grammars of constrained sequences force."""

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return the forced tokens of each sequence."""
        return [NO_DRAFT if view.grammar is None else _forced(view) for view in views]

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Know nothing of sequences."""


def _forced(view: DraftView) -> Draft:
    assert view.grammar is not None
    tokens = view.grammar.forced()[: view.most]
    return Draft(tokens, "forced") if tokens else NO_DRAFT
