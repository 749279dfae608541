"""The engine of one simulated worker: production scheduler, block pool and engine steps. A step takes the time of the model.

Steps that only decode are planned as one stride. The scheduler gets the next tokens as drafts, and all drafts are right, so its
plan and its books equal those of single steps. A stride ends before a sequence ends. A command that comes during a stride cuts
it at the end of the running step, as in a real engine. So strides change no time; tokens go out once a stride.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final, NamedTuple

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.step_plan import NO_DRAFTS, Drafts, Sampled, StepPlan
from pdserve.core.worker import WorkerLoad
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineSteps
from pdserve.worker.messages import Command, EngineSnapshot, StepEvents
from sim.perf.clock import Clock
from sim.perf.costs import StepWork, WorkerCosts, work_of

EOS: Final = 0
GUESS: Final = 1
OTHER: Final = 2
"""The token that ends a stride before all its drafts are used."""
MAX_STRIDE: Final = 64


class _StridingScheduler(Scheduler):
    """The production scheduler with drafts. All sequences get the same number of drafts. The number is small enough that no
    sequence draws more tokens than it has left."""

    left: dict[SeqId, int]
    begun: frozenset[SeqId] = frozenset()
    """The sequences that have decoded a token, as of the last update of this field."""
    work = StepWork()
    """The work of the step that ends, or of the first step of a stride."""
    steps = 1
    """The steps of the stride that ends."""

    def took(self, step_s: float) -> None:
        """Learn the time of the last step, or as often the mean time of the steps of a stride: means forget by steps."""
        for _ in range(self.steps):
            self.rates.add(self.work.prompt_tokens, self.work.decodes, step_s)

    def plan(self, drafts: Drafts = NO_DRAFTS) -> StepPlan:
        """Plan the next step, or a stride if all that runs decodes."""
        return super().plan(self._guesses() if not (self._prefilling or self._waiting) else NO_DRAFTS)

    def _guesses(self) -> Drafts:
        decoding = [seq.seq_id for seq in self._decoding]
        before, self.begun = self.begun, frozenset(decoding)
        if not decoding or not before.issuperset(decoding):  # a first decoded token goes out at once: the router notes its time
            return NO_DRAFTS
        rows = min(self._max_seqs, self.max_num_batched_tokens) // len(decoding)
        count = min(rows, MAX_STRIDE, min([self.left[seq_id] for seq_id in decoding])) - 1
        return dict.fromkeys(decoding, (GUESS,) * count) if count > 0 else NO_DRAFTS


class EngineCounts(NamedTuple):
    """The counts of one engine since its start."""

    prompt_tokens: int
    output_tokens: int
    prompt_busy_s: float
    prompt_steps: int
    decode_busy_s: float
    decode_steps: int


class PerfEngine:
    """The engine of one worker. `publish` gets the events of each step."""

    def __init__(
        self,
        clock: Clock,
        costs: WorkerCosts,
        publish: Callable[[StepEvents], None],
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_salt: bytes | None,
    ) -> None:
        self.pool = BlockPools(num_blocks)
        self.scheduler = _StridingScheduler(
            self.pool,
            block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            prefix_salt=prefix_salt,
        )
        self.left: dict[SeqId, int] = {}
        """The tokens that each sequence will still draw. The role writes it before the sequence's command."""
        self.scheduler.left = self.left
        self.steps = 0
        self.busy_s = 0.0
        self.prompt_busy_s = 0.0
        """The part of `busy_s` in steps that computed prompts."""
        self.prompt_steps = 0
        self.prompt_tokens = 0
        """Prompt tokens that were computed."""
        self.output_tokens = 0
        self.computed: dict[SeqId, int] = {}
        """The prompt tokens that each sequence has computed here. The role takes them out."""
        self.snapshot = EngineSnapshot(WorkerLoad(self.pool.counts(), max_num_batched_tokens=max_num_batched_tokens))
        self._engine = EngineSteps(self.scheduler, self.pool)
        self._clock = clock
        self._costs = costs
        self.publish = publish
        self._commands: list[Command] = []
        self._busy = False
        self._plan: StepPlan | None = None
        self._work = StepWork()
        self._began_s = 0.0
        self._stride = 0
        self._launch = 0

    @property
    def idle(self) -> bool:
        """True when no step runs and no command waits."""
        return not self._busy

    def counts(self) -> EngineCounts:
        """Return what the engine has computed until now, the finished steps of a stride that runs included."""
        steps = self._steps_done() if self._stride > 1 else 0
        ran_s = self._costs.steps_s(self._work, steps)
        decode_busy_s = self.busy_s - self.prompt_busy_s + ran_s
        output_tokens = self.output_tokens + steps * self._work.decodes
        decode_steps = self.steps - self.prompt_steps + steps
        return EngineCounts(
            self.prompt_tokens, output_tokens, self.prompt_busy_s, self.prompt_steps, decode_busy_s, decode_steps
        )

    def _steps_done(self) -> int:
        """Return how many steps of the stride have ended."""
        ran_s = self._clock.now_s - self._began_s
        return bisect_right(range(1, self._stride + 1), ran_s, key=lambda steps: self._costs.steps_s(self._work, steps))

    def submit(self, command: Command) -> None:
        """Queue a command for the next step. A stride that runs ends with the step that is under way."""
        self._commands.append(command)
        if not self._busy:
            self._busy = True
            self._clock.after(0.0, self._begin)
        elif self._stride > 1:
            self._cut()

    def _begin(self) -> None:
        commands, self._commands = self._commands, []
        plan, early = self._engine.begin(commands)
        if plan.slices:
            self._start(plan)
        if early is not None:
            self._tell(early)
        if not plan.slices:
            self._next()

    def _start(self, plan: StepPlan) -> None:
        self._plan, self._work, self._began_s = plan, work_of(plan), self._clock.now_s
        # With drafts for all sequences, a plan is as many steps as each draws tokens.
        self._stride = 1 if plan.decodes else max(1, min([len(piece.samples) for piece in plan.slices]))
        self._finish_at(self._stride)

    def _finish_at(self, steps: int) -> None:
        self._stride = steps
        self._launch += 1
        self._clock.at(self._began_s + self._costs.steps_s(self._work, steps), self._finish, self._launch)

    def _cut(self) -> None:
        """End the stride with the step that runs now."""
        now_s, steps = self._clock.now_s, 1
        while self._began_s + self._costs.steps_s(self._work, steps) < now_s:
            steps += 1
        if steps < self._stride:
            self._finish_at(steps)

    def _finish(self, launch: int) -> None:
        if launch != self._launch:
            return  # the stride was cut
        plan, stride = self._plan, self._stride
        assert plan is not None
        self._plan, self._stride = None, 0
        took_s = self._clock.now_s - self._began_s
        self.steps += stride
        self.busy_s += took_s
        self.prompt_busy_s += took_s if self._work.prompt_tokens else 0.0
        self.prompt_steps += 1 if self._work.prompt_tokens else 0
        self.prompt_tokens += self._work.prompt_tokens
        self.scheduler.work, self.scheduler.steps = self._work, stride
        for piece in plan.slices[plan.decodes :]:
            if len(piece.samples) < 2:
                self.computed[piece.seq_id] = self.computed.get(piece.seq_id, 0) + len(piece.token_ids)
        events = self._engine.finish(self._draw(plan, stride), took_s / stride)
        self.output_tokens += len(events.tokens)
        self._tell(events)
        self._next()

    def _draw(self, plan: StepPlan, stride: int) -> list[Sampled]:
        """Return a token for each sample, so that each sequence goes on by `stride` tokens, or by one after a prompt."""
        drawn: list[Sampled] = []
        for piece in plan.slices:
            count = len(piece.samples)
            if count:
                taken = stride if count > 1 else 1
                left = self.left[piece.seq_id] = self.left[piece.seq_id] - taken
                last = EOS if left == 0 else OTHER
                drawn += [(GUESS, None)] * (taken - 1) + [(last, None)] * (count - taken + 1)
        return drawn

    def _next(self) -> None:
        self._busy = bool(self._commands) or self._engine.has_work
        if self._busy:
            self._clock.after(0.0, self._begin)

    def _tell(self, events: StepEvents) -> None:
        if events.snapshot is not None:
            self.snapshot = events.snapshot
        self.publish(events)
