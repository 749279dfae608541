"""The two roles around a simulated engine. They exchange the events and effects of the router's core, without a wire format.

The order of messages and commands is that of `prefill_worker.role` and `decode_worker.role`: a lease is granted when the engine
has admitted the prompt, KV is activated once its commit was answered, and a lease ends before its references are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from pdserve.core.block_hash import PrefixDelta
from pdserve.core.ids import Handle, Incarnation, LeaseId, RequestId, SeqId, WorkerId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import FINISH_BY_NUMBER, FinishReason, PackedLogprobs
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.engine.schedule.collect import OutputToken
from pdserve.worker.host import CountedCommands
from pdserve.worker.messages import Abort, Activate, AddLent, Lent, Reserve, ReserveResult, ReturnLease, StepEvents
from pdserve.worker.prefix_log import PrefixCursor, PrefixLog
from router.core import events as ev
from sim.perf.clock import Clock
from sim.perf.costs import WorkerCosts
from sim.perf.engine import PerfEngine
from sim.perf.transfer import PerfLease, PerfNetwork, PerfPull

_NUMBER_OF = {reason: number for number, reason in FINISH_BY_NUMBER.items()}
_SEQ_ID = attrgetter("seq_id")
Tell = Callable[[ev.WorkerEvent], None]


@dataclass(frozen=True, slots=True)
class PerfWorkerShape:
    """The sizes and costs of one worker. `kv_tokens` None: the number of the cost model."""

    costs: WorkerCosts
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 1 << 17
    kv_tokens: int | None = None


class _NoLogprobs(NamedTuple):
    """The log-probabilities of a row that has none."""

    chosen: tuple[float, ...] = ()
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


_NO_LOGPROBS = _NoLogprobs()


@dataclass(frozen=True, slots=True)
class SimRow:
    """The row of one request in the rows of a step or of a stride."""

    handle: int
    index: int
    ids: tuple[int, ...]
    text: bytes
    finish_reason: int
    logprobs: PackedLogprobs
    prompt_logprobs: PackedLogprobs = _NO_LOGPROBS
    stop_string: int = 0
    speculation: DraftCounts = NO_COUNTS


@dataclass(slots=True, eq=False)
class Placed:
    """One command's work on a worker, from its arrival until it has ended there."""

    handle: Handle
    seq_id: SeqId
    work: ev.Work
    hits: int = 0
    """Tokens whose KV a decode worker had when it reserved."""
    lease: PerfLease | None = None
    pull: PerfPull | None = None


@dataclass(slots=True)
class PerfWorld:
    """The parts that all workers of a cluster share."""

    clock: Clock
    tell: Tell
    outputs: Mapping[RequestId, int]
    """The number of tokens of each request's output. Only the simulated models know it."""
    block_size: int
    hop_s: float
    """The time of one message."""
    leases: dict[LeaseId, PerfLease] = field(default_factory=dict)
    computed: dict[RequestId, int] = field(default_factory=dict)
    """The prompt tokens that were computed for each request, on whichever worker."""


