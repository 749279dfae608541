"""A worker and a request as placement sees them."""

from __future__ import annotations

from typing import NamedTuple

from pdserve.core.worker import Role
from router.core.events import LinkId


class Candidate(NamedTuple):
    """An immutable snapshot of one worker, and of what it has to do with one request."""

    link: LinkId
    kv_tokens: int  # tokens whose KV fits its whole pool
    promised_tokens: int  # tokens of them that are promised, by the ledger's estimate
    free_slots: int  # sequences it takes beyond what this router placed on it
    queued_tokens: int  # prompt tokens not yet computed
    max_model_len: int
    suspect: bool  # it is silent, or its engine makes no steps
    refused: bool  # it refused work and has not shown since that it takes more
    claimed: bool = False  # its next room goes to a probe
    running: int = 0  # sequences that this router placed on it
    prompt_tokens_per_s: float = 0.0  # prompt tokens that it computes in a second; 0: nobody knows yet
    decode_step_s: float = 0.0  # time of one of its steps without prompts; 0: nobody knows yet
    step_sequences: int = 0  # sequences that it ran when it told this time
    picked: int = 0  # number of the pick, counted over the pool, that last chose it; 0: none did
    cached_tokens: int = 0  # tokens of this request's prompt whose KV it probably holds
    session: bool = False  # the last turn of the request's session was placed on it
    draw: float = 0.0  # random number in [0, 1), new for each request and worker
    role: Role = Role.DECODE
    load: float = 0.0  # how busy it is, in the measure of its pool (`router.core.pools.load`)
    counted_tokens_per_s: float = 0.0  # rate of prompts as it counts beside the other workers of its pool; 0: nobody knows any


class RequestView(NamedTuple):
    """An immutable view of one request."""

    prompt_tokens: int  # tokens whose KV must be computed: the prompt, and on a retry what the client has
    kv_tokens: int  # tokens whose KV the request will probably take on the worker
    ttft_left_s: float | None = None  # time until the first token is late by the request's class; None: no target
    tpot_s: float | None = None  # target for the time between tokens; None: no target
