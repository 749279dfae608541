"""Conversion between messages of the link and the core's events and commands. Messages of workers are checked here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from pdserve.core.errors import MAX_MESSAGE_CHARS, InternalBug, PdserveError
from pdserve.core.ids import Handle, Incarnation, RequestId, WorkerId
from pdserve.core.limits import field_types
from pdserve.core.worker import WorkerHello, WorkerLoad
from pdserve.observe.story import MAX_ENTRIES, Shown, StoryEntry, cut
from pdserve.rpc import codec
from pdserve.rpc.codec import entries_from_wire, lease_id_from_wire, pack_ids, spec_to_fields
from pdserve.rpc.status import from_reason
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2, prefill_pb2, story_pb2
from router.core import events as ev

MAX_WORKER_ID_CHARS: Final = 253  # the limit for names in Kubernetes
MAX_TEXT_CHARS: Final = 1_000
"""The most characters of each other text of a hello. The texts of our workers have up to 300."""
MAX_FIELDS: Final = 16
"""The most fields of an entry of a worker's story. The entries of our workers have up to 4."""


@dataclass(frozen=True, slots=True)
class WorkExplained:
    """A worker's answer to a question about a request. The core does not get it. Times of `entries` are minus their age."""

    link: ev.LinkId
    question: int
    entries: tuple[StoryEntry, ...]
    left_out: int


_TEXTS: Final = tuple(name for name, kind in field_types(WorkerHello).items() if kind in (str, WorkerId))
_NUMBERS: Final = tuple(name for name, kind in field_types(WorkerHello).items() if kind is float)
_MEASURED: Final = tuple(name for name, kind in field_types(WorkerLoad).items() if kind is float)
_MEASURES: Final[Callable[[WorkerLoad], tuple[float, ...]]] = attrgetter(*_MEASURED)
"""The numbers of a heartbeat that a worker measures."""

Heard = ev.WorkerEvent | WorkExplained
"""Every event that a link may deliver."""


def hello_from_wire(hello: common_pb2.WorkerHello) -> WorkerHello:
    """Return the core's form of a hello. Raises `InternalBug` for one without a role or worker id, for a text that is long or
    not printable, and for a number that is negative or not finite: metrics, stories, tables and errors repeat them."""
    try:
        read = codec.hello_from_wire(hello)
    except KeyError:
        read = None
    if read is None or not read.worker_id:
        raise InternalBug(f"Hello without role or worker_id: role {hello.role}, worker_id {hello.worker_id!r}")
    if len(read.worker_id) > MAX_WORKER_ID_CHARS:
        size = len(read.worker_id)
        raise InternalBug(
            f"worker_id {read.worker_id[:32]!r}... has {size} characters; at most {MAX_WORKER_ID_CHARS} are allowed"
        )
    for name in _TEXTS:
        text = getattr(read, name)
        if len(text) > MAX_TEXT_CHARS or not text.isprintable():
            raise InternalBug(f"Hello.{name}: at most {MAX_TEXT_CHARS} printable characters are allowed, got {text[:32]!r}")
    for name in _NUMBERS:
        if not 0.0 <= getattr(read, name) < math.inf:
            raise InternalBug(f"Hello.{name}: must be from 0 to a finite number, got {getattr(read, name)}")
    return read


def event_from_wire(link: ev.LinkId, message: link_pb2.WorkerMessage) -> Heard | None:
    """Return the event of a message. None: a newer worker sent a message that this router does not know. Raises `InternalBug`
    for a second Hello."""
    kind = message.WhichOneof("body")
    if kind == "step_batch":  # most messages are of this kind
        return ev.StepRows(link, message.step_batch.rows)
    if kind is None:
        return None
    if kind == "hello":
        raise InternalBug("a second Hello on one link")
    return _READERS[kind](link, getattr(message, kind))


def _heartbeat(link: ev.LinkId, m: common_pb2.WorkerLoad) -> ev.WorkerEvent:
    """Raises `InternalBug` for a measured number below 0, infinite, or not a number: workers could not be compared by it."""
    load = codec.load_from_wire(m)
    for name, value in zip(_MEASURED, _MEASURES(load), strict=True):
        if not 0.0 <= value < math.inf:
            raise InternalBug(f"WorkerLoad.{name}: must be from 0 to a finite number, got {value}")
    return ev.HeartbeatSeen(link, load)


def _prefix_delta(link: ev.LinkId, m: link_pb2.PrefixDelta) -> ev.WorkerEvent:
    try:
        return ev.PrefixSeen(link, codec.prefix_delta_from_wire(m))
    except ValueError as exc:
        raise InternalBug(f"PrefixDelta {m.number}: {exc}") from exc


def _worker_lost(link: ev.LinkId, m: link_pb2.WorkerLost) -> ev.WorkerEvent:
    return ev.WorkerLost(link, m.message[:MAX_MESSAGE_CHARS])


def _prefill_started(link: ev.LinkId, m: prefill_pb2.PrefillStarted) -> ev.WorkerEvent:
    return ev.PrefillStarted(link, Handle(m.handle), lease_id_from_wire(m.lease_id), m.ticket, _cached(m))


