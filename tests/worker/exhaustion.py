"""A prefill and a decode engine, real ones, kept far over what their pools hold, by a driver that plays the router.

The driver binds strictly in order, as the router does, and moves KV between the pools by copying. Requests are of three
ways: computed where they are decoded, handed over, and either of them aborted at any moment, also while their KV is
"being read", which quarantines blocks for a while.
"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdserve.checkpoint.card import ModelCard
from pdserve.config import EngineConfig
from pdserve.core.block_pools import BlockPools, BlockTables
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import Sampled, StepPlan
from pdserve.engine.memory.host import resident_bytes
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner, Pending
from pdserve.engine.schedule.scheduler import Scheduler, SequenceKind
from pdserve.engine.warm_up import settle
from pdserve.worker.engine_thread import EngineThread
from pdserve.worker.messages import (
    Abort,
    Activate,
    AddLent,
    Command,
    EndQuarantine,
    EngineSnapshot,
    Reserve,
    ReturnLease,
    StepEvents,
)

BLOCK, LONGEST, BUDGET, SEQS = 16, 200, 64, 16
MOST_PROMPT, MOST_OUTPUT = 120, 60
OPEN = 48  # requests at a time: about ten times what the pools hold
COMPARED = 120  # outputs, with those of an undisturbed run
WAIT_S = 60.0  # far above any step
STALL_S = 0.05
LONGER_S = 200.0
WANTED = ("preempted", "no room", "aborted", "quarantined", "decode full", "prefill full", "handed over", "local")
STEPS_EACH = MOST_OUTPUT + 2 * (LONGEST // BUDGET + 1)
"""A request alone needs at most so many steps, its prompt computed twice. Nobody may wait for more than all others."""


def make_runner(directory: Path, num_blocks: int) -> ModelRunner:
    """As exact in company as alone, so that outputs can be compared bit for bit."""
    card = ModelCard.load(directory)
    compiled = library.load() is not None
    config = EngineConfig(
        dtype="bfloat16" if compiled else "float32",
        batch_invariant=not compiled,
        device="cpu",
        threads=1,
        block_size=BLOCK,
        max_model_len=LONGEST,
        max_num_seqs=SEQS,
        max_num_batched_tokens=BUDGET,
    )
    layout = card.kv_layout(BLOCK, config.dtype)
    config = replace(config, kv_cache_memory=num_blocks * layout.block_bytes)
    runner = ModelRunner.load(directory, card, config)
    settle(runner, config)
    return runner


class CheckedRunner:
    """The engine thread's runner: the books must agree before every step."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self.steps = 0

    def launch(self, plan: StepPlan) -> Pending:
        self.steps += 1
        self._scheduler.check_invariants()
        return self._runner.launch(plan)

    def collect(self, pending: Pending) -> list[Sampled]:
        return self._runner.collect(pending)


class Side:
    """One engine with its thread; what it says goes to `events` with its name."""

    def __init__(self, name: str, runner: ModelRunner, eos: tuple[int, ...], events: queue.Queue) -> None:
        self.runner = runner
        self.pool = BlockPools(runner.kv.num_blocks)
        self.scheduler = Scheduler(
            self.pool, BLOCK, max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, max_model_len=LONGEST,
            eos_token_ids=eos, prefix_salt=b"exhaustion",
        )  # fmt: skip
        self.checked = CheckedRunner(runner, self.scheduler)
        self.deaths: list[BaseException] = []
        self.thread = EngineThread(
            lambda: (self.checked, self.scheduler, self.pool), lambda e: events.put((name, e)), self.deaths.append
        )
        self.snapshot: EngineSnapshot | None = None

    def submit(self, command: Command) -> None:
        self.thread.submit(command)


@dataclass(slots=True)
class Request:
    seq_id: SeqId
    prompt: tuple[int, ...]
    params: SamplingParams
    handoff: bool
    arrived_step: int
    output: list[int] = field(default_factory=list)
    room: tuple[BlockId, ...] = ()
    hits: int = 0
    lent: tuple[BlockId, ...] = ()
    active: bool = False  # its KV is here, or is computed here


@dataclass(slots=True)
class Result:
    seen: Counter[str] = field(default_factory=Counter)
    longest_steps: int = 0
    rss_growth: int = 0
    compared: int = 0
    steps: int = 0