class PerfWorker:
    """The part of a worker that both roles share."""

    role: Role
    engine: PerfEngine
    flips: int
    """The role flips since the start of the process."""
    _prefixes: PrefixLog

    def __init__(
        self,
        world: PerfWorld,
        link: ev.LinkId,
        worker_id: str,
        shape: PerfWorkerShape,
        prefix_salt: bytes | None,
        earlier: PerfWorker | None = None,
    ) -> None:
        """Make a worker. With `earlier`, which is idle and has left, it is the next life of the same process: it goes on with
        the engine of `earlier` and the engine's cached KV."""
        self.link = link
        self.worker_id = WorkerId(worker_id)
        self.shape = shape
        self.network = PerfNetwork()
        self.engine = _engine(world, shape, prefix_salt) if earlier is None else earlier.engine
        self.engine.publish = self.on_step
        self.draining = False
        self.flips = 0 if earlier is None else earlier.flips + 1
        self._world = world
        self._began_s = world.clock.now_s
        self._before = self.engine.counts()
        self._prefixes = PrefixLog() if earlier is None else earlier._prefixes
        self._cursor = PrefixCursor(self._prefixes)
        self._counted = CountedCommands()
        self._by_handle: dict[Handle, Placed] = {}
        self._by_seq: dict[SeqId, Placed] = {}
        self._requests: dict[SeqId, RequestId] = {} if earlier is None else earlier._requests

    @property
    def idle(self) -> bool:
        """True when no work runs here and no block is held."""
        counts = self.engine.pool.counts()
        return not self._by_seq and self.engine.idle and not counts.held and not counts.quarantined

    def hello(self) -> WorkerHello:
        """Return what the worker introduces itself with."""
        shape = self.shape
        return WorkerHello(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=Incarnation(self.link),
            address=self.worker_id,
            model_fingerprint=shape.costs.family,
            block_size=self._world.block_size,
            num_blocks=self.engine.pool.num_blocks,
            max_model_len=shape.max_model_len,
            max_num_seqs=shape.max_num_seqs,
            dtype="bfloat16",
            kv_bytes_per_token=shape.costs.kv_bytes_per_token,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            flips=self.flips,
            numerics="simulated",
        )

    def load(self) -> WorkerLoad:
        """Return the content of the next heartbeat: the counts after the last step."""
        snapshot, counts, before = self.engine.snapshot, self.engine.counts(), self._before
        return replace(
            snapshot.load,
            last_handle=self._counted.last_handle(snapshot.last_seq_id),
            draining=self.draining,
            computed_prompt_tokens=counts.prompt_tokens - before.prompt_tokens,
            output_tokens=counts.output_tokens - before.output_tokens,
            prompt_busy_s=counts.prompt_busy_s - before.prompt_busy_s,
            prompt_steps=counts.prompt_steps - before.prompt_steps,
            decode_busy_s=counts.decode_busy_s - before.decode_busy_s,
            decode_steps=counts.decode_steps - before.decode_steps,
            uptime_s=self._world.clock.now_s - self._began_s,
        )

    def prefix_delta(self) -> PrefixDelta | None:
        """Return the changes of the pool's keys since the last heartbeat. None: no key has changed."""
        return self._cursor.next(now_s=self._world.clock.now_s)

    def on_step(self, events: StepEvents) -> None:
        """Handle the events of a step."""
        if events.snapshot is not None and events.snapshot.keys is not None:
            self._prefixes.note(events.snapshot.keys)
        for seq_id, tokens in self.engine.computed.items():
            request_id = self._requests[seq_id]
            self._world.computed[request_id] = self._world.computed.get(request_id, 0) + tokens
        self.engine.computed.clear()

    def on_command(self, command: ev.Command) -> None:
        """Handle a command of the router."""
        if isinstance(command, ev.SendPrefixResync):
            self._cursor.ask_full()
        elif isinstance(command, ev.SendDrain):
            self.draining = True

    def _place(self, work: ev.Work) -> Placed:
        placed = Placed(work.handle, SeqId(len(self._requests) + 1), work)
        self._requests[placed.seq_id] = work.request_id
        self._by_handle[work.handle] = self._by_seq[placed.seq_id] = placed
        self._counted.give(placed.seq_id, work.handle)
        return placed

    def _forget(self, placed: Placed) -> None:
        self._by_handle.pop(placed.handle, None)
        self._by_seq.pop(placed.seq_id, None)

    def _left(self, work: ev.Work) -> int:
        """Return how many tokens of the output are still to be drawn."""
        return self._world.outputs[work.request_id] - len(work.resumed)

    def _send(self, event: ev.WorkerEvent) -> None:
        self._world.tell(event)

    def _rows(self, tokens: tuple[OutputToken, ...]) -> tuple[list[SimRow], list[Placed]]:
        """Return a row for each request, and the requests that have ended with theirs."""
        rows: list[SimRow] = []
        ended: list[Placed] = []
        for seq_id, run in groupby(tokens, key=_SEQ_ID):
            placed = self._by_seq.get(seq_id)
            if placed is not None:
                drawn = list(run)
                reason: FinishReason | None = drawn[-1].finish_reason
                ids = tuple([token.token_id for token in drawn])
                row = SimRow(placed.handle, drawn[0].output_index, ids, b"", _NUMBER_OF[reason], _NO_LOGPROBS)
                told = drawn[-1].speculation
                rows.append(row if told is None else replace(row, speculation=told))
                if reason is not None:
                    ended.append(placed)
        return rows, ended


def _engine(world: PerfWorld, shape: PerfWorkerShape, prefix_salt: bytes | None) -> PerfEngine:
    return PerfEngine(
        world.clock,
        shape.costs,
        lambda events: None,
        num_blocks=(shape.costs.kv_tokens if shape.kv_tokens is None else shape.kv_tokens) // world.block_size,
        block_size=world.block_size,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        prefix_salt=prefix_salt,
    )


