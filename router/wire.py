"""Between the link's messages and the core's events and effects."""

from __future__ import annotations

from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import Handle, Incarnation, WorkerId
from pdserve.rpc import codec
from pdserve.rpc.status import from_reason
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2, prefill_pb2
from router.events import (
    Event,
    HeartbeatSeen,
    KvCommitted,
    LinkId,
    NoRoom,
    PrefillStarted,
    RequestFailed,
    Reserved,
    Role,
    SendAttach,
    SendBind,
    SendCancel,
    SendPrefill,
    StepRows,
    WorkerHello,
    WorkerLoad,
)

_ROLES = {common_pb2.ROLE_PREFILL: Role.PREFILL, common_pb2.ROLE_DECODE: Role.DECODE}


def hello(wire: link_pb2.Hello) -> WorkerHello:
    """Raises `InvalidRequest` for what no worker of ours says."""
    if wire.role not in _ROLES or not wire.worker_id:
        raise InvalidRequest("Hello needs a worker_id and a role", field="hello")
    return WorkerHello(
        worker_id=WorkerId(wire.worker_id),
        role=_ROLES[wire.role],
        incarnation=Incarnation(wire.incarnation),
        address=wire.address,
        model_fingerprint=wire.model_fingerprint,
        block_size=wire.block_size,
        num_blocks=wire.num_blocks,
        max_model_len=wire.max_model_len,
        max_num_seqs=wire.max_num_seqs,
        dtype=wire.dtype,
        kv_bytes_per_token=wire.kv_bytes_per_token,
        pid=wire.pid,
    )


def event(link: LinkId, message: link_pb2.WorkerMessage) -> Event | None:
    """None for a message of a newer protocol, which an older router may ignore."""
    match message.WhichOneof("body"):
        case "step_batch":
            return StepRows(link, message.step_batch.rows)
        case "heartbeat":
            return HeartbeatSeen(link, _load(message.heartbeat))
        case "reserved":
            return Reserved(link, Handle(message.reserved.handle))
        case "no_room":
            wire = message.no_room
            return NoRoom(link, Handle(wire.handle), wire.blocks_needed, wire.blocks_free)
        case "prefill_started":
            started = message.prefill_started
            lease_id = codec.lease_id_from_wire(started.lease_id)
            return PrefillStarted(link, Handle(started.handle), lease_id, started.ttl_s, started.ticket)
        case "kv_committed":
            done = message.kv_committed
            times = (done.transfer_s, done.commit_s, done.exposed_transfer_s)
            return KvCommitted(link, Handle(done.handle), done.kv_bytes, *times)
        case "request_failed":
            failed = message.request_failed
            return RequestFailed(link, Handle(failed.handle), from_reason(failed.reason, failed.message))
    return None


def _load(beat: link_pb2.Heartbeat) -> WorkerLoad:
    blocks = beat.blocks
    return WorkerLoad(
        blocks=BlockCounts(blocks.total, blocks.free, blocks.cached, blocks.held, blocks.quarantined),
        queued_requests=beat.queued_requests,
        queued_tokens=beat.queued_tokens,
        running_sequences=beat.running_sequences,
        leases_held=beat.leases_held,
        loop_lag_ms=beat.loop_lag_ms,
    )


def command(effect: SendBind | SendPrefill | SendAttach | SendCancel) -> link_pb2.RouterMessage:
    """The message that carries this effect to its worker."""
    match effect:
        case SendBind(_, work, bind, local_prefill):
            return link_pb2.RouterMessage(
                bind=decode_pb2.Bind(
                    handle=work.handle,
                    request_id=work.request_id,
                    attempt=work.attempt,
                    bind=bind,
                    prompt_ids=codec.pack_ids(work.prompt_ids),
                    sampling=codec.sampling_to_wire(work.sampling),
                    deadline_s=work.deadline_s,
                    priority=work.priority,
                    local_prefill=local_prefill,
                )
            )
        case SendPrefill(_, work):
            return link_pb2.RouterMessage(
                prefill=prefill_pb2.Prefill(
                    handle=work.handle,
                    request_id=work.request_id,
                    attempt=work.attempt,
                    prompt_ids=codec.pack_ids(work.prompt_ids),
                    sampling=codec.sampling_to_wire(work.sampling),
                    deadline_s=work.deadline_s,
                    priority=work.priority,
                )
            )
        case SendAttach(_, handle, lease_id, ttl_s, ticket):
            lease = codec.lease_id_to_wire(lease_id)
            return link_pb2.RouterMessage(attach=decode_pb2.Attach(handle=handle, lease_id=lease, ttl_s=ttl_s, ticket=ticket))
        case SendCancel(_, handle):
            return link_pb2.RouterMessage(cancel=link_pb2.Cancel(handle=handle))
