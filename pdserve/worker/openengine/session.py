"""KvSessionRef: the ticket of a lease as opaque bytes, which a caller carries from a prefill worker to a decode worker.

A decode worker dials the lender that a ticket names, and shows it the cluster's token. A caller could make up a ticket that
names a machine of its own. So a reference is sealed with that token, and one that no worker of the cluster made is never
followed.

The lender draws token 0, but what tells its log-probabilities is not the lease. They are in the reference, if the prefill phase
asked for them.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kvtransfer.ticket import MAX_TICKET_BYTES, InvalidTicket, Ticket, WrongTicket
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import LeaseId
from pdserve.core.sampling import TokenLogprobs
from pdserve.rpc.v1 import openengine_pb2
from pdserve.worker.host import Host

ATTRIBUTE: Final = "pdserve"
FIELD: Final = "kv.session"
_SEAL_BYTES: Final = 32
_MAX_BYTES: Final = MAX_TICKET_BYTES + 4096  # 20 likeliest tokens take some 400 bytes
_PERSON: Final = b"pdserve OpenEngine session 1\0"


@dataclass(frozen=True, slots=True)
class Session:
    """A lease that a caller may hand to one decode worker."""

    lease_id: LeaseId
    ticket: bytes
    first: TokenLogprobs | None
    """The log-probabilities of token 0. None: the prefill phase did not ask for them."""

    @property
    def session_id(self) -> str:
        """The name of the session."""
        return str(self.lease_id)

    def to_wire(self, host: Host) -> openengine_pb2.KvSessionRef:
        """Write the session as a message of its lender, whose host this is."""
        first = None if self.first is None else (self.first.logprob, self.first.top)
        content = msgpack.packb((self.ticket, first))
        address, _, port = host.address.rpartition(":")
        ref = openengine_pb2.KvSessionRef(session_id=self.session_id, transfer_backend=host.config.transfer.transport)
        ref.endpoints.add(host=address, port=int(port), protocol="grpc")
        ref.attributes_struct[ATTRIBUTE] = base64.b64encode(_seal(host, content) + content).decode()
        return ref


def read_session(ref: openengine_pb2.KvSessionRef, host: Host, prompt_hash: bytes) -> Session:
    """Read a reference and check that it is over this prompt. Raises `InvalidRequest` naming the field, and `IncompatiblePeer`
    when KV cannot pass from its lender to this worker. Whether the lease is still held, only the lender knows."""
    ours = host.config.transfer.transport
    if ref.transfer_backend != ours:
        raise InvalidRequest(f"must be {ours!r}, got {ref.transfer_backend!r:.100}", field=f"{FIELD}.transfer_backend")
    if ref.dp_rank:
        raise InvalidRequest(f"must be 0, the only rank, got {ref.dp_rank}", field=f"{FIELD}.dp_rank")
    sealed = _opaque(ref)
    seal, content = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(host, content)):
        raise InvalidRequest("was not made by a worker of this cluster", field=FIELD)
    try:
        ticket_bytes, first = msgpack.unpackb(content, use_list=False)
        ticket = Ticket.decode(ticket_bytes)
        logprobs = None if first is None else TokenLogprobs(float(first[0]), tuple((int(i), float(p)) for i, p in first[1]))
    except (ValueError, TypeError, LookupError, OverflowError, msgpack.UnpackException, InvalidTicket) as exc:
        # With an empty token anybody can seal garbage.
        raise InvalidRequest("is no session", field=FIELD) from exc
    if ref.session_id != str(ticket.lease_id):
        raise InvalidRequest(f"is not that of the session, {ticket.lease_id}", field=f"{FIELD}.session_id")
    try:
        ticket.check_request(ticket.lease_id, prompt_hash)
    except WrongTicket as exc:
        raise InvalidRequest("is over another prompt, kv.cache_salt or guided", field=FIELD) from exc
    ticket.check_layout(host.kv_spec)
    ticket.check_checksums(host.config.lease.kv_checksum)
    return Session(ticket.lease_id, ticket_bytes, logprobs)


def _opaque(ref: openengine_pb2.KvSessionRef) -> bytes:
    """Return the bytes that the reference carries."""
    field = f"{FIELD}.attributes_struct.{ATTRIBUTE}"
    value: Any = ref.attributes_struct.fields.get(ATTRIBUTE)
    if value is None or value.WhichOneof("kind") != "string_value":
        raise InvalidRequest("is missing: send the session as PrefillReady has it", field=field)
    if len(value.string_value) > 2 * _MAX_BYTES:
        raise InvalidRequest(f"has {len(value.string_value)} characters; at most {2 * _MAX_BYTES} are allowed", field=field)
    try:
        return base64.b64decode(value.string_value, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequest("is not base64", field=field) from exc


def _seal(host: Host, content: bytes) -> bytes:
    return hmac.digest(host.config.cluster_token.encode() or b"none", _PERSON + content, "sha256")