class SimPrefillWorker(PerfWorker):
    """A prefill worker: it computes prompts and lends their KV."""

    role = Role.PREFILL

    def on_command(self, command: ev.Command) -> None:
        """Handle a command of the router."""
        match command:
            case ev.SendPrefill(work=work):
                placed = self._place(work)
                self.engine.left[placed.seq_id] = self._left(work)
                self.engine.submit(AddLent(placed.seq_id, work.spec, work.resumed))
            case ev.SendCancel(handle=handle):
                self._cancel(handle)
            case _:
                super().on_command(command)

    def on_step(self, events: StepEvents) -> None:
        """Grant leases, advance watermarks, and send token 0."""
        super().on_step(events)
        for lent in events.lent:
            self._grant(lent)
        for seq_id, computed in events.advanced:
            self._advance(seq_id, computed)
        for token in events.tokens:
            placed = self._by_seq.get(token.seq_id)
            if placed is not None and placed.lease is not None:
                placed.lease.advance(placed.lease.prompt_tokens, token.token_id)
        rows, _ = self._rows(events.tokens)
        if rows:
            self._send(ev.StepRows(self.link, rows))

    def load(self) -> WorkerLoad:
        """Return the content of the next heartbeat."""
        return replace(super().load(), leases_held=sum(placed.lease is not None for placed in self._by_seq.values()))

    def _grant(self, lent: Lent) -> None:
        placed = self._by_seq.get(lent.seq_id)
        if placed is None:
            self.engine.submit(ReturnLease(lent.seq_id))
            return
        lease_id = LeaseId(Incarnation(self.link), lent.seq_id)
        tokens = len(placed.work.spec.prompt_ids) + len(placed.work.resumed)
        placed.lease = self._world.leases[lease_id] = PerfLease(placed.seq_id, tokens, self.network, self._ended)
        self._send(ev.PrefillStarted(self.link, placed.handle, lease_id, b"", lent.hits * self._world.block_size))

    def _advance(self, seq_id: SeqId, computed: int) -> None:
        placed = self._by_seq.get(seq_id)
        if placed is not None and placed.lease is not None and computed < placed.lease.prompt_tokens:
            placed.lease.advance(computed)

    def _cancel(self, handle: Handle) -> None:
        placed = self._by_handle.get(handle)
        if placed is None:
            return
        if placed.lease is not None:
            self._ended(placed.seq_id)
        else:  # blocks of a prompt that is admitted in the meantime are returned by `_grant`
            self._forget(placed)
            self.engine.submit(Abort(placed.seq_id))

    def _ended(self, seq_id: SeqId) -> None:
        """Return the references of a lease that has ended, once."""
        placed = self._by_seq.get(seq_id)
        if placed is not None:
            self._forget(placed)
            self._world.leases.pop(LeaseId(Incarnation(self.link), seq_id), None)
            self.engine.submit(Abort(seq_id))
            self.engine.submit(ReturnLease(seq_id))


class SimDecodeWorker(PerfWorker):
    """A decode worker: it reserves, reads KV and decodes, or computes prompts itself."""

    role = Role.DECODE

    def on_command(self, command: ev.Command) -> None:
        """Handle a command of the router."""
        match command:
            case ev.SendBind(work=work, local_prefill=local):
                placed = self._place(work)
                self.engine.left[placed.seq_id] = self._left(work)
                self.engine.submit(Reserve(placed.seq_id, work.spec, local, work.resumed))
            case ev.SendAttach(handle=handle, lease_id=lease_id):
                self._attach(handle, lease_id)
            case ev.SendCancel(handle=handle):
                self._cancel(handle)
            case _:
                super().on_command(command)

    def on_step(self, events: StepEvents) -> None:
        """Answer reservations, and send the rows of all tokens."""
        super().on_step(events)
        for result in events.reserved:
            self._reserved(result)
        rows, ended = self._rows(events.tokens)
        for placed in ended:
            self._forget(placed)
        if rows:
            self._send(ev.StepRows(self.link, rows))

    def _reserved(self, result: ReserveResult) -> None:
        placed = self._by_seq.get(result.seq_id)
        if placed is None:
            return
        if result.block_tables is None:
            self._forget(placed)
            needed = ceil_div(len(placed.work.spec.prompt_ids) + len(placed.work.resumed), self._world.block_size) + 1
            self._send(ev.NoRoom(self.link, placed.handle, needed))
            return
        placed.hits = result.hits * self._world.block_size
        self._send(ev.Reserved(self.link, placed.handle, placed.hits))

    def _attach(self, handle: Handle, lease_id: LeaseId) -> None:
        placed, lease = self._by_handle.get(handle), self._world.leases.get(lease_id)
        if placed is None or lease is None:
            return  # the request was cancelled in the meantime
        costs = self.shape.costs
        placed.pull = PerfPull(
            self._world.clock,
            lease,
            self.network,
            self._world.block_size,
            costs.transfer_s(1),
            self._world.hop_s,
            lambda: self._activate(placed, lease),
            first=placed.hits,
        )
        placed.pull.start()

    def _activate(self, placed: Placed, lease: PerfLease) -> None:
        assert placed.pull is not None
        assert lease.first_token is not None
        tokens, took_s = lease.prompt_tokens - placed.hits, placed.pull.busy_s
        exposed_s = max(0.0, self._world.clock.now_s - placed.pull.first_token_s)
        left = self._left(placed.work) - 1
        if left == 0:
            self._forget(placed)
            self.engine.submit(Abort(placed.seq_id))
            return
        self.engine.left[placed.seq_id] = left
        self.engine.submit(Activate(placed.seq_id, lease.first_token))
        kv_bytes = tokens * self.shape.costs.kv_bytes_per_token
        self._send(ev.KvCommitted(self.link, placed.handle, kv_bytes, took_s, 2 * self._world.hop_s, exposed_s))

    def _cancel(self, handle: Handle) -> None:
        placed = self._by_handle.get(handle)
        if placed is not None:
            if placed.pull is not None:
                placed.pull.cancelled = True
            self._forget(placed)
            self.engine.submit(Abort(placed.seq_id))
