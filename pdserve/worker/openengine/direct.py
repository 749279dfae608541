"""Direct requests: those that come to a worker's own port. They command its role as a router does, and get its answers.

`DirectRequests.send` is the one place at which the answers of a role part: by their handles, those of direct requests come
here, and all others go to the router. Handles of the two never meet (`pdserve.core.ids`). Loop thread only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from pdserve.core.errors import Overloaded, Unavailable
from pdserve.core.ids import FIRST_DIRECT_HANDLE, Handle
from pdserve.core.request_spec import RequestSpec
from pdserve.rpc import codec
from pdserve.rpc.v1 import decode_pb2, link_pb2, prefill_pb2
from pdserve.worker.host import Host, HostedRole, is_direct
from pdserve.worker.openengine.session import Session

WAITING_PER_SLOT: Final = 4
"""A worker takes so many direct requests for each sequence that it may run. Prompts beyond those that run wait for blocks."""
MAX_ENDED: Final = 4096
"""The ended requests, and the sessions, that are remembered for those who abort them: as many as a lease table remembers."""
_SINGLE: Final = frozenset({"prefill_started", "reserved", "no_room", "kv_committed", "request_failed", "refused"})
"""The messages that answer one command. Step batches answer several, and all others are for the router alone."""


class Ending(Enum):
    """The ways in which a direct request ends without an answer of the role."""

    ABORTED = "aborted"
    CLOSED = "closed"
    """This life of the worker ends."""


Answer = link_pb2.StepRow | prefill_pb2.PrefillStarted | decode_pb2.Reserved | decode_pb2.NoRoom | decode_pb2.KvCommitted
Told = Answer | link_pb2.RequestFailed | link_pb2.Refused | Ending


class DirectRequest:
    """One direct request, until its caller has all that it gets. The tokens of its answers bound what it keeps."""

    def __init__(self, handle: Handle, request_id: str, end_s: float) -> None:
        """`end_s` is its deadline by the loop's clock."""
        self.handle = handle
        self.request_id = request_id
        self._end_s = end_s
        self.session_id = ""
        """The session under which it decodes. Empty: there is none."""
        self._told: asyncio.Queue[Told] = asyncio.Queue()

    async def next(self) -> Told:
        """Return the next answer. Raises TimeoutError at the deadline."""
        async with asyncio.timeout_at(self._end_s):
            return await self._told.get()

    def tell(self, answer: Told) -> None:
        """Add an answer."""
        self._told.put_nowait(answer)


