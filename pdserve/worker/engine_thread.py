"""The engine of a worker, from both sides of the border between the engine thread and the loop thread.

In the engine thread, `EngineThread` runs step after step, and no other thread touches scheduler, block pool, model and device.
`EngineSteps` is such a step without the model. It is pure, so a simulation runs it on virtual time. One step takes the
commands, plans, tells the loop which blocks were lent and reserved, computes, collects the tokens, publishes them, and sums
the final blocks. An idle engine blocks on its queue, so it costs no core.

The events pass to the loop through a `Mailbox`. There, `EngineView` is the engine as the loop sees it: its last snapshot, the
keys of its pool, and the watch over its steps. The engine outlives the lives of its worker, and so does this view: a role flip
ends the member, and the next one looks at the same view. Nothing in it belongs to a role, a link or an incarnation.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from itertools import chain
from typing import Any, Final, Generic, Protocol, TypeVar

from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import Holder, HolderKind, SumBlocks
from pdserve.core.errors import InternalBug, Overloaded
from pdserve.core.ids import NULL_BLOCK, NULL_SUM, BlockId, BlockSum, SeqId
from pdserve.core.roofline import StepCounts
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from pdserve.core.step_plan import NO_DRAFTS, Sampled, StepPlan
from pdserve.core.worker import WorkerLoad
from pdserve.engine.drafting.choice import DraftChoice
from pdserve.engine.schedule.collect import Final as FinalBlocks
from pdserve.engine.schedule.collect import StepOutcome
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from pdserve.worker.messages import (
    Abort,
    Activate,
    AddLent,
    Command,
    DiscardKv,
    EndQuarantine,
    EngineSnapshot,
    Lent,
    Rehash,
    Rehashed,
    Reserve,
    ReserveResult,
    ReturnLease,
    Sealed,
    SetBudget,
    SetLending,
    StepEvents,
)
from pdserve.worker.prefix_log import PrefixLog

CHECK_STEPS: Final = 512
"""The invariants of the pool are checked when the engine goes idle, at most once in so many steps, because the check walks over
all blocks."""


class EngineSteps:
    """The steps of one engine over its scheduler and pool."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPools,
        sum_blocks: Sequence[SumBlocks] | None = None,
        counts: StepCounts | None = None,
        choice: DraftChoice | None = None,
    ) -> None:
        """`sum_blocks` has a function for each KV group. None: no block is summed. The engine lends until `SetLending`.

        `counts` knows the operations and bytes of the model's steps. None: only tokens and seconds are counted. `choice` says
        which drafts steps verify. None: they verify none.
        """
        self._choice = choice
        self._drafted: DraftCounts | None = None
        if choice is not None:
            scheduler.ended, self._drafted = choice.forget, NO_COUNTS
        self._counts = counts or StepCounts()
        self._plan = StepPlan(())
        self._sum_if_lent = self._sum_blocks = sum_blocks
        self._final: tuple[FinalBlocks, ...] = ()
        self._scheduler = scheduler
        self._pool = pool
        self._unchecked = 0
        self._commands_taken = 0
        self._numerical_errors = 0
        self._last_seq_id = SeqId(0)
        self.has_work = False
        """True when the engine can go on without a further command. Only `begin` and `finish` change it."""

    def begin(self, commands: Collection[Command]) -> tuple[StepPlan, StepEvents | None]:
        """Apply the commands. Return the plan of the next step, and the events that the loop needs before that step, or None.

        The plan is empty when there is nothing to compute; `finish` must not follow then.
        """
        scheduler = self._scheduler
        self._commands_taken += len(commands)
        reserved, rehashed, lent = [], [], []
        for command in commands:
            match command:
                case AddLent(seq_id, spec, resumed, grammar):
                    self._last_seq_id = seq_id
                    scheduler.add(seq_id, spec, kind=SequenceKind.LENT, resumed=resumed, grammar=grammar)
                case Reserve(seq_id, spec, local, resumed, grammar):
                    self._last_seq_id = seq_id
                    room = scheduler.reserve(seq_id, spec, local_prefill=local, resumed=resumed, grammar=grammar)
                    if room is None:
                        reserved.append(ReserveResult(seq_id, None, shortage=scheduler.shortage))
                    else:
                        reserved.append(ReserveResult(seq_id, room.block_tables, room.hits))
                case Activate(seq_id, first_token, _):
                    scheduler.activate(seq_id, first_token)
                case Abort(seq_id, read_in_flight):
                    scheduler.abort(seq_id, read_in_flight=read_in_flight)
                case EndQuarantine(seq_id):
                    scheduler.end_quarantine(seq_id)
                case ReturnLease(seq_id, _):
                    scheduler.return_lease(seq_id)
                case DiscardKv():
                    raise InternalBug("only a foreign engine holds KV that must be discarded")
                case SetBudget(tokens, seqs):
                    if tokens:
                        scheduler.set_budget(tokens)
                    if seqs:
                        scheduler.set_max_num_seqs(seqs)
                case Rehash(seq_id):
                    rehashed.append(self._rehash(seq_id))
                case SetLending(lends):
                    self._set_lending(lends)
        plan = self._plan = scheduler.plan(self._choice.drafts(scheduler) if self._choice is not None else NO_DRAFTS)
        for seq_id, tables, hits in scheduler.take_admitted():
            lent.append(Lent(seq_id, tables, self._sums_of(seq_id, hits), hits))
        if plan.slices and not (lent or reserved or rehashed):
            return plan, None
        # Lent blocks go out before the computation, so that the reader's handshake does not wait for it.
        early = StepEvents(lent=tuple(lent), reserved=tuple(reserved), rehashed=tuple(rehashed))
        if not plan.slices:
            self._check()
            self.has_work = scheduler.has_work
            early = early._replace(snapshot=self._snapshot())
        return plan, early

    def finish(self, sampled: list[Sampled], step_s: float = 0.0) -> StepEvents:
        """Give the drawn tokens to the scheduler, and return the events of the step. `sampled` has a token for each sample of
        the plan, in order. `step_s` is the time since the step began, in seconds; 0: nobody measured it."""
        scheduler = self._scheduler
        scheduler.took(step_s)
        outcome = scheduler.collect(sampled)
        self._final = outcome.final
        self._unchecked += 1
        self._numerical_errors += len(outcome.failed)
        if self._choice is not None:
            self._learn(self._choice, outcome, step_s)
        self.has_work = goes_on = scheduler.has_work
        prompt_tokens, drawn = scheduler.step_tokens[0], len(outcome.tokens)
        self._counts.add(self._plan, prompt_tokens=prompt_tokens, output_tokens=drawn, step_s=step_s, idle=not goes_on)
        return StepEvents(
            advanced=outcome.advanced,
            tokens=outcome.tokens,
            preempted=outcome.preempted,
            failed=outcome.failed,
            grammars_failed=outcome.grammars_failed,
            snapshot=self._snapshot(),
        )

    def seal(self) -> StepEvents | None:
        """Sum the blocks that the last step has completed. Return None when no block is summed.

        Call it after the step's events went to the loop, so that nobody waits for a sum, and before the next `begin`, which
        may give a block that died behind the window to somebody else.
        """
        final, self._final = self._final, ()
        if self._sum_blocks is None or not any(done.block_tables[0] for done in final):
            return None
        tables = zip(*[done.block_tables for done in final], strict=True)
        sums = zip(*[self._summed(group, parts) for group, parts in enumerate(tables)], strict=True)
        return StepEvents(sealed=tuple([self._seal(done, of_done) for done, of_done in zip(final, sums, strict=True)]))

    def _learn(self, choice: DraftChoice, outcome: StepOutcome, step_s: float) -> None:
        choice.learn(outcome)
        if not self._scheduler.step_tokens[0]:
            choice.took(self._scheduler.step_tokens[1], step_s)
        if outcome.verified:
            own = [NO_COUNTS.add(one.drafted, one.accepted) for one in outcome.verified]
            self._drafted = reduce(DraftCounts.plus, own, self._drafted or NO_COUNTS)

    def _summed(self, group: int, parts: Sequence[tuple[BlockId, ...]]) -> list[tuple[BlockSum, ...]]:
        """Return the checksums of the blocks of each of `parts`, which are summed in one call. A null entry has `NULL_SUM`."""
        assert self._sum_blocks is not None
        sums = iter(self._sum_blocks[group]([block for block in chain.from_iterable(parts) if block != NULL_BLOCK]))
        return [tuple([NULL_SUM if block == NULL_BLOCK else next(sums) for block in part]) for part in parts]

    def _seal(self, done: FinalBlocks, sums: tuple[tuple[BlockSum, ...], ...]) -> Sealed:
        for block_ids, of_block in zip(zip(*done.block_tables, strict=True), zip(*sums, strict=True), strict=True):
            self._pool.seal(block_ids, of_block)
        return Sealed(done.seq_id, done.first, sums)

    def _sums_of(self, seq_id: SeqId, hits: int) -> tuple[tuple[BlockSum, ...], ...] | None:
        """Return the checksums of the lease's first `hits` blocks. None: nothing is summed."""
        if self._sum_blocks is None:
            return None
        sums = self._pool.sums_of(_lent(seq_id))
        return tuple([tuple([block_sum for block_sum in group[:hits] if block_sum is not None]) for group in sums])

    def _rehash(self, seq_id: SeqId) -> Rehashed:
        """Sum the lent blocks of a sequence again. Withdraw changed blocks and those that may have been computed from them."""
        assert self._sum_blocks is not None
        holder = _lent(seq_id)
        tables = self._pool.blocks_of(holder)
        if not tables[0]:
            return Rehashed(seq_id, ())
        rotted: list[tuple[int, tuple[int, BlockId]]] = []
        for group, (blocks, known) in enumerate(zip(tables, self._pool.sums_of(holder), strict=True)):
            now = zip(blocks, known, self._summed(group, (blocks,))[0], strict=True)
            rotted += [(i, (group, block)) for i, (block, was, is_now) in enumerate(now) if was is not None and was != is_now]
        if rotted:
            self._pool.withdraw(holder, min(position for position, _ in rotted))
        return Rehashed(seq_id, tuple([block for _, block in rotted]))

    def _set_lending(self, lends: bool) -> None:
        """Begin or stop to sum blocks. A lease inherits the checksums of cached blocks, so a lender has those of all.

        Raises `InternalBug` when a block is held or quarantined: it may still be written.
        """
        counts = self._pool.counts()
        if counts.held or counts.quarantined:
            raise InternalBug(f"the role cannot change: {counts.held} blocks are held, {counts.quarantined} quarantined")
        self._sum_blocks = self._sum_if_lent if lends else None
        if self._sum_blocks is not None:
            self._pool.seal_cached(self._sum_blocks)

    def _check(self) -> None:
        """Check the invariants if `CHECK_STEPS` steps have passed since the last check.

        Raises AssertionError when a block is lost or in two places: the worker must not go on then.
        """
        if self._unchecked >= CHECK_STEPS:
            self._unchecked = 0
            self._scheduler.check_invariants()

    def _snapshot(self) -> EngineSnapshot:
        scheduler, counts = self._scheduler, self._counts
        load = WorkerLoad(
            blocks=self._pool.counts(),
            queued_requests=scheduler.num_waiting,
            queued_tokens=scheduler.queued_tokens,
            running_sequences=scheduler.num_running,
            prefix_queried_tokens=scheduler.prefix.queried,
            prefix_hit_tokens=scheduler.prefix.hit,
            numerical_errors=self._numerical_errors,
            prompt_tokens_per_s=scheduler.rates.prompt_tokens_per_s,
            decode_step_s=scheduler.rates.decode_step_s,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            computed_prompt_tokens=counts.computed_prompt_tokens,
            output_tokens=counts.output_tokens,
            prompt_busy_s=counts.prompt_busy_s,
            prompt_steps=counts.prompt_steps,
            decode_busy_s=counts.decode_busy_s,
            decode_steps=counts.decode_steps,
            prompt_flops=counts.prompt_flops,
            decode_read_bytes=counts.decode_read_bytes,
            experts=counts.experts,
            speculation=self._drafted,
        )
        keys = self._pool.published.take()
        return EngineSnapshot(load, self._commands_taken, self.has_work, self._last_seq_id, keys)


