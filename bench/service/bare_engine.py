"""The bare engine that `bench.service.beside_engine` measures beside the service. It is one engine thread in a separate
process, without router, HTTP and text. It takes its orders over a pipe."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

from pdserve.config import EngineConfig

TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of one turn. Each stream asks its prompts (token ids) one after the other, and wants `tokens` tokens of
    each.
    """

    streams: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that all requests of the turn generate."""
        return self.tokens * sum(map(len, self.streams))


@dataclass(slots=True)
class Turn:
    """The times of one turn in seconds: `wall_s` of the whole turn, and for each request `ttft_s` until its first token and
    `tpot_s`, the mean time between two tokens.
    """

    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def add(self, asked_s: float, first_s: float, last_s: float, tokens: int) -> None:
        """Add a request by the times of its start and of its first and last token. `tokens` must be at least 2."""
        self.ttft_s.append(first_s - asked_s)
        self.tpot_s.append((last_s - first_s) / (tokens - 1))


class BareEngine:
    """The engine in its own process. It can be used inside the block of `started`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def run(self, work: Work) -> Turn:
        """Run one turn, and return its times. Raises `TimeoutError` when the engine is silent for 120 s."""
        self._pipe.send(work)
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError("the bare engine is silent")
        turn = self._pipe.recv()
        assert isinstance(turn, Turn)
        return turn


@contextmanager
def started(config: EngineConfig) -> Iterator[BareEngine]:
    """Run a bare engine until the block ends. Raises `TimeoutError` when it is not ready within 120 s."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, config), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError("the bare engine does not start")
        assert ours.recv() == "ready"
        yield BareEngine(ours)
    finally:
        ours.close()
        process.join(TIMEOUT_S)


def _serve(pipe: Connection, config: EngineConfig) -> None:
    import sys

    from pdserve.checkpoint.card import ModelCard
    from pdserve.checkpoint.resolve import resolve
    from pdserve.core.block_pools import BlockPools
    from pdserve.engine.runner import ModelRunner
    from pdserve.engine.schedule.scheduler import Scheduler
    from pdserve.engine.warm_up import settle
    from pdserve.worker.engine_thread import EngineThread
    from pdserve.worker.messages import StepEvents
    from pdserve.worker.process import SWITCH_INTERVAL_S

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    directory = resolve(config.model)
    messages: queue.Queue[tuple[float, StepEvents]] = queue.Queue()

    def build() -> tuple[ModelRunner, Scheduler, BlockPools]:
        runner = ModelRunner.load(directory, ModelCard.load(directory), config)
        settle(runner, config)
        pool = BlockPools(runner.kv.num_blocks)
        scheduler = Scheduler(
            pool,
            runner.kv.spec.block_size,
            **config.largest_limits(runner.kv.device.type)._asdict(),
            max_model_len=runner.max_model_len,
            eos_token_ids=(),
        )
        return runner, scheduler, pool

    def died(exc: BaseException) -> None:
        raise exc

    engine = EngineThread(build, lambda events: messages.put((time.perf_counter(), events)), died)
    engine.start(TIMEOUT_S)
    pipe.send("ready")
    numbers = iter(range(1 << 60))
    try:
        while True:
            pipe.send(_turn(engine, messages, pipe.recv(), numbers))
    except EOFError:
        engine.stop(TIMEOUT_S)


def _turn(engine, messages, work: Work, numbers: Iterator[int]) -> Turn:  # type: ignore[no-untyped-def]
    """Run one turn. Each stream asks its next prompt once it has the last token of the prompt before."""
    from pdserve.core.ids import SeqId
    from pdserve.core.request_spec import RequestSpec
    from pdserve.core.sampling import SamplingParams
    from pdserve.worker.messages import Reserve

    params = SamplingParams(temperature=0.0, max_tokens=work.tokens, ignore_eos=True)
    left = {stream: list(reversed(prompts)) for stream, prompts in enumerate(work.streams)}
    running: dict[SeqId, tuple[int, list[float]]] = {}
    turn, began_s = Turn(), time.perf_counter()

    def ask(stream: int) -> None:
        if left[stream]:
            seq_id = SeqId(next(numbers))
            running[seq_id] = (stream, [time.perf_counter()])
            engine.submit(Reserve(seq_id, RequestSpec(left[stream].pop(), params), local_prefill=True))

    for stream in left:
        ask(stream)
    while running:
        now_s, events = messages.get(timeout=TIMEOUT_S)
        assert all(result.block_tables is not None for result in events.reserved), "no room for a prompt"
        for token in events.tokens:
            stream, times_s = running[token.seq_id]
            times_s.append(now_s)
            if len(times_s) == work.tokens + 1:
                turn.add(times_s[0], times_s[1], times_s[-1], work.tokens)
                del running[token.seq_id]
                ask(stream)
    turn.wall_s = time.perf_counter() - began_s
    return turn