class DirectRequests:
    """All direct requests of one life of a worker. Set `role` before the first one."""

    def __init__(self, to_router: Callable[[link_pb2.WorkerMessage], None], max_num_seqs: int) -> None:
        self.role: HostedRole[Any] | None = None
        self.limit = WAITING_PER_SLOT * max_num_seqs
        self._to_router = to_router
        self._handles = itertools.count(FIRST_DIRECT_HANDLE)
        self._running: dict[Handle, DirectRequest] = {}
        self._by_id: dict[str, DirectRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._sessions: OrderedDict[str, Handle] = OrderedDict()
        self._closed = False

    def send(self, message: link_pb2.WorkerMessage) -> None:
        """Hand an answer of the role to whoever gave the command."""
        body = message.WhichOneof("body")
        if body == "step_batch":
            rows = message.step_batch.rows
            theirs = [row for row in rows if not is_direct(Handle(row.handle))]
            if len(theirs) < len(rows):
                for row in rows:
                    self._tell(row.handle, row)
                if not theirs:
                    return
                message = link_pb2.WorkerMessage(step_batch=link_pb2.StepBatch(rows=theirs))
        elif body in _SINGLE:
            answer = getattr(message, body)
            if is_direct(Handle(answer.handle)):
                self._tell(answer.handle, answer)
                return
        self._to_router(message)

    def _tell(self, handle: int, answer: Told) -> None:
        request = self._running.get(Handle(handle))
        if request is not None:  # its caller may have left
            request.tell(answer)

    def open(self, request_id: str, end_s: float) -> DirectRequest | None:
        """Add a request with a deadline by the loop's clock. Return None if one of this id runs. Raises `Overloaded` and
        `Unavailable`. `end` it."""
        if self._closed:
            raise Unavailable("this worker ends")
        if request_id in self._by_id:
            return None
        if len(self._running) >= self.limit:
            raise Overloaded(f"{self.limit} direct requests are here, as many as this worker takes", retry_after_s=1.0)
        request = DirectRequest(Handle(next(self._handles)), request_id, end_s)
        self._running[request.handle] = self._by_id[request_id] = request
        return request

    def prefill(self, request: DirectRequest, spec: RequestSpec) -> None:
        """Compute a prompt and lend its KV."""
        command = prefill_pb2.Prefill(handle=request.handle, request_id=_name(request), spec=codec.spec_to_wire(spec))
        self._command(link_pb2.RouterMessage(prefill=command))

    def bind(self, request: DirectRequest, spec: RequestSpec, deadline_s: float, *, local_prefill: bool) -> None:
        """Reserve blocks for a request, and with `local_prefill` compute its prompt as well."""
        command = decode_pb2.Bind(
            handle=request.handle,
            request_id=_name(request),
            deadline_s=deadline_s,
            local_prefill=local_prefill,
            spec=codec.spec_to_wire(spec),
        )
        self._command(link_pb2.RouterMessage(bind=command))

    def attach(self, request: DirectRequest, session: Session) -> None:
        """Read the KV of a session into the reserved blocks."""
        lease_id = codec.lease_id_to_wire(session.lease_id)
        command = decode_pb2.Attach(handle=request.handle, lease_id=lease_id, ticket=session.ticket)
        self._command(link_pb2.RouterMessage(attach=command))

    def keep(self, request: DirectRequest, session: Session) -> None:
        """Remember which request lends under a session."""
        self._sessions[session.session_id] = request.handle
        if len(self._sessions) > MAX_ENDED:
            self._sessions.popitem(last=False)

    def end(self, request: DirectRequest, *, cancel: bool) -> None:
        """Forget a request. With `cancel` its work and its lease end, if they have not."""
        if self._running.pop(request.handle, None) is None:
            return
        del self._by_id[request.request_id]
        self._ended[request.request_id] = None
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if cancel:
            self._cancel(request.handle)

    def abort(self, request_id: str) -> bool | None:
        """Abort a request. False: it has ended. None: it is not known."""
        request = self._by_id.get(request_id)
        if request is None:
            return False if request_id in self._ended else None
        self._abort(request)
        return True

    def abort_session(self, session_id: str) -> bool | None:
        """Abort what decodes under a session, and end its lease if it was granted here. False: it has ended. None: it is not
        known."""
        decoding = [one for one in self._running.values() if one.session_id == session_id]
        for request in decoding:
            self._abort(request)
        handle = self._sessions.get(session_id)
        if handle is None:
            return True if decoding else None
        held = self._role.has(handle)
        self._cancel(handle)
        return held or bool(decoding)

    def abort_all(self) -> int:
        """Abort all requests and end all sessions. Return how many were left."""
        requests = list(self._running.values())
        handles = [handle for handle in self._sessions.values() if self._role.has(handle)]
        for request in requests:
            self._abort(request)
        for handle in handles:
            self._cancel(handle)
        return len({one.handle for one in requests} | set(handles))

    def close(self) -> None:
        """Tell all requests that this life of the worker ends. Those that have their last answer come to it first."""
        self._closed = True
        for request in self._running.values():
            request.tell(Ending.CLOSED)

    @property
    def num_running(self) -> int:
        """The number of requests whose callers wait for more."""
        return len(self._running)

    @property
    def _role(self) -> HostedRole[Any]:
        assert self.role is not None
        return self.role

    def _abort(self, request: DirectRequest) -> None:
        request.tell(Ending.ABORTED)
        self._cancel(request.handle)

    def _cancel(self, handle: Handle) -> None:
        self._command(link_pb2.RouterMessage(cancel=link_pb2.Cancel(handle=handle)))

    def _command(self, message: link_pb2.RouterMessage) -> None:
        self._role.on_command(message)


def _name(request: DirectRequest) -> str:
    """Return the name of a request in logs and stories. It is never that of a request of the router."""
    return f"openengine/{ascii(request.request_id)[1:-1]}"


def refuse_drained(host: Host) -> None:
    """Raise `Unavailable` if the worker takes nothing new."""
    if host.draining:
        raise Unavailable(f"{host.config.worker_id} drains: it takes no new request")
