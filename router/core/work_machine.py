"""The work machine: a table of all that one worker may report about one piece of work. The router's core owns it.

```
SENT -> RESERVED -> ATTACHED -> COMMITTED     a bind: blocks are reserved, the lease to read is named, the KV is there
SENT -> RESERVED                              a bind of a worker that also computes the prompt
SENT -> REFUSED                               a bind without room, or the worker drains
SENT -> LENDING -> PREFILLED                  a prefill: a lease is granted, the first token is drawn
```
The machine knows nothing about the request that the work serves. A rebind makes new work, which starts at SENT again. Work may
end in every state, because a worker may be lost at any time; the owner then forgets its machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pdserve.core.errors import IllegalTransition
from pdserve.core.ids import Handle, RequestId


class WorkState(Enum):
    """The state of one piece of work, as the router knows it."""

    __hash__ = object.__hash__  # members are singletons; a hash of their names is computed in Python at each look-up

    SENT = "sent"
    RESERVED = "reserved"
    ATTACHED = "attached"
    COMMITTED = "committed"
    REFUSED = "refused"
    LENDING = "lending"
    PREFILLED = "prefilled"


class WorkEvent(Enum):
    """The events of one piece of work."""

    __hash__ = object.__hash__  # members are singletons; a hash of their names is computed in Python at each look-up

    RESERVED = "reserved"
    NO_ROOM = "no_room"
    DRAINING = "draining"
    """The worker drains and has not begun the work."""
    ATTACHED = "attached"
    """The router tells the decode worker which lease it reads."""
    KV_COMMITTED = "kv_committed"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"


_S, _E = WorkState, WorkEvent

TRANSITIONS: Final[dict[tuple[WorkState, WorkEvent], WorkState]] = {
    (_S.SENT, _E.RESERVED): _S.RESERVED,
    (_S.SENT, _E.NO_ROOM): _S.REFUSED,
    (_S.SENT, _E.DRAINING): _S.REFUSED,
    (_S.RESERVED, _E.ATTACHED): _S.ATTACHED,
    (_S.ATTACHED, _E.KV_COMMITTED): _S.COMMITTED,
    (_S.SENT, _E.PREFILL_STARTED): _S.LENDING,
    (_S.LENDING, _E.FIRST_TOKEN): _S.PREFILLED,
}


@dataclass(slots=True)
class WorkMachine:
    """The state of the work that `handle` names. `history` holds all its events. The table allows at most three."""

    request_id: RequestId
    handle: Handle
    state: WorkState = WorkState.SENT
    history: list[tuple[WorkEvent, WorkState]] = field(default_factory=list)

    def move(self, event: WorkEvent) -> WorkState:
        """Change the state as the table says, and return the new one. Raises `IllegalTransition`, with the history and nothing
        changed, when the state does not allow the event."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            work = f"work {self.handle} of request {self.request_id}"
            past = tuple(f"{event.name}:{state.name}" for event, state in self.history)
            raise IllegalTransition(work, self.state.name, event.name, past)
        self.history.append((event, target))
        self.state = target
        return target
