"""One request, as it goes unchanged from admission through the router and the wire to the scheduler of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import IntRange, MaxBytes, field_types, limited
from pdserve.core.sampling import SamplingParams
from pdserve.core.speculation import MAX_DRAFTS
from pdserve.core.structured.constraint import Constraint


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The work that a client asks for.

    Every attempt of a request gets the same value. The output of earlier attempts is no part of it: it belongs to the attempt.
    The limits hold for clients, and admission checks them. The router's own probes go before all clients.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = limited(0, IntRange(-100, 100), means="Requests with a larger number go first.")
    """Requests with a larger priority are served first, but no request waits for ever."""
    cache_salt: str = limited("", MaxBytes(128), means="Cached prompts are shared only between requests with the same salt.")
    """KV of equal prefixes is shared only among requests with the same salt, so a tenant cannot find another tenant's prompts
    by timing."""
    tpot_s: float = 0.0
    """The target of the request's class for the time between its tokens. Steps that generate them compute fewer prompt tokens
    to meet it. 0: there is no target."""
    client: int = 0
    """A number for the client's connection, by which workers let prompts of several clients take turns. 0: it is not known."""
    draft_limit: int | None = limited(None, IntRange(0, MAX_DRAFTS))
    """The most drafts that a step verifies for the request, as speculative decoding has them. 0: it takes none. None: the
    worker's settings alone decide. No token depends on it."""
    constraint: Constraint | None = None
    """What the text of the output must be. None: any text. Raises `InvalidRequest` for a least length together with a
    constraint, because it could forbid the end that the constraint needs."""

    def __post_init__(self) -> None:
        if self.constraint is not None and self.sampling.min_tokens:
            raise InvalidRequest("must be 0 beside structured_outputs", field="min_tokens")


_NOT_DIRECT: Final = ("prompt_ids", "sampling", "tpot_s", "client", "draft_limit", "constraint")
OPTIONS: Final = tuple(name for name in field_types(RequestSpec) if name not in _NOT_DIRECT)
"""The fields that a client sets directly. Front ends pass them on by these names."""
