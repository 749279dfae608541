"""A worker and a request as placement sees them."""

from __future__ import annotations

from typing import NamedTuple

from router.core.events import LinkId


class Candidate(NamedTuple):
    """An immutable snapshot of one worker."""

    link: LinkId
    kv_tokens: int  # tokens whose KV fits its whole pool
    promised_tokens: int  # tokens of them that are promised, by the ledger's estimate
    free_slots: int  # sequences it takes beyond what this router placed on it
    queued_tokens: int  # prompt tokens not yet computed
    max_model_len: int
    suspect: bool  # it is silent, or its engine makes no steps
    refused: bool  # it refused work and has not shown since that it takes more
    claimed: bool = False  # its next room goes to a probe


class RequestView(NamedTuple):
    """An immutable view of one request."""

    prompt_tokens: int  # tokens whose KV must be computed: the prompt, and on a retry what the client has
    kv_tokens: int  # tokens whose KV the request will probably take on the worker
