"""The engine step without the model: what it does to the scheduler, and the events that it gives to the loop. Pure.

`begin` applies commands and plans; the caller computes the plan; `finish` collects the tokens, and `seal` sums the blocks that
became final. The engine thread launches and awaits the step between `begin` and `finish`; a simulation lets virtual time pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Final

from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import Holder, HolderKind, SumBlocks
from pdserve.core.errors import InternalBug
from pdserve.core.ids import NULL_BLOCK, NULL_SUM, BlockId, BlockSum, SeqId
from pdserve.core.roofline.step_counts import StepCounts
from pdserve.core.step_plan import Sampled, StepPlan
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.core.worker import WorkerLoad
from pdserve.engine.schedule.outcome import Final as FinalBlocks
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from pdserve.worker.messages import (
    Abort,
    Activate,
    AddLent,
    Command,
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
    ) -> None:
        """`sum_blocks` has a function for each KV group. None: no block is summed. The engine lends until `SetLending`.

        `counts` knows the operations and bytes of the model's steps. None: only tokens and seconds are counted.
        """
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

    @property
    def has_work(self) -> bool:
        """True when the engine can go on without a further command."""
        return self._scheduler.has_work

    def begin(self, commands: Collection[Command]) -> tuple[StepPlan, StepEvents | None]:
        """Apply the commands. Return the plan of the next step, and the events that the loop needs before that step, or None.

        The plan is empty when there is nothing to compute; `finish` must not follow then.
        """
        self._commands_taken += len(commands)
        reserved, rehashed, lent = [], [], []
        for command in commands:
            match self._apply(command):
                case ReserveResult() as result:
                    reserved.append(result)
                case Rehashed() as result:
                    rehashed.append(result)
        plan = self._plan = self._scheduler.plan()
        for seq_id, tables, hits in self._scheduler.take_admitted():
            lent.append(Lent(seq_id, tables, self._sums_of(seq_id, hits), hits))
        if plan.slices and not (lent or reserved or rehashed):
            return plan, None
        # Lent blocks go out before the computation, so that the reader's handshake does not wait for it.
        early = StepEvents(lent=tuple(lent), reserved=tuple(reserved), rehashed=tuple(rehashed))
        if not plan.slices:
            self._check()
            early = early._replace(snapshot=self._snapshot(self._scheduler.has_work))
        return plan, early

    def finish(self, sampled: list[Sampled], step_s: float = 0.0) -> StepEvents:
        """Give the drawn tokens to the scheduler, and return the events of the step. `sampled` has a token for each sample of
        the plan, in order. `step_s` is the time since the step began, in seconds; 0: nobody measured it."""
        self._scheduler.took(step_s)
        outcome = self._scheduler.collect(sampled)
        self._final = outcome.final
        self._unchecked += 1
        self._numerical_errors += len(outcome.failed)
        goes_on = self._scheduler.has_work
        prompt_tokens, drawn = self._scheduler.step_tokens[0], len(outcome.tokens)
        self._counts.add(self._plan, prompt_tokens=prompt_tokens, output_tokens=drawn, step_s=step_s, idle=not goes_on)
        return StepEvents(
            advanced=outcome.advanced,
            tokens=outcome.tokens,
            preempted=outcome.preempted,
            failed=outcome.failed,
            grammars_failed=outcome.grammars_failed,
            snapshot=self._snapshot(goes_on),
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

    def _apply(self, command: Command) -> ReserveResult | Rehashed | None:
        scheduler = self._scheduler
        match command:
            case AddLent(seq_id, spec, resumed, grammar):
                self._last_seq_id = seq_id
                scheduler.add(seq_id, spec, kind=SequenceKind.LENT, resumed=resumed)
                self._constrain(seq_id, grammar)
            case Reserve(seq_id, spec, local, resumed, grammar):
                self._last_seq_id = seq_id
                room = scheduler.reserve(seq_id, spec, local_prefill=local, resumed=resumed)
                if room is None:
                    return ReserveResult(seq_id, None, shortage=scheduler.shortage)
                self._constrain(seq_id, grammar)
                return ReserveResult(seq_id, room.block_tables, room.hits)
            case Activate(seq_id, first_token):
                scheduler.activate(seq_id, first_token)
            case Abort(seq_id, read_in_flight):
                scheduler.abort(seq_id, read_in_flight=read_in_flight)
            case EndQuarantine(seq_id):
                scheduler.end_quarantine(seq_id)
            case ReturnLease(seq_id):
                scheduler.return_lease(seq_id)
            case SetBudget(tokens, seqs):
                if tokens:
                    scheduler.set_budget(tokens)
                if seqs:
                    scheduler.set_max_num_seqs(seqs)
            case Rehash(seq_id):
                return self._rehash(seq_id)
            case SetLending(lends):
                self._set_lending(lends)
        return None

    def _constrain(self, seq_id: SeqId, grammar: GrammarState | None) -> None:
        if grammar is not None:
            self._scheduler.constrain(seq_id, grammar)

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

    def _snapshot(self, has_work: bool) -> EngineSnapshot:
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
        )
        keys = self._pool.published.take()
        return EngineSnapshot(load, self._commands_taken, has_work, self._last_seq_id, keys)


def _lent(seq_id: SeqId) -> Holder:
    return Holder(HolderKind.LEASE, seq_id)
