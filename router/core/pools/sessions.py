"""The workers that had the last turn of each session. Pure.

This is a hint for placement: a worker that has computed a turn probably still has its KV. A session that is forgotten, or whose
worker has left, only costs the time to compute the conversation anew.

A session belongs to a salt, so a tenant who guesses the name of another's session learns nothing and moves nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import Role
from router.core.events import LinkId
from router.core.live_request import LiveRequest
from router.core.registry import Registry, Worker

MAX_SESSIONS: Final = 16_384
"""An entry takes about 0.8 KiB (measured with names of 36 characters), so all take 13 MiB. The session that had no turn for the
longest time is forgotten first."""


class _Turn(NamedTuple):
    """The worker of a turn. A link that broke may be dialled again by the same process, which still has its KV."""

    link: LinkId
    worker_id: WorkerId
    incarnation: Incarnation


class Sessions:
    """Remembers, for a bounded number of sessions, the worker of each role that had the last turn."""

    def __init__(self, registry: Registry, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._registry = registry
        self._max_sessions = max_sessions
        self._turns: dict[tuple[str, str], dict[Role, _Turn]] = {}
        """The turns by salt and session. The session that had a turn last is the last one."""

    def __len__(self) -> int:
        return len(self._turns)

    def placed(self, request: LiveRequest, worker: Worker) -> None:
        """Note that a part of a request was placed on a worker."""
        if request.session_id:
            key = (request.spec.cache_salt, request.session_id)
            turns = self._turns.pop(key, None) or {}
            turns[worker.hello.role] = _Turn(worker.link, worker.hello.worker_id, worker.hello.incarnation)
            self._turns[key] = turns
            if len(self._turns) > self._max_sessions:
                del self._turns[next(iter(self._turns))]

    def last_turn(self, request: LiveRequest, role: Role) -> LinkId | None:
        """Return the present link of the worker that had the last turn of the request's session in this role. None: the request
        has no session, the session is unknown, or the worker has left."""
        if not request.session_id:
            return None
        turn = self._turns.get((request.spec.cache_salt, request.session_id), {}).get(role)
        if turn is None:
            return None
        worker = self._registry.get(turn.link) or self._registry.find(turn.worker_id)
        return worker.link if worker is not None and worker.hello.incarnation == turn.incarnation else None