def _lent(seq_id: SeqId) -> Holder:
    return Holder(HolderKind.LEASE, seq_id)


MAX_COMMANDS: Final = 65536
"""The most commands in the queue. A router's bounded queue sends far fewer between two steps, so a full queue means that the
engine is stuck."""


class Runner(Protocol):
    """The model, as the engine thread uses it."""

    def launch(self, plan: StepPlan) -> Any:
        """Start the step of a plan. Return an opaque value for `collect`, which follows before the next launch."""

    def collect(self, pending: Any) -> list[Sampled]:
        """Wait until the step is done. Return one token for each sample of the plan, in the order of the plan."""


class EngineThread:
    """A thread that runs `build`, then step after step. It calls `publish`, and `on_death` with an error that ends it."""

    def __init__(
        self,
        build: Callable[[], tuple[Runner, Scheduler, BlockPools]],
        publish: Callable[[StepEvents], None],
        on_death: Callable[[BaseException], None],
        sums_of: Callable[[], Sequence[SumBlocks] | None] = lambda: None,
        counts_of: Callable[[], StepCounts] = StepCounts,
        choice_of: Callable[[], DraftChoice | None] = lambda: None,
    ) -> None:
        """`sums_of` is called after `build` and returns a function for each KV group that sums its blocks. None: no block is
        summed. `counts_of` and `choice_of` are called then as well, and return what counts the steps, and what chooses their
        drafts."""
        self._counts_of = counts_of
        self._choice_of = choice_of
        self._build = build
        self._sums_of = sums_of
        self._publish = publish
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Start the thread and return when the model is loaded. Raises what `build` raised; `InternalBug` after `timeout_s`."""
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise InternalBug(f"the engine did not load within {timeout_s:.0f} s")
        if self._failure is not None:
            raise self._failure

    def submit(self, command: Command) -> None:
        """Queue a command. The loop thread calls this; it never blocks. Raises `Overloaded` when the queue is full."""
        if self._commands.qsize() >= MAX_COMMANDS:
            raise Overloaded("the engine's command queue is full", retry_after_s=1.0)
        self._commands.put(command)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step. Return False when it still runs after `timeout_s`."""
        self._stopping = True
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            runner, scheduler, pool = self._build()
        except BaseException as exc:  # noqa: BLE001 - re-raised by `start` in the caller's thread
            self._failure = exc
            self._ready.set()
            return
        self._ready.set()
        try:
            steps = EngineSteps(scheduler, pool, self._sums_of(), self._counts_of(), self._choice_of())
            while not self._stopping:
                self._step(runner, steps)
        except BaseException as exc:  # noqa: BLE001 - the thread's last act is to report its death
            self._on_death(exc)

    def _step(self, runner: Runner, steps: EngineSteps) -> None:
        commands = self._take_commands(block=not steps.has_work)
        began_s = time.perf_counter()
        plan, early = steps.begin(commands)
        if early is not None:
            self._publish(early)
        if plan.slices:
            sampled = runner.collect(runner.launch(plan))
            self._publish(steps.finish(sampled, time.perf_counter() - began_s))
            if (sealed := steps.seal()) is not None:
                self._publish(sealed)

    def _take_commands(self, *, block: bool) -> list[Command]:
        """Return all queued commands; with `block`, wait for the first. None in the queue asks the thread to stop."""
        taken: list[Command] = []
        while block or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                break
            taken.append(command)
            block = False
        return taken


