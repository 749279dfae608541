"""The services of the client port share how a call is read: who calls, what a large message says, what metadata answer it."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar, cast

from pdserve.core.ids import RequestId
from pdserve.core.report import Report
from pdserve.rpc import status
from pdserve.rpc.malformed import LargeMessage
from router.api.answer import timeline
from router.api.request import GenerateInput
from router.api.router_api import RouterApi
from router.openai.json import NOTHING, Ignored, joined
from router.parsing.parser import BodyBudget, Job, JobKind, Parsed, RequestParser

Message = TypeVar("Message", contravariant=True)
Call = TypeVar("Call", covariant=True)


class MessageReader(Protocol[Message, Call]):
    """A function of `router.parsing` that reads a small message."""

    def __call__(
        self, request: Message, /, *, call_remaining_s: float | None, max_deadline_s: float, max_prompt_tokens: int
    ) -> Call:
        """Return what the message asks for. Raises `InvalidRequest`."""


class ClientCalls:
    """Reads the calls of clients. All services of the port share it, since it bounds the memory of all large messages."""

    def __init__(self, router: RouterApi, parser: RequestParser) -> None:
        self._router = router
        self._parser = parser
        self._budget = BodyBudget(router.max_inflight_body_bytes)

    def client(self, context: Any) -> tuple[str, str, str]:
        """Return the names of the client, its connection and a new call."""
        clients = self._router.clients
        return clients.of_peer(context.peer(), metadata_of(context, clients.header) if clients.header else None)

    async def asked(
        self,
        message: Message | LargeMessage,
        read: MessageReader[Message, Call],
        kind: JobKind,
        client: tuple[str, ...],
        call_remaining_s: float | None,
    ) -> Call:
        """Return the requests that a message asks for: `read` reads a small one, and the parser a large one of this kind.
        Raises a `PdserveError`."""
        longest, deadline_s = self._router.max_prompt_tokens, self._router.max_deadline_s
        if not isinstance(message, LargeMessage):
            return read(message, call_remaining_s=call_remaining_s, max_deadline_s=deadline_s, max_prompt_tokens=longest)
        job = Job(kind, message.data, longest, call_remaining_s=call_remaining_s, max_deadline_s=deadline_s)
        return cast(Call, await self.parse(job, client))

    async def parse(self, job: Job, client: tuple[str, ...]) -> Parsed:
        """Parse a large message. Raises a `PdserveError`."""
        with self._budget.share() as share:
            share.grow(len(job.data))
            return await self._parser.parse(dataclasses.replace(job, client=client))

    def initial_metadata(
        self, request_id: RequestId, request: GenerateInput, ignored: Ignored = NOTHING
    ) -> tuple[tuple[str, str], ...]:
        """Return the metadata that a client gets when its request is admitted. `ignored` are fields that were left out."""
        own = [
            (status.REQUEST_ID_METADATA, request_id),
            (status.CANCEL_TOKEN_METADATA, self._router.cancel_tokens.issue(request_id)),
        ]
        unenforced = self._router.unenforced(request)
        if (listed := joined([ignored, Ignored(unenforced, len(unenforced))])).count:
            own.append((status.IGNORED_FIELDS_METADATA, listed.header.decode()))
        correlation_id = request.correlation_id
        if correlation_id and correlation_id.isascii():  # metadata is ASCII; the report carries any id unchanged
            own.append((status.CORRELATION_ID_METADATA, correlation_id))
        return tuple(own)


def metadata_of(context: Any, name: str) -> str | None:
    """Return the value that the client sent under a name in lower case. None: it sent none."""
    value = next((value for key, value in context.invocation_metadata() or () if key == name), None)
    return value if isinstance(value, str) else None


def trailing(report: Report | None) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that a report makes."""
    return () if report is None else ((status.TIMELINE_METADATA, timeline(report).decode()),)
