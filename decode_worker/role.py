"""The decode role: it handles the router's commands and the engine's events. It runs on the loop thread only.

```
Bind(local_prefill) -> reserve whole -> Reserved -> prefill and decode here                           (colocated)
Bind -> reserve whole -> Reserved -> Attach(lease, ticket) -> follow the lease, pull, commit: OK
     -> the engine takes the blocks as the sequence's -> KvCommitted -> tokens 1, 2, ...
     -> any failure, also checksums that differ: RequestFailed; blocks freed, or quarantined until our read has stopped
```
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from decode_worker.inbound import InboundBlocks, speaks_against_pair
from kvtransfer.lease_client import LeaseClient, PeerLink
from kvtransfer.pull import PullResult
from pdserve.core.block_hash import prompt_hash
from pdserve.core.block_pools import count_blocks
from pdserve.core.errors import InternalBug, PdserveError
from pdserve.core.ids import Handle, ReaderId, SeqId
from pdserve.core.kv_layout import Shortage
from pdserve.core.request_spec import RequestSpec
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.engine.schedule.collect import OutputToken
from pdserve.observe.story import Value
from pdserve.rpc import codec
from pdserve.rpc.v1 import decode_pb2, link_pb2
from pdserve.structured.compilations import Compilations
from pdserve.worker.host import (
    Host,
    KvDamage,
    OutputStream,
    WorkKind,
    broken_grammar,
    fail_foreign,
    fail_unstarted,
    failed,
    no_numbers,
    read_request,
    refuse,
)
from pdserve.worker.messages import Abort, Activate, EndQuarantine, Reserve, ReserveResult, StepEvents

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BoundRequest:
    """One Bind command, from its arrival until its last token, failure or cancellation. `deadline_s` are the seconds that the
    request had left at its arrival."""

    handle: Handle
    request_id: str
    """The router names the request so, and logs repeat it. Nothing is decided by it."""
    seq_id: SeqId
    reader_id: ReaderId
    prompt_hash: bytes
    prompt_len: int
    deadline_s: float
    local_prefill: bool
    output: OutputStream
    inbound: InboundBlocks | None = None
    task: asyncio.Task[None] | None = None


class DecodeRole:
    """The role of one decode worker: its requests, their pulls, and its links to the lenders."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._by_handle: dict[Handle, BoundRequest] = {}
        self._by_seq: dict[SeqId, BoundRequest] = {}
        self._clean_ups: set[asyncio.Task[None]] = set()
        self._binds = 0
        self._compilations = Compilations(host.start_grammar, functools.partial(fail_unstarted, host))
        self._leases = LeaseClient(
            host.transfer,
            host.config.lease,
            cluster_token=host.config.cluster_token,
            make_link=functools.partial(
                PeerLink,
                transport=host.config.transfer.transport,
                model_digest=host.model_digest,
                open_channel=host.open_channel,
            ),
        )

    @property
    def leases_held(self) -> int:
        """Always 0: a decode worker lends nothing."""
        return 0

    @property
    def damage(self) -> KvDamage:
        """Always none: a decode worker lends nothing."""
        return KvDamage()

    @property
    def idle(self) -> bool:
        """True when no request and no clean-up is left."""
        return not self._by_handle and not self._clean_ups and self._compilations.idle

    def on_command(self, message: link_pb2.RouterMessage) -> None:
        """Handle Bind, Attach or Cancel. A command of the other role fails its request, which is served elsewhere."""
        body = message.WhichOneof("body")
        if body == "bind":
            self._bind(message.bind)
        elif body == "attach":
            self._attach(message.attach)
        elif body == "cancel":
            self._cancel(Handle(message.cancel.handle))
        else:
            fail_foreign(self._host, message, "decode")

    def on_step(self, events: StepEvents) -> None:
        """Answer reservations, send the rows of all tokens in one message, and report failed sequences."""
        for result in events.reserved:
            request = self._by_seq.get(result.seq_id)
            if request is None:
                continue  # cancelled meanwhile; the engine frees the blocks with the Abort that follows
            try:
                self._reserved(request, result)
            except Exception as exc:  # noqa: BLE001 - the other requests of the step must get theirs
                self._break(request, exc)
        rows = []
        for token in events.tokens:
            request = self._by_seq.get(token.seq_id)
            if request is None:
                continue  # the request ended while the step ran
            try:
                rows.append(self._token(request, token))
            except Exception as exc:  # noqa: BLE001 - as above
                self._break(request, exc)
        if rows:
            self._host.send(link_pb2.WorkerMessage(step_batch=link_pb2.StepBatch(rows=rows)))
        for seq_id in events.preempted:
            if (request := self._by_seq.get(seq_id)) is not None:
                self._note(request, WorkKind.PREEMPTED)
        for seq_id in events.failed:
            if (request := self._by_seq.get(seq_id)) is not None:
                self._fail(request, no_numbers(self._host))
        for seq_id, reason in events.grammars_failed:
            if (request := self._by_seq.get(seq_id)) is not None:
                self._fail(request, broken_grammar(reason))

    def on_tick(self) -> None:
        """Do nothing: a decode worker has no lease that could expire."""

    def on_link_lost(self) -> None:
        """Cancel all requests, because the router has dropped them."""
        self._compilations.cancel_all()
        for handle in list(self._by_handle):
            self._cancel(handle)

    async def close(self) -> None:
        """Cancel all requests, wait until their reads have stopped, and close the links to the lenders."""
        self.on_link_lost()
        self._compilations.close()
        await asyncio.gather(*self._clean_ups, return_exceptions=True)
        await self._leases.close()

    def _bind(self, command: decode_pb2.Bind) -> None:
        handle = Handle(command.handle)
        try:
            spec, resumed = read_request(command, self._host)
            if spec.constraint is None or self._host.draining:
                self._begin(command, spec, resumed, None)
            else:
                then = functools.partial(self._begin, command, spec, resumed)
                self._compilations.begin(handle, command.request_id, spec.constraint, then)
        except PdserveError as exc:
            fail_unstarted(self._host, handle, command.request_id, exc)

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
            handle,
            command.request_id,
            seq_id,
            ReaderId(self._host.incarnation, self._binds),
            prompt_hash(command.spec.prompt_ids + command.resumed_ids, spec.cache_salt),
            prompt_len,
            command.deadline_s,
            command.local_prefill,
            OutputStream(handle, tokenizer, spec.prompt_ids, spec.sampling, resumed, eos_token_ids=ends),
        )

    def _reserved(self, request: BoundRequest, result: ReserveResult) -> None:
        if result.block_tables is None:
            self._forget(request)
            self._no_room(request.handle, request.request_id, request.prompt_len, result.shortage)
            return
        self._note(request, WorkKind.RESERVED, blocks=count_blocks(result.block_tables), cached_blocks=result.hits)
        if not request.local_prefill:
            blocks = self._host.kv_spec.blocks_for(request.prompt_len)
            tables = tuple(table[:blocks] for table in result.block_tables)
            request.inbound = InboundBlocks(
                self._host,
                self._leases,
                request.reader_id,
                tables,
                prompt_hash=request.prompt_hash,
                first_block=result.hits,
                wait_s=request.deadline_s,
            )
        cached = result.hits * self._host.kv_spec.block_size if request.local_prefill else None
        self._host.send(link_pb2.WorkerMessage(reserved=decode_pb2.Reserved(handle=request.handle, cached_tokens=cached)))

    def _note(self, request: BoundRequest, kind: WorkKind, **fields: Value) -> None:
        self._host.stories.note(request.request_id, kind, **fields)

    def _no_room(self, handle: Handle, request_id: str, prompt_len: int, shortage: Shortage | None = None) -> None:
        """Send NoRoom, also while draining to a router without `Refused`: it then asks another worker, and counts no loss."""
        needed = sum(group.blocks_for(prompt_len) + 1 - group.first_live(prompt_len) for group in self._host.kv_spec.groups)
        lacking: dict[str, Value] = {} if shortage is None else {"shortage": str(shortage)}
        counts = {"blocks_needed": needed, "requests": len(self._by_handle), "draining": int(self._host.draining)}
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
        self._note(request, WorkKind.ATTACHED, lease=codec.lease_id_from_wire(command.lease_id))
        request.task = asyncio.create_task(self._hand_off(request, request.inbound, command))

    async def _hand_off(self, request: BoundRequest, inbound: InboundBlocks, command: decode_pb2.Attach) -> None:
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
        request.task = request.inbound = None
        self._note(
            request,
            WorkKind.PULLED,
            blocks=pulled.blocks,
            reads=pulled.reads,
            bytes=pulled.kv_bytes,
            transfer_ms=_ms(pulled.transfer_s),
        )
        self._note(request, WorkKind.COMMITTED, commit_ms=_ms(pulled.commit_s), exposed_ms=_ms(pulled.exposed_s))
        if pulled.first_token.finish_reason is not None:
            self._forget(request)  # token 0 ended the request, which the router has seen as well
            self._host.submit(Abort(request.seq_id))
            return
        request.output.skip(pulled.first_token.token_id)  # its row came from prefill; the text state goes on
        self._host.submit(Activate(request.seq_id, pulled.first_token.token_id))
        committed = decode_pb2.KvCommitted(
            handle=request.handle,
            kv_bytes=pulled.kv_bytes,
            transfer_s=pulled.transfer_s,
            commit_s=pulled.commit_s,
            exposed_transfer_s=pulled.exposed_s,
        )
        self._host.send(link_pb2.WorkerMessage(kv_committed=committed))

    def _token(self, request: BoundRequest, token: OutputToken) -> link_pb2.StepRow:
        row = request.output.push(*token[1:])
        if row.finish_reason:
            self._forget(request)
            self._note(request, WorkKind.FINISHED, tokens=token.output_index + 1)
            if token.finish_reason is None:  # a stop string, which the engine does not know of
                self._host.submit(Abort(request.seq_id))
        return row

    def _cancel(self, handle: Handle) -> None:
        request = self._by_handle.get(handle)
        if request is None:
            self._compilations.cancel(handle)
        else:
            self._note(request, WorkKind.CANCELLED)
            self._drop(request, release=False)

    def _fail(self, request: BoundRequest, error: PdserveError, *, pair_failed: bool = False) -> None:
        log.info("request %s failed here: %s", request.request_id, error.message)
        if self._by_handle.get(request.handle) is request:
            self._drop(request, release=True)
            self._note(request, WorkKind.FAILED, error=error.code, message=error.message)
            self._host.send(failed(request.handle, error, pair_failed=pair_failed))

    def _break(self, request: BoundRequest, exc: Exception) -> None:
        """Fail only this request, because our own code failed at it. Call this while the exception is handled."""
        log.exception("request %s", request.request_id)
        self._fail(request, InternalBug(f"decode worker: {exc!r}"))

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

    async def _end_inbound(self, request: BoundRequest, inbound: InboundBlocks, in_flight: bool, release: bool) -> None:
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
