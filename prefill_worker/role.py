"""The prefill role: it handles the router's commands and the engine's events. It runs on the loop thread only.

```
Prefill -> engine allocates every prompt block -> grant a lease -> PrefillStarted(ticket)
        -> chunks finish: advance the watermark -> token 0: last advance, to router and reader alike
        -> checksums of the blocks that a chunk has completed follow the chunk; a Commit waits for the last ones
        -> Commit | Release | Cancel | expiry: the lease's references go back to the engine
```
The lease always ends before its blocks are freed, so a reader that gets the answer OK has read the KV that prefill wrote.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from kvtransfer.lease_service import LeaseService, PeerService
from kvtransfer.ticket import EngineTicket, LeaseTicket, Ticket
from pdserve.core.block_pools import count_blocks
from pdserve.core.errors import LeaseGone, PdserveError, Unavailable
from pdserve.core.ids import Handle, LeaseId, SeqId
from pdserve.core.lease import FirstToken, LeaseState, LeaseTable
from pdserve.core.request_spec import RequestSpec
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.engine.schedule.collect import Advance, OutputToken
from pdserve.rpc import codec
from pdserve.rpc.v1 import link_pb2, peer_pb2_grpc, prefill_pb2
from pdserve.worker.host import (
    Host,
    HostedRole,
    KvDamage,
    OutputStream,
    RoleRequest,
    WorkKind,
    fail_foreign,
    failed,
    is_direct,
    named,
    refuse,
)
from pdserve.worker.messages import Abort, AddLent, EngineKv, Lent, Rehash, Rehashed, ReturnLease, Sealed, StepEvents

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class LentRequest(RoleRequest):
    """One Prefill command, from its arrival until its lease has ended."""

    lease_id: LeaseId | None = None
    kv: EngineKv | None = None
    """The KV that a foreign engine holds for the reader. None: it is in our blocks."""


READER_GRACE_S: Final = 2.0
"""A lease over KV that a foreign engine holds outlives its cancelled request by so long. Only the reader's engine can have this
KV freed before the engine's own time is over, and it does so after a commit, which takes milliseconds."""


