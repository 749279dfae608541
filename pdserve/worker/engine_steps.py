"""What one engine step does to the scheduler and what it tells the loop, in two halves around the model. Pure.

`begin` applies commands and plans; the caller computes the plan; `finish` collects. The engine thread calls them with
the model between, a simulation with virtual time between.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pdserve.core.batch import Sampled, StepPlan
from pdserve.core.blocks import BlockPool
from pdserve.core.ids import SeqId
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import SequenceKind
from pdserve.worker.messages import (
    Abort,
    Activate,
    AddLent,
    Command,
    EndQuarantine,
    EngineSnapshot,
    Lent,
    Reserve,
    ReserveResult,
    ReturnLease,
    StepEvents,
)

CHECK_STEPS: Final = 512
"""The books are checked when the engine goes idle, at most once in so many steps: a walk over all blocks."""


class EngineSteps:
    def __init__(self, scheduler: Scheduler, pool: BlockPool) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._unchecked = 0
        self._commands_taken = 0
        self._numerical_errors = 0
        self._last_seq_id = SeqId(0)

    @property
    def has_work(self) -> bool:
        """False: only a command can change anything, so wait for one."""
        return self._scheduler.has_work

    def begin(self, commands: Collection[Command]) -> tuple[StepPlan, StepEvents | None]:
        """The next step, and what the loop should know before it is computed. An empty plan has no `finish`."""
        self._commands_taken += len(commands)
        reserved = tuple([result for command in commands if (result := self._apply(command)) is not None])
        plan = self._scheduler.plan()
        lent = tuple([Lent(seq_id, block_ids) for seq_id, block_ids in self._scheduler.take_admitted()])
        if not plan.slices:
            self._check()
            return plan, StepEvents(lent=lent, reserved=reserved, snapshot=self._snapshot())
        # The reader's handshake need not wait for the computation.
        return plan, StepEvents(lent=lent, reserved=reserved) if lent or reserved else None

    def finish(self, sampled: list[Sampled]) -> StepEvents:
        outcome = self._scheduler.collect(sampled)
        self._unchecked += 1
        self._numerical_errors += len(outcome.failed)
        return StepEvents(
            advanced=outcome.advanced,
            tokens=outcome.tokens,
            preempted=outcome.preempted,
            failed=outcome.failed,
            snapshot=self._snapshot(),
        )

    def _apply(self, command: Command) -> ReserveResult | None:
        scheduler = self._scheduler
        match command:
            case AddLent(seq_id, prompt, params, priority, resumed, salt):
                self._last_seq_id = seq_id
                kind = SequenceKind.LENT
                scheduler.add(seq_id, prompt, params, kind=kind, priority=priority, resumed=resumed, cache_salt=salt)
            case Reserve(seq_id, prompt, params, priority, local, resumed, salt):
                self._last_seq_id = seq_id
                room = scheduler.reserve(
                    seq_id, prompt, params, priority=priority, local_prefill=local, resumed=resumed, cache_salt=salt
                )
                return ReserveResult(seq_id, room.block_ids, room.hits) if room is not None else ReserveResult(seq_id, None)
            case Activate(seq_id, first_token):
                scheduler.activate(seq_id, first_token)
            case Abort(seq_id, read_in_flight):
                scheduler.abort(seq_id, read_in_flight=read_in_flight)
            case EndQuarantine(seq_id):
                scheduler.end_quarantine(seq_id)
            case ReturnLease(seq_id):
                scheduler.return_lease(seq_id)
        return None

    def _check(self) -> None:
        """Raises AssertionError when a block is lost or in two places: the worker must not go on then."""
        if self._unchecked >= CHECK_STEPS:
            self._unchecked = 0
            self._scheduler.check_invariants()

    def _snapshot(self) -> EngineSnapshot:
        scheduler = self._scheduler
        return EngineSnapshot(
            self._pool.counts(),
            scheduler.num_waiting,
            scheduler.num_running,
            scheduler.queued_tokens,
            scheduler.prefix.queried,
            scheduler.prefix.hit,
            self._commands_taken,
            self._numerical_errors,
            scheduler.has_work,
            self._last_seq_id,
        )