T = TypeVar("T")


class Mailbox(Generic[T]):
    """A mailbox into which one thread puts items. The owner closes it once that thread has ended."""

    def __init__(self) -> None:
        self._take: Callable[[T], None] | None = None
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._open = True
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, item: T) -> None:
        """Put an item. It never blocks, and does nothing after `detach`."""
        if self._open:
            self._items.append(item)
            if not self._woken:  # a loop that was woken has still to look, and finds this item too
                self._woken = True
                os.eventfd_write(self._fd, 1)

    def attach(self, take: Callable[[T], None]) -> None:
        """Give items to `take` from now on, first those that were put before. Call it on the loop's thread."""
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._look)

    def detach(self) -> None:
        """Take no items any more. Call it on the loop's thread."""
        self._open = False
        if self._loop is not None:
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Close the eventfd. Idempotent."""
        self._open = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _look(self) -> None:
        assert self._loop is not None
        assert self._take is not None
        os.eventfd_read(self._fd)
        self._woken = False  # before the items are taken, so that an item that is put now wakes the loop again
        while self._items:
            self._loop.call_soon(self._take, self._items.popleft())  # an item that fails does not stop the other ones


LOOK_S: Final = 0.5
"""The seconds between two looks. The router knows at most one heartbeat later."""
MAX_STEPS_LATE: Final = 30
"""A step may take so many times the time of the slowest of the largest steps at the worker's start. Measured: a worker at a
lower priority, which shared its cores with two busy processes, took 28 times as long as alone."""


def step_timeout_s(configured_s: float, slowest_s: float) -> float:
    """Return the seconds after which a worker whose step does not end is lost. `slowest_s` is the time of the slowest of the
    largest steps at the start, with the compilation of kernels."""
    return max(configured_s, MAX_STEPS_LATE * slowest_s)


class EngineWatch:
    """The watch over one engine. `timeout_s` is the longest time that it may owe a step."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.stalled_s = 0.0
        """The time for which the engine has owed a step without a sign of life, in seconds."""
        self._submitted = 0
        self._taken = 0
        self._has_work = False
        self._owed = False  # True: it owed a step at the last look and has published no event since then

    def submitted(self) -> None:
        """Count one more command that waits for the engine."""
        self._submitted += 1

    def heard(self, events: StepEvents) -> None:
        """Take the engine's events, which are its sign of life."""
        self.stalled_s, self._owed = 0.0, False
        if events.snapshot is not None:
            self._taken, self._has_work = events.snapshot.commands_taken, events.snapshot.has_work

    @property
    def owes(self) -> bool:
        """True while the engine has not taken all commands, or has work."""
        return self._has_work or self._submitted > self._taken

    def look(self, elapsed_s: float) -> bool:
        """Return whether the engine is stuck. Call it every `LOOK_S`, with the seconds since the last call."""
        owes = self.owes
        # Work that came after the last look counts from this look on. A look that comes late counts at most two intervals,
        # because the loop could not hear the engine meanwhile.
        self.stalled_s = self.stalled_s + min(elapsed_s, 2 * LOOK_S) if owes and self._owed else 0.0
        self._owed = owes
        return self.stalled_s > self.timeout_s

    @property
    def reason(self) -> str:
        """The reason why the engine is stuck, in words."""
        return f"the engine has made no step for {self.stalled_s:.1f} s, of at most {self.timeout_s:.1f} s, while work waits"