class PrefillRole(HostedRole[LentRequest]):
    """The role of one prefill worker: its requests, its leases and the services for its readers."""

    name = "prefill"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._clock = asyncio.get_running_loop().time
        self._table = LeaseTable(host.incarnation, ttl_s=host.config.lease.ttl_s)
        token = host.config.cluster_token
        self._rehashes: dict[SeqId, asyncio.Future[int]] = {}
        self._rotted_blocks = 0
        self._cancelled: dict[LeaseId, float] = {}  # leases that wait for their readers, each with the end of this wait
        self._leases = LeaseService(self._table, self._clock, self._return_leases, cluster_token=token, rehash=self._rehash)
        peer = PeerService(
            host.incarnation,
            host.agent_metadata,
            cluster_token=token,
            transport=host.transport,
            model_digest=host.model_digest,
        )
        peer_pb2_grpc.add_LeaseServicer_to_server(self._leases, host.server)
        peer_pb2_grpc.add_PeerServicer_to_server(peer, host.server)

    @property
    def leases_held(self) -> int:
        """The number of leases that are held."""
        return self._table.num_held

    @property
    def damage(self) -> KvDamage:
        """The blocks of KV that were found damaged since the start."""
        return KvDamage(self._leases.corrupt_blocks, self._rotted_blocks)

    @property
    def idle(self) -> bool:
        """True when no request and no lease is left."""
        return not self._by_seq and self._table.num_held == 0 and self._compilations.idle

    def on_command(self, message: link_pb2.RouterMessage) -> None:
        """Handle Prefill or Cancel. A command of the other role fails its request, which is served elsewhere."""
        body = message.WhichOneof("body")
        if body == "prefill":
            self._take(message.prefill)
        elif body == "cancel":
            self._cancel(Handle(message.cancel.handle))
        else:
            fail_foreign(self._host, message, self.name)

    def on_step(self, events: StepEvents) -> None:
        """Grant leases, advance watermarks, send token 0 to the router, and pass checksums on."""
        for lent in events.lent:
            if lent.seq_id not in self._by_seq:  # the request has ended; its blocks carry the lease's references already
                self._host.submit(ReturnLease(lent.seq_id, read=lent.kv is None))
        self._each(events.lent, self._grant)
        self._each(events.advanced, self._advance)
        rows = self._each(events.tokens, self._finish)
        if events.preempted or events.failed or events.grammars_failed or events.given_up:
            self._take_losses(events)
        if rows:
            self._host.send(link_pb2.WorkerMessage(step_batch=link_pb2.StepBatch(rows=rows)))
        for sealed in events.sealed:
            self._seal(sealed)
        for rehashed in events.rehashed:
            self._rehashed(rehashed)
        self._return_leases()

    def on_tick(self) -> None:
        """End the leases that are due, and check the table."""
        now_s = self._clock()
        self._table.expire_due(now_s=now_s)
        for lease_id in [lease_id for lease_id, end_s in self._cancelled.items() if end_s <= now_s]:
            self._table.release(lease_id, now_s=now_s)
        self._table.check_invariants()
        self._return_leases()

    def _begin(
        self, command: prefill_pb2.Prefill, spec: RequestSpec, resumed: tuple[int, ...], grammar: GrammarState | None
    ) -> None:
        """Give a request to the engine. Raises `Overloaded`, and `Unavailable` while the worker drains. It may have begun to
        drain while the grammar was compiled."""
        handle = Handle(command.handle)
        if refuse(self._host, handle, command.request_id):
            return
        if self._host.draining:  # a router without `Refused` takes this for a failure
            raise Unavailable("this worker is draining")
        seq_id = self._host.next_seq_id(handle)
        self._host.submit(AddLent(seq_id, spec, resumed, grammar))
        ends, tokenizer = self._host.card.eos_token_ids, self._host.tokenizer
        output = OutputStream(handle, tokenizer, spec.prompt_ids, spec.sampling, resumed, eos_token_ids=ends)
        request = LentRequest(
            handle=handle,
            request_id=command.request_id,
            seq_id=seq_id,
            prompt_hash=named(command, spec),
            prompt_len=len(spec.prompt_ids) + len(resumed),
            output=output,
        )
        self._by_handle[handle] = self._by_seq[seq_id] = request
        self.note(request, WorkKind.RECEIVED, tokens=request.prompt_len, resumed=len(resumed))

    def _cancel(self, handle: Handle) -> None:
        request = self._by_handle.pop(handle, None)
        if request is None:
            self._compilations.cancel(handle)
            return
        self.note(request, WorkKind.CANCELLED)
        if request.lease_id is None:
            del self._by_seq[request.seq_id]  # a `Lent` that is under way finds no request; its blocks go back
            self._host.submit(Abort(request.seq_id))
        elif request.kv is not None and request.kv.params:
            self._cancelled[request.lease_id] = self._clock() + READER_GRACE_S
        else:
            self._table.release(request.lease_id, now_s=self._clock())
            self._return_leases()

    def _fail(self, request: LentRequest, error: PdserveError) -> None:
        """Tell the router of a request that has failed here. A lease waits for the router's Cancel, its reader or its expiry.
        If the lease ended at once, its reader could report it as gone before this worker has reported why.

        The blocks of a request carry a lease's references since the step that admitted it. If no lease was granted, they are
        returned now."""
        if request.failed:
            return
        request.failed = True
        if request.lease_id is None:
            self._by_handle.pop(request.handle, None)
            del self._by_seq[request.seq_id]
            self._host.submit(Abort(request.seq_id))
            self._host.submit(ReturnLease(request.seq_id))
        self.note(request, WorkKind.FAILED, error=error.code, message=error.message)
        self._host.send(failed(request.handle, error))

    def _grant(self, request: LentRequest, lent: Lent) -> None:
        now_s = self._clock()
        request.kv = lent.kv
        request.lease_id = self._table.grant(lent.seq_id, lent.block_tables, request.prompt_len, sums=lent.sums, now_s=now_s)
        ticket = self._ticket(request.lease_id, lent, request)
        self._table.expect(request.lease_id, ticket.proof)
        started = prefill_pb2.PrefillStarted(
            handle=request.handle,
            lease_id=codec.lease_id_to_wire(request.lease_id),
            ticket=ticket.encode(),
            cached_tokens=lent.hits * self._host.kv_spec.block_size,
        )
        self._host.send(link_pb2.WorkerMessage(prefill_started=started))
        self.note(request, WorkKind.GRANTED, lease=request.lease_id, blocks=count_blocks(lent.block_tables))

    def _ticket(self, lease_id: LeaseId, lent: Lent, request: LentRequest) -> LeaseTicket:
        host = self._host
        if lent.kv is not None:
            engine_ticket = EngineTicket(
                incarnation=host.incarnation,
                lease_counter=lease_id.counter,
                peer_address=host.address,
                prompt_len=request.prompt_len,
                prompt_hash=request.prompt_hash,
                num_blocks=lent.kv.num_blocks,
                params=lent.kv.params,
            )
            return engine_ticket.with_mac(host.ticket_secret)
        ticket = Ticket(
            incarnation=host.incarnation,
            lease_counter=lease_id.counter,
            peer_address=host.address,
            kv_spec=host.kv_spec,
            regions=host.regions,
            block_tables=lent.block_tables,
            prompt_len=request.prompt_len,
            prompt_hash=request.prompt_hash,
            checksums=lent.sums is not None,
        )
        return ticket.with_mac(host.ticket_secret)

    def _seal(self, sealed: Sealed) -> None:
        request = self._by_seq.get(sealed.seq_id)
        if request is not None and request.lease_id is not None:
            self._leases.seal(request.lease_id, sealed.first, sealed.sums)

    async def _rehash(self, seq_id: SeqId) -> int:
        """Return how many blocks of this sequence's lease differ from their checksums. Concurrent calls share one answer."""
        answer = self._rehashes.get(seq_id)
        if answer is None:
            self._host.submit(Rehash(seq_id))
            answer = self._rehashes[seq_id] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(answer)

    def _rehashed(self, rehashed: Rehashed) -> None:
        """Answer `_rehash`. End every lease over a rotted block, so that no other reader uses the KV that it read from one."""
        if rehashed.rotted:
            log.error(
                "KV has changed in this worker's memory: blocks %s", ", ".join(str(block) for _, block in rehashed.rotted)
            )
            self._rotted_blocks += len(rehashed.rotted)
            self._table.release_all_over(rehashed.rotted, now_s=self._clock())
        self._rehashes.pop(rehashed.seq_id).set_result(len(rehashed.rotted))

    def _advance(self, request: LentRequest, advance: Advance) -> None:
        computed = advance.computed
        if request.lease_id is not None and computed < request.prompt_len:
            self._keep(request, request.lease_id)
            self._leases.publish(self._table.advance(request.lease_id, computed, None, now_s=self._clock()))
            self.note(request, WorkKind.COMPUTED, tokens=computed)

    def _finish(self, request: LentRequest, token: OutputToken) -> link_pb2.StepRow | None:
        """Take the only token drawn here: return its row, and advance the lease for the last time.

        The row's finish reason goes to the reader too; it may come from a stop string. Return None if no lease was granted.
        """
        if request.lease_id is None:
            return None
        self._keep(request, request.lease_id)
        row = request.output.push(*token[1:])
        first = FirstToken(token.token_id, codec.finish_from_wire(row.finish_reason))
        self._leases.publish(self._table.advance(request.lease_id, request.prompt_len, first, now_s=self._clock()))
        self.note(request, WorkKind.FIRST_TOKEN)
        return row

    def _keep(self, request: LentRequest, lease_id: LeaseId) -> None:
        """Renew the lease of a direct request, which has no reader before its last advance."""
        if is_direct(request.handle):
            self._table.renew(lease_id, now_s=self._clock())

    def _return_leases(self) -> None:
        """Give the references of every ended lease back, exactly once, and forget its request.

        If a lease has ended during a prefill (expired, or released by its reader), the computation stops too.
        """
        for lease in self._leases.take_returned():
            request = self._by_seq.pop(lease.seq_id)
            self._by_handle.pop(request.handle, None)
            if is_direct(request.handle):  # a router hears of it from the reader
                self._host.send(failed(request.handle, LeaseGone(f"the lease has ended: {lease.state.value}")))
            self._host.submit(Abort(lease.seq_id))
            self._cancelled.pop(lease.lease_id, None)
            self._host.submit(ReturnLease(lease.seq_id, read=request.kv is None or lease.state is LeaseState.COMMITTED))
            self.note(request, WorkKind.LEASE_ENDED, how=lease.state)