class Storm:
    def __init__(self, directory: Path, seed: int, *, prefill_blocks: int, decode_blocks: int) -> None:
        self._rng = random.Random(seed)
        card = ModelCard.load(directory)
        self._vocab, self._eos = card.vocab_size, card.eos_token_ids
        self._events: queue.Queue[tuple[str, StepEvents]] = queue.Queue()
        sizes = {"prefill": prefill_blocks, "decode": decode_blocks}
        self.sides = {
            name: Side(name, make_runner(directory, blocks), self._eos, self._events) for name, blocks in sizes.items()
        }
        self._prefixes = [self._ids(n) for n in (BLOCK, 3 * BLOCK, 5 * BLOCK)]
        self._waiting: deque[Request] = deque()
        self._asked: Request | None = None  # its reservation is on the way
        self._bound: dict[SeqId, Request] = {}
        self._reading: deque[tuple[Request, int, bool]] = deque()  # until a turn; whether token 0 ended it
        self._quarantined: deque[tuple[SeqId, int]] = deque()  # until a turn
        self._turns = 0
        self._count = 0
        self._compare: list[Request] = []
        self._finished = 0
        self.result = Result()

    # --- the run

    def run(self, seconds: float) -> Result:
        """At least so long, and until all of `WANTED` was seen. Raises AssertionError. Nothing runs afterwards."""
        prefill, decode = self.sides["prefill"], self.sides["decode"]
        for side in self.sides.values():
            side.thread.start(WAIT_S)
        before = resident_bytes()
        try:
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s or not all(self.result.seen[what] for what in WANTED):
                assert time.monotonic() < end_s + LONGER_S, f"the pools are not driven to exhaustion: {self.result}"
                self._arrive()
                self._turn()
            while self._waiting or self._asked or self._bound or self._quarantined:
                self._turn()
            self._settled()
        finally:
            stopped = [side.thread.stop(WAIT_S) for side in self.sides.values()]
        assert all(stopped)
        self.result.rss_growth = resident_bytes() - before
        self.result.steps = decode.checked.steps
        for side in (prefill, decode):
            assert not side.deaths, side.deaths
            side.scheduler.check_invariants()
            counts = side.pool.counts()
            assert counts.free + counts.cached == counts.total
            assert side.scheduler.num_live == 0
        self._compare_outputs()
        return self.result

    def _turn(self) -> None:
        self._turns += 1
        self._bind()
        if self._rng.random() < 0.02 and self._bound:
            self._abort(self._rng.choice(list(self._bound.values())))
        self._end_reads(stalled=False)
        self._listen()
        for side in self.sides.values():
            assert not side.deaths, side.deaths

    def _listen(self) -> None:
        """To all that is said; at a stall, which only a read can end, until one did."""
        for patience in range(int(WAIT_S / STALL_S) + 1):
            try:
                self._hear(*self._events.get(timeout=STALL_S))
                break
            except queue.Empty:
                assert patience < WAIT_S / STALL_S, "both engines fell silent"
                self._end_reads(stalled=True)
                if not (self._bound or self._asked):
                    break
        while not self._events.empty():
            self._hear(*self._events.get())

    def _end_reads(self, *, stalled: bool) -> None:
        """Those whose time has come; at a stall the oldest in any case."""
        if self._quarantined and (stalled or self._quarantined[0][1] <= self._turns):
            self.sides["decode"].submit(EndQuarantine(self._quarantined.popleft()[0]))
        if self._reading and (stalled or self._reading[0][1] <= self._turns):
            request, _, ended = self._reading.popleft()
            if request.seq_id in self._bound:
                self._hand_over(request, ended=ended)

    def _settled(self) -> None:
        """Both have done all that they were told."""
        for side in self.sides.values():
            side.submit(Abort(SeqId(0)))
            while not (side.snapshot is not None and self._idle(side)):
                said, events = self._events.get(timeout=WAIT_S)
                self._hear(said, events)

    @staticmethod
    def _idle(side: Side) -> bool:
        snapshot = side.snapshot
        assert snapshot is not None
        load = snapshot.load
        return load.running_sequences == load.queued_requests == load.blocks.held == load.blocks.quarantined == 0

    @property
    def _step(self) -> int:
        return self.sides["decode"].checked.steps

    # --- requests

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._vocab) for _ in range(count))

    def _arrive(self) -> None:
        rng = self._rng
        while len(self._waiting) + len(self._bound) < OPEN:
            self._count += 1
            head = rng.choice(self._prefixes) if rng.random() < 0.4 else ()
            prompt = head + self._ids(rng.randint(1, MOST_PROMPT - len(head)))
            params = SamplingParams(
                max_tokens=rng.randint(1, MOST_OUTPUT),
                temperature=rng.choice((0.0, 0.8)),
                seed=self._count,
                ignore_eos=rng.random() < 0.8,
            )
            handoff = rng.random() < 0.6
            self._waiting.append(Request(SeqId(self._count), prompt, params, handoff, self._step))

    def _bind(self) -> None:
        """The first in line, and nobody before it: it must not be starved by smaller ones."""
        if self._asked is None and self._waiting:
            request = self._asked = self._waiting[0]
            local = not request.handoff
            self.sides["decode"].submit(
                Reserve(request.seq_id, RequestSpec(request.prompt, request.params), local_prefill=local)
            )

    def _abort(self, request: Request) -> None:
        in_flight = not request.active and self._rng.random() < 0.5
        self.sides["decode"].submit(Abort(request.seq_id, read_in_flight=in_flight))
        if in_flight:
            self._quarantined.append((request.seq_id, self._turns + 20))
            self.result.seen["quarantined"] += 1
        if request.handoff and not request.active:
            self.sides["prefill"].submit(Abort(request.seq_id))
            self.sides["prefill"].submit(ReturnLease(request.seq_id))
        del self._bound[request.seq_id]
        self.result.seen["aborted"] += 1

    def _done(self, request: Request) -> None:
        del self._bound[request.seq_id]
        self.result.seen["handed over" if request.handoff else "local"] += 1
        self.result.longest_steps = max(self.result.longest_steps, self._step - request.arrived_step)
        self._sample(request)

    def _sample(self, request: Request) -> None:
        """Of all that finish, each with the same chance."""
        self._finished += 1
        if len(self._compare) < COMPARED:
            self._compare.append(request)
        elif (place := self._rng.randrange(self._finished)) < COMPARED:
            self._compare[place] = request

    # --- what engines say

    def _hear(self, name: str, events: StepEvents) -> None:
        self.result.seen["preempted"] += len(events.preempted)
        if events.snapshot is not None:
            self.sides[name].snapshot = events.snapshot
            blocks = events.snapshot.load.blocks
            self.result.seen[f"{name} full"] += blocks.free == blocks.cached == 0
        for lent in events.lent:
            if lent.seq_id in self._bound:
                self._bound[lent.seq_id].lent = lent.block_tables[0]
        for reserved in events.reserved:
            self._reserved(reserved.block_tables, reserved.hits)
        for token in events.tokens:
            request = self._bound.get(token.seq_id)
            if request is None:  # aborted
                continue
            assert token.output_index == len(request.output), "a token lost or twice"
            request.output.append(token.token_id)
            ended = token.finish_reason is not None
            if name == "prefill":
                self._reading.append((request, self._turns + self._rng.choice((0, 0, 10, 60)), ended))
            elif ended:
                self._done(request)

    def _reserved(self, block_tables: BlockTables | None, hits: int) -> None:
        request, self._asked = self._asked, None
        assert request is not None
        if block_tables is None:
            self.result.seen["no room"] += 1
            return
        self._waiting.popleft()
        request.room, request.hits = block_tables[0], hits
        request.active = not request.handoff
        self._bound[request.seq_id] = request
        if request.handoff:
            self.sides["prefill"].submit(AddLent(request.seq_id, RequestSpec(request.prompt, request.params)))

    def _hand_over(self, request: Request, *, ended: bool) -> None:
        """Prefill is through: copy what decode lacks, commit, and give the lease back."""
        source, target = (self.sides[name].runner.kv.caches[0].blocks for name in ("prefill", "decode"))
        count = -(-len(request.prompt) // BLOCK)
        assert len(request.lent) == count
        for index in range(request.hits, count):
            target[request.room[index]] = source[request.lent[index]]
        decode = self.sides["decode"]
        decode.submit(Abort(request.seq_id) if ended else Activate(request.seq_id, request.output[0]))
        request.active = True
        self.sides["prefill"].submit(ReturnLease(request.seq_id))
        if ended:
            self._done(request)

    # --- afterwards

    def _compare_outputs(self) -> None:
        for request in self._compare:
            assert alone(self.sides["decode"].runner, self._eos, request.prompt, request.params) == request.output, request
            self.result.compared += 1


def alone(runner: ModelRunner, eos: tuple[int, ...], prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The request's output with the engine to itself."""
    pool = BlockPools(runner.kv.num_blocks)
    scheduler = Scheduler(pool, BLOCK, max_num_seqs=1, max_num_batched_tokens=BUDGET, max_model_len=LONGEST, eos_token_ids=eos)
    scheduler.add(SeqId(1), RequestSpec(prompt, params), kind=SequenceKind.LOCAL)
    output: list[int] = []
    while scheduler.num_live:
        outcome = scheduler.collect(runner.execute(scheduler.plan()))
        output += [token.token_id for token in outcome.tokens]
    return output
