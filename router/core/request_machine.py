"""The request machine: a table of all that may happen to one request. The router's core owns it.

```
QUEUED -> BINDING -> PREFILLING -> HANDOFF -> DECODING -> FINISHED         disaggregated
QUEUED -> BINDING ------------------------> DECODING -> FINISHED           colocated
BINDING -> QUEUED                            no room, its worker was lost, or drains: nothing was computed yet
PREFILLING -> the same, DRAINING             the prefill worker drains: another one computes, and the reservation stays
PREFILLING -> QUEUED                         the prefill worker drains, and there is no other one
PREFILLING, HANDOFF -> the same, REBOUND     the decode worker was lost: another one reads the same lease
DECODING -> QUEUED, MIGRATED                 its worker is to be empty and another has room, or it gives its slot away
PREFILLING -> QUEUED, MIGRATED               its prefill worker is to be empty, and another worker may compute the prompt
any that is placed -> QUEUED, RETRIED        anything else was lost: the next attempt starts from prompt and emitted ids
any that runs -> CANCELLED (client gone) | FAILED (deadline, no retry left, no worker left)
```
After a loss, the router decides between REBOUND, RETRIED and LOST; this table says which states each may lead to. The table in
`work_machine.py` says what each worker may report. Messages of two links have no common order, so messages of
the decode worker may arrive before token 0 does: TOKEN_OUT is legal while PREFILLING, and the owner keeps the token.
KV_COMMITTED happens once both have come, token 0 and the worker's report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pdserve.core.errors import IllegalTransition
from pdserve.core.ids import RequestId


class RequestState(Enum):
    """The state of one request, as the router knows it."""

    __hash__ = object.__hash__  # members are singletons; a hash of their names is computed in Python at each look-up

    QUEUED = "queued"
    BINDING = "binding"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RequestEvent(Enum):
    """The events of one request."""

    __hash__ = object.__hash__  # members are singletons; a hash of their names is computed in Python at each look-up

    DECODE_PICKED = "decode_picked"
    RESERVED = "reserved"
    """The decode worker of the attempt has reserved blocks, and a prefill worker is told to compute the prompt."""
    RESERVED_LOCAL = "reserved_local"
    """A worker that also computes the prompt has reserved blocks."""
    NO_ROOM = "no_room"
    PREFILL_POOL_EMPTY = "prefill_pool_empty"
    """No prefill worker is left after decode has reserved: the bind is given back and placement is decided again."""
    DRAINING = "draining"
    """A worker that drains has refused its part, which is placed elsewhere."""
    FIRST_TOKEN = "first_token"
    FINAL_FIRST_TOKEN = "final_first_token"
    """Token 0 ends the request, so no KV is handed off."""
    KV_COMMITTED = "kv_committed"
    TOKEN_OUT = "token_out"
    """A decoded token came before token 0. Tokens in their order change no state, so they are no event here."""
    STOPPED = "stopped"
    DECODE_LOST = "decode_lost"
    """The decode worker was lost before it had reserved. The request goes on as after NO_ROOM."""
    REBOUND = "rebound"
    """Another decode worker takes over under the same lease."""
    MIGRATED = "migrated"
    """A worker is to be empty. The same attempt goes on elsewhere, from the prompt and the tokens that the client has."""
    RETRIED = "retried"
    """The attempt is given up, and the next one waits for its turn."""
    LOST = "lost"
    """The attempt is given up, and the request gets no other attempt."""
    UNPLACEABLE = "unplaceable"
    """No worker is left that could serve the request."""
    SHED = "shed"
    """The queue was full, and the request gave way to a request of a class of higher priority."""
    CLIENT_GONE = "client_gone"
    DEADLINE_PASSED = "deadline_passed"
    BROKEN = "broken"
    """A peer or the router itself broke the protocol. Only this request fails."""


_S, _E = RequestState, RequestEvent

TERMINAL: Final = (_S.FINISHED, _S.CANCELLED, _S.FAILED)
LIVE: Final = tuple(state for state in RequestState if state not in TERMINAL)
PLACED: Final = (_S.BINDING, _S.PREFILLING, _S.HANDOFF, _S.DECODING)

TRANSITIONS: Final[dict[tuple[RequestState, RequestEvent], RequestState]] = {
    (_S.QUEUED, _E.DECODE_PICKED): _S.BINDING,
    (_S.QUEUED, _E.UNPLACEABLE): _S.FAILED,
    (_S.QUEUED, _E.SHED): _S.FAILED,
    (_S.BINDING, _E.RESERVED): _S.PREFILLING,
    (_S.BINDING, _E.RESERVED_LOCAL): _S.DECODING,
    **{(_S.BINDING, e): _S.QUEUED for e in (_E.NO_ROOM, _E.PREFILL_POOL_EMPTY, _E.DECODE_LOST, _E.DRAINING)},
    (_S.PREFILLING, _E.DRAINING): _S.PREFILLING,
    (_S.PREFILLING, _E.PREFILL_POOL_EMPTY): _S.QUEUED,
    (_S.PREFILLING, _E.TOKEN_OUT): _S.PREFILLING,
    (_S.PREFILLING, _E.FIRST_TOKEN): _S.HANDOFF,
    (_S.PREFILLING, _E.FINAL_FIRST_TOKEN): _S.FINISHED,
    (_S.HANDOFF, _E.KV_COMMITTED): _S.DECODING,
    (_S.DECODING, _E.STOPPED): _S.FINISHED,
    **{(s, _E.MIGRATED): _S.QUEUED for s in (_S.PREFILLING, _S.DECODING)},
    **{(s, _E.REBOUND): s for s in (_S.PREFILLING, _S.HANDOFF)},
    **{(s, _E.RETRIED): _S.QUEUED for s in PLACED},
    **{(s, _E.LOST): _S.FAILED for s in PLACED},
    **{(s, _E.CLIENT_GONE): _S.CANCELLED for s in LIVE},
    **{(s, _E.DEADLINE_PASSED): _S.FAILED for s in LIVE},
    **{(s, _E.BROKEN): _S.FAILED for s in LIVE},
}

MAX_HISTORY: Final = 32
"""The most events that the machine keeps for the message of an illegal transition. Events that change nothing are not kept."""


@dataclass(slots=True)
class RequestMachine:
    """The state of one request. `attempt` counts end-to-end tries, from 1. `bind` counts decode reservations of all attempts;
    the first bind is 1."""

    request_id: RequestId
    state: RequestState = RequestState.QUEUED
    attempt: int = 1
    bind: int = 0
    history: list[tuple[RequestEvent, RequestState]] = field(default_factory=list)

    def move(self, event: RequestEvent) -> RequestState:
        """Change the state as the table says, and return the new one. Raises `IllegalTransition`, with the history and nothing
        changed, when the state does not allow the event."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            past = tuple(f"{event.name}:{state.name}" for event, state in self.history)
            raise IllegalTransition(f"request {self.request_id}", self.state.name, event.name, past)
        if target is not self.state or event is RequestEvent.REBOUND:
            self.history.append((event, target))
            del self.history[:-MAX_HISTORY]
        if event is RequestEvent.DECODE_PICKED or event is RequestEvent.REBOUND:
            self.bind += 1
        elif event is RequestEvent.RETRIED:
            self.attempt += 1
        self.state = target
        return target

    @property
    def terminal(self) -> bool:
        """True when the request has ended."""
        return self.state in TERMINAL
