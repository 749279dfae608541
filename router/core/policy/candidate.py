"""A worker as placement sees it: an immutable snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.events import LinkId


@dataclass(frozen=True, slots=True)
class Candidate:
    link: LinkId
    kv_tokens: int  # of its whole pool
    promised_tokens: int  # of it, by the ledger's estimate
    free_slots: int  # sequences it takes beyond what this router placed on it
    queued_tokens: int  # prompt tokens not yet computed
    max_model_len: int
    suspect: bool  # nothing was heard from it for a while
    refused: bool  # it said no and has not shown since that it would take more
    claimed: bool = False  # its next room is the router's own
