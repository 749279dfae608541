"""`make bench-step` measures the cost of a decode step besides the model, and how much streaming its tokens slows it down.

A real decode worker decodes for a router in another process, which only listens. The first table shows the engine thread's
CPU time outside the model, as medians. The model runs, so caches are as cold as in service. The phases are measured apart
from the whole, since reading the clock takes as long as some of them.
The second result compares two kinds of steps. While the first kind runs, the worker's loop thread turns the tokens into
text, messages and bytes; the tokens of the second kind are kept back. Groups of both kinds take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.engine.step_phases import Probe, Watch
from decode_worker.role import DecodeRole
from pdserve.config import MIB, EngineConfig, WorkerConfig
from pdserve.core.sampling import SamplingParams
from pdserve.engine import runner as runner_module
from pdserve.engine.models import batched
from pdserve.engine.models.native_decoder import NativeDecoder
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.engine_thread import EngineSteps, EngineThread, Mailbox
from pdserve.worker.messages import EngineSnapshot, StepEvents
from pdserve.worker.own_engine import OwnEngine
from pdserve.worker.process import RunningWorker
from testkit.scripted_router import ScriptedRouter

BATCHES: Final = (1, 8, 64, 256)
KERNELS: Final = library.load()
MODEL: Final = [(batched.BatchedDecoder, "forward"), *([(KERNELS, "pdserve_model_forward")] if KERNELS else [])]
PROBES: Final = (
    (EngineThread, "_step", "rest"),
    (EngineThread, "_take_commands", "commands"),
    (EngineSteps, "begin", "commands"),
    (Scheduler, "plan", "plan"),
    (ModelRunner, "launch", "rest"),
    (ModelRunner, "collect", "rest"),
    (NativeDecoder, "forward", "arrays"),
    (runner_module, "sample", "sampling"),
    (Scheduler, "collect", "collect"),
    (EngineSteps, "finish", "publish"),
    (Mailbox, "put", "publish"),
)
PHASES: Final = ("commands", "plan", "arrays", "sampling", "collect", "publish", "rest")
SHARE_GOAL: Final = 0.05  # largest share of the step of one sequence
STEP_GOAL_US: Final = 1000.0  # most microseconds in the step of the largest batch
STREAMS: Final = 64
RATIO_GOAL: Final = 1.05
TURN_STEPS: Final = 16  # steps of one kind in a turn: each sequence gets one new block in them
ALIKE: Final = 112  # first tokens that all prompts have in common, so they are computed once
WAIT_S: Final = 120.0


def prompt(index: int) -> list[int]:
    """Return a prompt of 128 to 143 tokens. The lengths differ, so in each step a sixteenth of the sequences fills a block."""
    return [100 + i for i in range(ALIKE)] + [300 + (7 * index + i) % 1000 for i in range(16 + index % 16)]


def listen(pipe: Connection) -> None:
    """Run the router's process, which obeys the pipe.

    (count, parameters) binds `count` sequences; None cancels them all; the end of the pipe ends the process.
    """
    with ScriptedRouter() as router:
        pipe.send(router.address)
        worker, handles = router.worker("step"), list[int]()
        while True:
            try:
                asked = pipe.recv()
            except EOFError:
                return
            if asked is None:
                for handle in handles:
                    router.cancel(worker, handle)
                handles.clear()
                worker.said.clear()
            else:
                count, params = asked
                handles += [router.bind(worker, prompt(i), params, local_prefill=True) for i in range(count)]


class Bench:
    """One worker and its router, which is a separate process."""

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._router = context.Process(target=listen, args=(theirs,), daemon=True)
        self._router.start()
        theirs.close()
        self._worker = RunningWorker(WorkerConfig("step", self._pipe.recv(), engine=config), common_pb2.ROLE_DECODE).start()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.stop()
        self._pipe.close()
        self._router.join(WAIT_S)

    @contextlib.contextmanager
    def decoding(self, batch: int, params: SamplingParams) -> Iterator[None]:
        """Decode exactly `batch` sequences while the context is open."""
        self._pipe.send((batch, params))
        self._until(lambda state: state.load.running_sequences == batch and not state.load.queued_tokens)
        try:
            yield
        finally:
            self._pipe.send(None)
            self._until(lambda state: not state.num_running)

    def watch(self, steps: int, probes: Iterable[Probe] = ()) -> Watch:
        """Watch at least the next `steps` steps and return their costs."""
        with Watch(MODEL, probes) as watch:
            _wait(lambda: len(watch.step_us) >= steps)
        return watch

    def in_turns(self, rounds: int) -> list[tuple[float, float]]:
        """Return the median microseconds of a step in each round: (tokens are streamed, tokens are kept back)."""
        turns = Turns(self._worker)
        found = []
        for _ in range(rounds):
            streamed, alone = (statistics.median(self._turn(turns, on)) for on in (True, False))
            found.append((streamed, alone))
        turns.streaming(True)
        return found

    def _turn(self, turns: Turns, on: bool) -> list[float]:
        turns.streaming(on)
        return self.watch(TURN_STEPS + 1).step_us[1:]  # the streams catch up in the first step

    def _until(self, holds: Callable[[EngineSnapshot], bool]) -> None:
        member = self._worker._member
        assert member is not None
        _wait(lambda: holds(member._engine.snapshot))


class Turns:
    """Passes the engine's tokens on to the loop thread, or keeps them back.

    After a change back to streaming, the loop thread knows all tokens that the engine has drawn.
    """

    def __init__(self, worker: RunningWorker) -> None:
        assert worker._loop is not None
        self._loop, self._member = worker._loop, worker._member
        own = worker.engine
        assert isinstance(own, OwnEngine)
        assert own._thread is not None
        self._engine = own._thread
        self._publish = self._engine._publish
        self._kept: list[StepEvents] = []

    def streaming(self, on: bool) -> None:
        """Pass tokens on from now on, or keep them back."""
        self._engine._publish = self._catch_up if on else self._kept.append

    def _catch_up(self, events: StepEvents) -> None:
        """Let the streams skip the kept tokens, without sending them, and publish as usual from now on.

        It runs once, in the engine thread.
        """
        kept, self._kept = self._kept, []
        self._engine._publish = self._publish
        asyncio.run_coroutine_threadsafe(self._skip(kept), self._loop).result(WAIT_S)
        self._publish(events)

    async def _skip(self, kept: list[StepEvents]) -> None:
        role = self._member.role  # type: ignore[union-attr]
        assert isinstance(role, DecodeRole)
        for events in kept:
            for token in events.tokens:
                if (request := role._by_seq.get(token.seq_id)) is not None:
                    request.output.skip(token.token_id)


def _wait(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"the worker did not reach the expected state within {WAIT_S:.0f} s")
        time.sleep(0.02)


def by_phase(bench: Bench, params: SamplingParams, steps: int, title: str) -> Table:
    """Measure each batch and return the table of CPU time by phase."""
    table = Table("B", *(f"{phase} us" for phase in PHASES), "all us", "best tenth us", "step ms", "share", "goal", title=title)
    for batch in BATCHES:
        with bench.decoding(batch, params):
            whole, parts = bench.watch(steps), bench.watch(steps, PROBES)
        spent, step = statistics.median(whole.outside_us), statistics.median(whole.step_us)
        best = statistics.quantiles(whole.outside_us, n=10)[0]
        cells = (f"{statistics.median(found.get(phase, 0.0) for found in parts.phases_us):,.0f}" for phase in PHASES)
        goal = {1: f"< {SHARE_GOAL:.0%}", BATCHES[-1]: f"< {STEP_GOAL_US:,.0f} us"}.get(batch, "")
        table.add_row(str(batch), *cells, f"{spent:,.0f}", f"{best:,.0f}", f"{step / 1e3:.1f}", f"{spent / step:.1%}", goal)
    return table


def main() -> None:
    """Measure and print the table and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine; a worker that shares two cores has 1")
    parser.add_argument("--steps", type=int, default=48, help="steps to measure for each batch")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of steps with and without streams")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        threads=args.threads,
        max_num_seqs=BATCHES[-1],
        kv_cache_memory=1536 * MIB,
    )
    greedy = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)
    console = Console(width=140)
    with Bench(config) as bench:
        name = f"{args.model}, {args.quantization or args.dtype}, {args.threads} thread(s)"
        console.print(by_phase(bench, greedy, args.steps, f"CPU time of the engine thread, greedy: {name}"))
        with bench.decoding(STREAMS, greedy):
            rounds = bench.in_turns(args.rounds)
    streamed, alone = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(one / other for one, other in rounds)
    console.print(
        f"Step of {STREAMS} sequences, {name}: {streamed / 1e3:.2f} ms streamed, {alone / 1e3:.2f} ms not: "
        f"x {ratio:.3f}, goal x {RATIO_GOAL}"
    )


if __name__ == "__main__":
    main()