class EngineView:
    """The loop's knowledge of one engine, from the start of the process to its end."""

    def __init__(
        self,
        snapshot: EngineSnapshot,
        submit: Callable[[Command], None],
        *,
        step_timeout_s: float,
        prefix_caching: bool = False,
        peak_flops_per_s: float = 0.0,
        peak_bytes_per_s: float = 0.0,
        isa: str = "",
        cores: int = 0,
    ) -> None:
        """`peak_flops_per_s` and `peak_bytes_per_s` are those of the engine's device. 0: unknown. `isa` is the instruction set
        of compiled steps. Empty: torch computes. `cores` are the threads of all ranks. 0: they are on GPUs, or unknown."""
        self.peak_flops_per_s = peak_flops_per_s
        self.peak_bytes_per_s = peak_bytes_per_s
        self.isa = isa
        self.cores = cores
        self.snapshot = snapshot
        self.largest_step = snapshot.load.max_num_batched_tokens
        """The largest number of tokens in a step for which the engine has memory."""
        self.largest_batch = snapshot.load.max_num_seqs
        """The largest number of sequences that may run. 0: the engine does not tell."""
        self.watch = EngineWatch(step_timeout_s)
        self.prefixes = PrefixLog() if prefix_caching else None
        """All keys that the pool holds. None: it shares no prefixes."""
        self.seq_ids = itertools.count(1)
        """The ids of new sequences. An engine never uses one twice, so all lives of its worker take theirs from here."""
        self.take: Callable[[StepEvents], None] | None = None
        """The role of the present life: it gets the events of each step once this view has taken them. None: there is none."""
        self._submit = submit

    def submit(self, command: Command) -> None:
        """Give a command to the engine. Raises `Overloaded` when its queue is full."""
        self._submit(command)
        self.watch.submitted()

    def on_step(self, events: StepEvents) -> None:
        """Take the events of an engine step, and give them to the role."""
        self.watch.heard(events)
        if events.snapshot is not None:
            self.snapshot = events.snapshot
            if events.snapshot.keys is not None and self.prefixes is not None:
                self.prefixes.note(events.snapshot.keys)
        if self.take is not None:
            self.take(events)

    @property
    def empty(self) -> bool:
        """True when the engine has taken every command and has no sequence, and no block is held or quarantined."""
        load = self.snapshot.load
        blocks = load.blocks
        left = (load.running_sequences, load.queued_requests, blocks.held, blocks.quarantined)
        return not any(left) and not self.watch.owes