def _reserved(link: ev.LinkId, m: decode_pb2.Reserved) -> ev.WorkerEvent:
    return ev.Reserved(link, Handle(m.handle), _cached(m))


def _cached(m: decode_pb2.Reserved | prefill_pb2.PrefillStarted) -> int | None:
    return m.cached_tokens if m.HasField("cached_tokens") else None


def _no_room(link: ev.LinkId, m: decode_pb2.NoRoom) -> ev.WorkerEvent:
    return ev.NoRoom(link, Handle(m.handle), m.blocks_needed, codec.shortage_from_wire(m))


def _refused(link: ev.LinkId, m: link_pb2.Refused) -> ev.WorkerEvent:
    return ev.Refused(link, Handle(m.handle))


def _kv_committed(link: ev.LinkId, m: decode_pb2.KvCommitted) -> ev.WorkerEvent:
    return ev.KvCommitted(link, Handle(m.handle), m.kv_bytes, m.transfer_s, m.commit_s, m.exposed_transfer_s)


def _request_failed(link: ev.LinkId, m: link_pb2.RequestFailed) -> ev.WorkerEvent:
    return ev.RequestFailed(link, Handle(m.handle), _error(m.reason, m.message), m.pair_failed)


def _work_explained(link: ev.LinkId, m: story_pb2.WorkExplained) -> WorkExplained:
    """Keep at most the amount that an honest worker sends: an operator gets the parts of all workers in one message."""
    entries = entries_from_wire(m.entries[:MAX_ENTRIES], since_s=0.0)
    kept = [StoryEntry(at_s, cut(kind), _fields(fields)) for at_s, kind, fields in entries if math.isfinite(at_s)]
    return WorkExplained(link, m.question, tuple(kept), m.left_out)


def _fields(fields: tuple[tuple[str, Shown], ...]) -> tuple[tuple[str, Shown], ...]:
    return tuple([(cut(name), cut(str(value))) for name, value in fields[:MAX_FIELDS]])


_READERS: Final[dict[str, Callable[[ev.LinkId, Any], Heard]]] = {
    "heartbeat": _heartbeat,
    "prefix_delta": _prefix_delta,
    "prefill_started": _prefill_started,
    "reserved": _reserved,
    "no_room": _no_room,
    "refused": _refused,
    "kv_committed": _kv_committed,
    "request_failed": _request_failed,
    "worker_lost": _worker_lost,
    "work_explained": _work_explained,
}


def _error(reason: int, message: str) -> PdserveError:
    try:
        return from_reason(reason, message)
    except ValueError:  # this version of the enum does not have it
        return InternalBug(f"worker failed with unknown reason {reason}: {message}")


def welcome(incarnation: Incarnation, link_version: int = 0) -> link_pb2.RouterMessage:
    """Return the message that accepts a worker."""
    body = link_pb2.Welcome(router_incarnation=incarnation, link_version=link_version)
    return link_pb2.RouterMessage(welcome=body, takes_bundles=True)


def question_to_wire(question: int, request_id: RequestId) -> link_pb2.RouterMessage:
    """Return the message that asks a worker for its part of a request."""
    return link_pb2.RouterMessage(explain_work=story_pb2.ExplainWork(question=question, request_id=request_id))


def command_to_wire(effect: ev.Command) -> link_pb2.RouterMessage:
    """Return the message of a command. Its parts are given as fields, since protobuf serialises and parses a part that is a
    message."""
    match effect:
        case ev.SendBind(work=work, deadline_s=deadline_s, local_prefill=local):
            return link_pb2.RouterMessage(bind={"deadline_s": deadline_s, "local_prefill": local, **_work(work)})
        case ev.SendPrefill(work=work):
            return link_pb2.RouterMessage(prefill=_work(work))
        case ev.SendAttach(handle=handle, lease_id=lease_id, ticket=ticket):
            lease = {"incarnation": lease_id.incarnation, "counter": lease_id.counter}
            return link_pb2.RouterMessage(attach={"handle": handle, "lease_id": lease, "ticket": ticket})
        case ev.SendCancel(handle=handle):
            return link_pb2.RouterMessage(cancel={"handle": handle})
        case ev.SendAlive():
            return link_pb2.RouterMessage(alive=link_pb2.Alive())
        case ev.SendPrefixResync():
            return link_pb2.RouterMessage(prefix_resync=link_pb2.PrefixResync())
        case ev.SendDrain():
            return link_pb2.RouterMessage(drain=link_pb2.Drain())
        case ev.SendFlip(role=role):
            return link_pb2.RouterMessage(flip=link_pb2.Flip(role=codec.role_to_wire(role)))
        case ev.SendBudget(max_num_batched_tokens=tokens, max_num_seqs=seqs):
            return link_pb2.RouterMessage(set_budget=link_pb2.SetBudget(max_num_batched_tokens=tokens, max_num_seqs=seqs))


def _work(work: ev.Work) -> dict[str, Any]:
    return {
        "handle": work.handle,
        "request_id": work.request_id,
        "spec": spec_to_fields(work.spec),
        "resumed_ids": pack_ids(work.resumed),
    }
