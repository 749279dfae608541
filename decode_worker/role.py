"""The decode role: it handles the router's commands and the engine's events. It runs on the loop thread only.

```
Bind(local_prefill) -> reserve whole -> Reserved -> prefill and decode here                           (colocated)
Bind -> reserve whole -> Reserved -> Attach(lease, ticket) -> follow the lease, pull, commit: OK
     -> the engine takes the blocks as the sequence's -> KvCommitted -> tokens 1, 2, ...
     -> any failure, also checksums that differ: RequestFailed; blocks freed, or quarantined until our read has stopped
```

`InboundBlocks` are the blocks of one bind, into which a peer's KV is pulled: from Reserved until a sequence owns them or they
are discarded. Where the engine is foreign, `InboundEngineKv` takes the engines' own ticket instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from decode_worker.engine_kv import InboundEngineKv
from kvtransfer.lease_client import FollowedLease, LeaseClient
from kvtransfer.pull import PrefillStalled, Pull, PullResult
from kvtransfer.thread import BlockSource, PoolSource
from kvtransfer.ticket import Ticket
from pdserve.core.block_pools import BlockTables, count_blocks
from pdserve.core.errors import IncompatiblePeer, InternalBug, KvCorrupt, PdserveError, ReplicaLost, TransferFailed
from pdserve.core.ids import Handle, LeaseId, ReaderId
from pdserve.core.kv_layout import Shortage
from pdserve.core.lease import FirstToken
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.engine.schedule.collect import OutputToken
from pdserve.observe.story import Value
from pdserve.rpc import codec
from pdserve.rpc.v1 import decode_pb2, link_pb2
from pdserve.worker.host import (
    Host,
    HostedRole,
    OutputStream,
    RoleRequest,
    WorkKind,
    fail_foreign,
    failed,
    is_direct,
    named,
    refuse,
)
from pdserve.worker.messages import Abort, Activate, DiscardKv, EndQuarantine, Reserve, ReserveResult, StepEvents

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class BoundRequest(RoleRequest):
    """One Bind command, from its arrival until its last token, failure or cancellation. `deadline_s` are the seconds that the
    request had left at its arrival."""

    reader_id: ReaderId
    deadline_s: float
    local_prefill: bool
    constrained: bool
    prompt_ids: tuple[int, ...]
    """The prompt, and the output of earlier attempts."""
    inbound: InboundBlocks | InboundEngineKv | None = None
    task: asyncio.Task[None] | None = None


class DecodeRole(HostedRole[BoundRequest]):
    """The role of one decode worker: its requests, their pulls, and its links to the lenders."""

    name = "decode"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._clean_ups: set[asyncio.Task[None]] = set()
        self._binds = 0
        self._leases = LeaseClient(
            host.transfer,
            host.config.lease,
            cluster_token=host.config.cluster_token,
            transport=host.transport,
            model_digest=host.model_digest,
            open_channel=host.open_channel,
        )

    @property
    def idle(self) -> bool:
        """True when no request and no clean-up is left."""
        return not self._by_handle and not self._clean_ups and self._compilations.idle

    def on_command(self, message: link_pb2.RouterMessage) -> None:
        """Handle Bind, Attach or Cancel. A command of the other role fails its request, which is served elsewhere."""
        body = message.WhichOneof("body")
        if body == "bind":
            self._take(message.bind)
        elif body == "attach":
            self._attach(message.attach)
        elif body == "cancel":
            self._cancel(Handle(message.cancel.handle))
        else:
            fail_foreign(self._host, message, self.name)

    def on_step(self, events: StepEvents) -> None:
        """Answer reservations, send the rows of all tokens in one message, and report failed sequences."""
        if events.reserved:  # the Abort that follows frees the blocks of a request that was cancelled meanwhile
            self._each(events.reserved, self._reserved)
        rows = self._each(events.tokens, self._token)
        if rows:
            self._host.send(link_pb2.WorkerMessage(step_batch=link_pb2.StepBatch(rows=rows)))
        if events.preempted or events.failed or events.grammars_failed or events.given_up:
            self._take_losses(events)

    async def close(self) -> None:
        """Cancel all requests, wait until their reads have stopped, and close the links to the lenders."""
        await super().close()
        await asyncio.gather(*self._clean_ups, return_exceptions=True)
        await self._leases.close()

    def _begin(
        self, command: decode_pb2.Bind, spec: RequestSpec, resumed: tuple[int, ...], grammar: GrammarState | None
    ) -> None:
        """Ask the engine for the room of a request. Raises `Overloaded`. A worker that began to drain while the grammar was
        compiled begins nothing new."""
        handle, prompt_len = Handle(command.handle), len(spec.prompt_ids) + len(resumed)
        if refuse(self._host, handle, command.request_id):
            return
        if self._host.draining:
            self._no_room(handle, command.request_id, prompt_len)
            return
        seq_id = self._host.next_seq_id(handle)
        self._host.submit(Reserve(seq_id, spec, command.local_prefill, resumed, grammar))
        local = int(command.local_prefill)
        ends, tokenizer = self._host.card.eos_token_ids, self._host.tokenizer
        self._host.stories.note(command.request_id, WorkKind.RECEIVED, tokens=prompt_len, local_prefill=local)
        self._binds += 1
        self._by_handle[handle] = self._by_seq[seq_id] = BoundRequest(
            handle=handle,
            request_id=command.request_id,
            seq_id=seq_id,
            reader_id=ReaderId(self._host.incarnation, self._binds),
            prompt_hash=named(command, spec),
            prompt_len=prompt_len,
            deadline_s=command.deadline_s,
            local_prefill=command.local_prefill,
            constrained=spec.constraint is not None,
            prompt_ids=(*spec.prompt_ids, *resumed),
            output=OutputStream(handle, tokenizer, spec.prompt_ids, spec.sampling, resumed, eos_token_ids=ends),
        )

    def _reserved(self, request: BoundRequest, result: ReserveResult) -> None:
        if result.block_tables is None:
            self._no_room(request.handle, request.request_id, request.prompt_len, result.shortage)
            self._forget(request)  # last: if our own code fails before, the request is still there to be failed
            return
        self.note(request, WorkKind.RESERVED, blocks=count_blocks(result.block_tables), cached_blocks=result.hits)
        if not request.local_prefill:
            request.inbound = self._inbound(request, result.block_tables, result.hits)
        cached = result.hits * self._host.kv_spec.block_size if request.local_prefill else None
        self._host.send(link_pb2.WorkerMessage(reserved=decode_pb2.Reserved(handle=request.handle, cached_tokens=cached)))

    def _inbound(self, request: BoundRequest, tables: BlockTables, hits: int) -> InboundBlocks | InboundEngineKv:
        """Return what takes the KV of a bind: our blocks, or a foreign engine, which has blocks of its own."""
        blocks = self._host.kv_spec.blocks_for(request.prompt_len)
        if self._host.traits.engine:
            return InboundEngineKv(
                self._host,
                self._leases,
                request.reader_id,
                prompt_ids=request.prompt_ids,
                prompt_hash=request.prompt_hash,
                blocks=blocks,
                wait_s=request.deadline_s,
            )
        return InboundBlocks(
            self._host,
            self._leases,
            request.reader_id,
            tuple(table[:blocks] for table in tables),
            prompt_hash=request.prompt_hash,
            first_block=hits,
            wait_s=request.deadline_s,
        )

    def _no_room(self, handle: Handle, request_id: str, prompt_len: int, shortage: Shortage | None = None) -> None:
        """Send NoRoom, also while draining to a router without `Refused`: it then asks another worker, and counts no loss."""
        needed = sum(group.blocks_for(prompt_len) + 1 - group.first_live(prompt_len) for group in self._host.kv_spec.groups)
        lacking: dict[str, Value] = {} if shortage is None else {"shortage": str(shortage)}
        others = len(self._by_handle.keys() - {handle})
        counts = {"blocks_needed": needed, "requests": others, "draining": int(self._host.draining)}
        self._host.stories.note(request_id, WorkKind.NO_ROOM, **counts, **lacking)
        said = decode_pb2.NoRoom(handle=handle, blocks_needed=needed, shortage=codec.shortage_to_wire(shortage))
        self._host.send(link_pb2.WorkerMessage(no_room=said))

    def _attach(self, command: decode_pb2.Attach) -> None:
        request = self._by_handle.get(Handle(command.handle))
        if request is None:
            return  # cancelled or failed meanwhile
        if request.inbound is None or request.task is not None:
            self._fail(request, InternalBug("Attach before Reserved, or twice, or for a colocated request"))
            return
        self.note(request, WorkKind.ATTACHED, lease=codec.lease_id_from_wire(command.lease_id))
        request.task = asyncio.create_task(self._hand_off(request, request.inbound, command))

    async def _hand_off(
        self, request: BoundRequest, inbound: InboundBlocks | InboundEngineKv, command: decode_pb2.Attach
    ) -> None:
        try:
            pulled = await inbound.pull(codec.lease_id_from_wire(command.lease_id), command.ticket)
        except PdserveError as exc:
            self._fail(request, exc, pair_failed=speaks_against_pair(exc))
        except Exception as exc:
            log.exception("handoff of request %s", request.request_id)
            self._fail(request, InternalBug(f"handoff: {exc!r}"))
        else:
            self._activate(request, pulled)

    def _activate(self, request: BoundRequest, pulled: PullResult) -> None:
        """Let the engine decode from token 0 on, because the commit was answered OK: its sequence now owns the blocks."""
        kv = request.inbound.take_kv() if isinstance(request.inbound, InboundEngineKv) else None
        request.task = request.inbound = None
        self.note(
            request,
            WorkKind.PULLED,
            blocks=pulled.blocks,
            reads=pulled.reads,
            bytes=pulled.kv_bytes,
            transfer_ms=_ms(pulled.transfer_s),
        )
        self.note(request, WorkKind.COMMITTED, commit_ms=_ms(pulled.commit_s), exposed_ms=_ms(pulled.exposed_s))
        if self._ends_at(request, pulled.first_token):
            self._forget(request)
            self._host.submit(Abort(request.seq_id))
            if kv is not None and kv.params:
                self._host.submit(DiscardKv(request.prompt_ids, kv))
            return
        self._host.submit(Activate(request.seq_id, pulled.first_token.token_id, kv))
        committed = decode_pb2.KvCommitted(
            handle=request.handle,
            kv_bytes=pulled.kv_bytes,
            transfer_s=pulled.transfer_s,
            commit_s=pulled.commit_s,
            exposed_transfer_s=pulled.exposed_s,
        )
        self._host.send(link_pb2.WorkerMessage(kv_committed=committed))

    def _ends_at(self, request: BoundRequest, first: FirstToken) -> bool:
        """Add token 0 to the output, and tell whether it ends the request. The router has its row from prefill. To nobody else
        has it been told, so a direct request gets its row here."""
        if not is_direct(request.handle):
            if first.finish_reason is None:
                request.output.skip(first.token_id)  # the text state goes on
            return first.finish_reason is not None
        ended = request.constrained and first.finish_reason is FinishReason.STOP
        row = request.output.push_first(first.token_id, ended=ended, room=self._host.max_model_len - request.prompt_len)
        self._host.send(link_pb2.WorkerMessage(step_batch=link_pb2.StepBatch(rows=[row])))
        return bool(row.finish_reason)

    def _token(self, request: BoundRequest, token: OutputToken) -> link_pb2.StepRow:
        row = request.output.push(*token[1:])
        if row.finish_reason:
            self.note(request, WorkKind.FINISHED, tokens=token.output_index + 1)
            if token.finish_reason is None:  # a stop string, which the engine does not know of
                self._host.submit(Abort(request.seq_id))
            self._forget(request)  # last, as above
        return row

    def _cancel(self, handle: Handle) -> None:
        request = self._by_handle.get(handle)
        if request is None:
            self._compilations.cancel(handle)
        else:
            self.note(request, WorkKind.CANCELLED)
            self._drop(request, release=False)

    def _fail(self, request: BoundRequest, error: PdserveError, *, pair_failed: bool = False) -> None:
        log.info("request %s failed here: %s", request.request_id, error.message)
        if self._by_handle.get(request.handle) is request:
            self._drop(request, release=True)
            self.note(request, WorkKind.FAILED, error=error.code, message=error.message)
            self._host.send(failed(request.handle, error, pair_failed=pair_failed))

    def _drop(self, request: BoundRequest, *, release: bool) -> None:
        """Release all that this request holds here. The engine frees its blocks before its next step.

        Blocks that a read may still write stay out of use until the transport says that the read has stopped.
        """
        self._forget(request)
        inbound = request.inbound
        in_flight = inbound is not None and inbound.read_in_flight
        self._host.submit(Abort(request.seq_id, read_in_flight=in_flight))
        if request.task is not None and request.task is not asyncio.current_task():
            request.task.cancel()
        if inbound is not None:
            self._spawn(self._end_inbound(request, inbound, in_flight, release))

    async def _end_inbound(
        self, request: BoundRequest, inbound: InboundBlocks | InboundEngineKv, in_flight: bool, release: bool
    ) -> None:
        if request.task is not None:
            await asyncio.wait([request.task])  # the handoff has failed or was cancelled; wait until it has ended
        await inbound.abandon(release=release)
        if in_flight:
            self._host.submit(EndQuarantine(request.seq_id))

    def _forget(self, request: BoundRequest) -> None:
        del self._by_handle[request.handle]
        del self._by_seq[request.seq_id]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._clean_ups.add(task)
        task.add_done_callback(self._clean_ups.discard)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def speaks_against_pair(error: PdserveError) -> bool:
    """Tell whether the error that ended a pull is evidence that KV does not pass between the two workers.

    Evidence is a read that failed or passed its own deadline, KV that changed on its way, or a lender that does not answer. No
    evidence is a lease that is gone, since the lender has answered; nor KV that changed in the lender's memory, a prompt that
    was not computed in time, or the deadline of the request itself.
    """
    return isinstance(error, TransferFailed | KvCorrupt | ReplicaLost) and not isinstance(error, PrefillStalled)


class InboundBlocks:
    """The reserved blocks of one bind, and the pull into them. Loop thread only. `abandon` must follow when `pull` has raised
    or was cancelled."""

    def __init__(
        self,
        host: Host,
        leases: LeaseClient,
        reader_id: ReaderId,
        block_tables: BlockTables,
        *,
        prompt_hash: bytes,
        first_block: int = 0,
        wait_s: float,
    ) -> None:
        """Take the blocks of one bind in each KV group. `prompt_hash` names the prompt that was bound. Blocks before
        `first_block` hold their KV already and are not read. `wait_s` bounds the whole wait for the prompt, so that renewals
        cannot hold a lease for ever.
        """
        self._host = host
        self._leases = leases
        self._reader_id = reader_id
        self._block_tables = block_tables
        self._prompt_hash = prompt_hash
        self._first_block = first_block
        self._wait_s = wait_s
        self._lease: FollowedLease | None = None
        self._pull: Pull | None = None

    @property
    def read_in_flight(self) -> bool:
        """True when the transport may still write into the blocks."""
        return self._pull is not None and self._pull.read_in_flight

    async def pull(self, lease_id: LeaseId, ticket_bytes: bytes) -> PullResult:
        """Follow the lease, read blocks as they become final, and commit. The KV may be used only after this has returned.

        Raises `LeaseGone`, `TransferFailed`, `KvCorrupt`, `KvRotted`, `ReplicaLost`, `DeadlineExceeded`, `IncompatiblePeer`.
        """
        ticket = Ticket.decode(ticket_bytes)
        ticket.check_request(lease_id, self._prompt_hash)
        ticket.check_layout(self._host.kv_spec)
        ticket.check_checksums(self._host.config.lease.kv_checksum)
        sources = [self._source_for(ticket, group) for group in range(len(ticket.block_tables))]
        needed = len(self._block_tables[0])
        if ticket.num_blocks != needed or count_blocks(ticket.block_tables) != count_blocks(self._block_tables):
            raise TransferFailed(f"the ticket is of {ticket.prompt_len} tokens, but the prompt has {needed} blocks")
        self._lease = await self._leases.attach(lease_id, ticket, deadline_s=self._wait_s)
        config = self._host.config.lease
        self._pull = Pull(
            self._lease,
            ticket,
            self._block_tables,
            self._reader_id,
            sources,
            config,
            first_block=self._first_block,
        )
        pulled = await self._pull.run(wait_s=self._wait_s)
        self._lease.close()
        log.info(
            "pulled lease %s: blocks=%d reads=%d kv_bytes=%d exposed_bytes=%d transfer_ms=%.1f commit_ms=%.1f exposed_ms=%.1f",
            lease_id,
            pulled.blocks,
            pulled.reads,
            pulled.kv_bytes,
            pulled.exposed_bytes,
            1e3 * pulled.transfer_s,
            1e3 * pulled.commit_s,
            1e3 * pulled.exposed_s,
        )
        return pulled

    def _source_for(self, ticket: Ticket, group: int) -> BlockSource:
        """Return a source that reads straight into our pool if both sides store this KV group alike, else one that converts.

        Raises `IncompatiblePeer` when this worker cannot convert.
        """
        theirs, ours = ticket.kv_spec.groups[group], self._host.kv_spec.groups[group]
        if theirs == ours:
            return PoolSource(self._host.transfer, self._host.regions[group])
        if self._host.staging is None:
            raise IncompatiblePeer(f"the peer's KV is {theirs.dtype}, ours {ours.dtype}; this worker cannot convert")
        return self._host.staging.source_for(ticket, group)

    async def abandon(self, *, release: bool) -> None:
        """Return once nothing writes into the blocks any more. `release` True also ends the lease, so that its blocks are freed
        early. It must be False for a bind that the router has cancelled, since another worker may read that lease by now."""
        if self._lease is not None:
            self._lease.close()
            if release:
                await self._lease.release()
        stopped = self._pull.stopped if self._pull is not None else None
        if stopped is not None:
            await stopped
