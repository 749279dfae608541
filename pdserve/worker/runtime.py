"""The life of a worker process: it loads, starts three threads, serves and stops.

The loop thread lives one life after the other: a role flip ends a life, and the next one has the other role. The engine thread,
the weights and the KV pool stay.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from kvtransfer.backends.registry import prepare
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.progress import Progress, silent
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, WorkerConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import ReplicaLost
from pdserve.core.ids import Incarnation
from pdserve.core.roofline.flops import StepFlops
from pdserve.core.roofline.shape import ModelShape
from pdserve.core.roofline.step_counts import StepCounts
from pdserve.core.worker import WorkerLoad
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.memory.host import resident_bytes
from pdserve.engine.peaks import Peaks, peaks_of
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.warm_up import check_before_loading, settle
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2
from pdserve.structured.compilations import GrammarSource
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.engine_thread import EngineThread, Runner
from pdserve.worker.engine_view import EngineView, step_timeout_s
from pdserve.worker.kv_staging import most_staged_bytes
from pdserve.worker.life import Lasting, Life
from pdserve.worker.mailbox import Mailbox
from pdserve.worker.member import LinkMember
from pdserve.worker.memory_report import MemoryReport
from pdserve.worker.messages import EngineSnapshot, StepEvents

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0005
"""The interval at which Python's threads switch. Three threads share the GIL: 300 small torch operations beside a busy Python
thread take 0.3 to 8 ms with this interval, and a median of up to 438 ms with Python's default of 5 ms (measured)."""
GC_OBJECTS: Final = 20_000
START_TIMEOUT_S: Final = 60.0
FAILED_LOAD_STOP_S: Final = 1.0  # the thread has ended, unless the load took too long
LAG_PERIOD_S: Final = 0.5


class RunningWorker:
    """One worker, which `start` brings up. `wait` returns its exit status; `stop` ends it and is idempotent."""

    def __init__(self, config: WorkerConfig, role: common_pb2.Role, progress: Progress = silent) -> None:
        """`role` is the role of the first life. `progress` is told how far the loading is."""
        self._config = config
        self._progress = progress
        self._role = role
        self._ends = False
        """True: a drain was asked for, so no further life begins."""
        self._exit: Future[int] = Future()
        self._first_snapshot: EngineSnapshot | None = None
        self._stop_requested: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._view: EngineView | None = None
        self._member: LinkMember | None = None
        self._started: Future[None] = Future()
        self.incarnation = Incarnation(0)
        """The incarnation of the present life; 0 before the first one. The address and the role are those of the same life."""
        self.address = ""
        self.role = codec.role_from_wire(role).value
        self.memory = MemoryReport()
        self.computes = ""
        """A description, in words, of how steps are computed. It is empty until the worker has started."""
        self._step_bytes = 0
        self._step_timeout_s = config.engine.step_timeout_s
        self._peaks = Peaks()
        self.load_s = 0.0

    def start(self) -> RunningWorker:
        """Load the model and bring the services up. Raises what went wrong; nothing runs any more then."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        transport, host = self._config.transfer.transport, self._config.host
        self._make_transport = prepare(transport, host, allow_public=self._config.allow_public_bind)
        began_s = time.monotonic()
        engine = self._config.engine
        directory = resolve(engine.model, progress=self._progress, load_format=engine.load_format)
        self._card = ModelCard.load(directory, engine.model_family, load_format=engine.load_format)
        self._tokenizer = Tokenizer.load(directory)
        self._grammars = GrammarSource(self._tokenizer, self._card.vocab_size, self._card.eos_token_ids)
        self._preparing = threading.Thread(target=self._grammars.prepare, name="vocabulary", daemon=True)
        self._preparing.start()
        self._runner: ModelRunner | None = None
        self._events: Mailbox[StepEvents] = Mailbox(self._on_step)
        self._engine = EngineThread(lambda: self._build(directory), self._events.put, self._die, self._sums_of, self._counts_of)
        try:
            self._engine.start(self._config.start_timeout_s)
        except BaseException:
            self._stop_engine(FAILED_LOAD_STOP_S)
            raise
        self._thread = threading.Thread(target=self._run_loop, name="loop", daemon=True)
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        assert self._runner is not None
        _spare_garbage_collector()
        self.memory = self._measure(self._runner)
        self.load_s = time.monotonic() - began_s
        self.computes = self._runner.describe()
        log.info(
            "%s ready at %s in %.1f s; %s; a step may take %.0f s; memory: %s",
            self._config.worker_id,
            self.address,
            self.load_s,
            self.computes,
            self._step_timeout_s,
            self.memory,
        )
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """End link, services, transport and engine. This takes at most about twice `timeout_s`."""
        if self._loop is not None and self._stop_requested is not None:
            try:
                self._loop.call_soon_threadsafe(self._stop_requested.set)
            except RuntimeError:
                pass  # the loop has ended by itself
            self._thread.join(timeout_s)
        self._stop_engine(timeout_s)
        if not self._exit.done():
            self._exit.set_result(0)

    def _stop_engine(self, timeout_s: float) -> None:
        if self._engine.stop(timeout_s):
            self._events.close()
        else:  # the thread may still put events
            log.error("the engine thread did not stop within %.0f s", timeout_s)

    def drain(self) -> None:
        """Take no new request, finish the ones that are here, then stop; `wait` then returns. Any thread may call it.
        Idempotent."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                pass  # the loop has ended by itself

    def wait(self, timeout_s: float | None) -> int | None:
        """Return the exit status. Return None when the worker still runs after `timeout_s`; None waits without a limit."""
        try:
            return self._exit.result(timeout_s)
        except TimeoutError:
            return None

    @property
    def kv(self) -> KvPool:
        """The KV pool, which the engine writes."""
        assert self._runner is not None
        return self._runner.kv

    @property
    def healthy(self) -> bool:
        """True while the worker runs."""
        return not self._exit.done()

    def _measure(self, runner: ModelRunner) -> MemoryReport:
        """Measure the memory of this process before its first request."""
        kv, weights, step = runner.kv, runner.weights_bytes, self._step_bytes
        here = weights + step + kv.nbytes if kv.device.type == "cpu" else 0
        rest = max(0, resident_bytes() - here)
        blocks = kv.tokens // kv.spec.block_size
        held = kv.spec.held_tokens([cache.num_blocks for cache in kv.caches])
        return MemoryReport(weights, step, kv.nbytes, rest, blocks, kv.spec.block_size, runner.max_model_len, held)

    def _converts(self, engine: EngineConfig) -> int:
        """Return the bytes that staging may take. Decode workers stage, and those that may become one: they read from peers of
        any dtype."""
        spec = self._card.kv_layout(engine.block_size, engine.dtype, engine.kv_cache_dtype)
        decodes = self._role == common_pb2.ROLE_DECODE or not self._config.flip_obstacle
        return sum(map(most_staged_bytes, spec.groups)) if decodes else 0

    # Engine thread.

    def _build(self, directory: Path) -> tuple[Runner, Scheduler, BlockPools]:
        engine = self._config.engine
        check_before_loading(self._card, engine)
        later = self._converts(engine)
        runner = ModelRunner.load(directory, self._card, engine, later=later, progress=self._progress)
        self._preparing.join()  # it holds the interpreter, which would slow the steps that are measured now
        settled = settle(runner, engine, later=later)
        self._step_bytes = settled.step_bytes
        self._step_timeout_s = step_timeout_s(engine.step_timeout_s, settled.slowest_s)
        flops = StepFlops.of(ModelShape.of(self._card.spec)).chunk(0, settled.prompt_tokens)
        seen_flops_per_s = flops / settled.prompt_s
        self._peaks = peaks_of(runner.kv, engine, rate=runner.product_rate, seen_flops_per_s=seen_flops_per_s)
        caches = runner.kv.caches
        pool = BlockPools(*[cache.num_blocks for cache in caches], layouts=[cache.layout for cache in caches])
        scheduler = Scheduler(
            pool,
            engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.batched_tokens(runner.kv.device.type),
            max_model_len=runner.max_model_len,
            eos_token_ids=self._card.eos_token_ids,
            prefix_salt=runner.model_digest.encode() if engine.enable_prefix_caching else None,
            drafts_obstacle=runner.drafts_obstacle,
        )
        self._runner = runner
        scheduler.rates.add(settled.prompt_tokens, 0, settled.prompt_s)
        self._first_snapshot = EngineSnapshot(
            WorkerLoad(
                pool.counts(),
                prompt_tokens_per_s=scheduler.rates.prompt_tokens_per_s,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
            )
        )
        return runner, scheduler, pool

    def _sums_of(self) -> tuple[BlockSums, ...] | None:
        """Return a function for each KV group that sums its blocks. None: checksums are off."""
        if not self._config.lease.kv_checksum:
            return None
        return tuple(BlockSums(cache.blocks) for cache in self.kv.caches)

    def _counts_of(self) -> StepCounts:
        assert self._runner is not None
        shape = ModelShape.of(self._card.spec)
        return StepCounts(StepFlops.of(shape), self._runner.traffic(shape), self._runner.expert_load)

    def _die(self, exc: BaseException) -> None:
        """Set exit status 1, because a thread died of a bug. The state of this process cannot be trusted, so it ends and is
        started again."""
        log.critical("a worker thread died", exc_info=exc)
        if not self._exit.done():
            self._exit.set_result(1)

    # Loop thread.

    def _on_step(self, events: StepEvents) -> None:
        taker = self._member or self._view
        if taker is not None:
            taker.on_step(events)

    def _drain(self) -> None:
        self._ends = True
        if self._member is not None:
            self._member.drain()

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:  # noqa: BLE001 - reported to `start` or `wait`
            if not self._started.done():
                self._started.set_exception(exc)
            else:
                self._die(exc)
        else:
            if not self._exit.done():
                self._exit.set_result(0)  # stopped, or drained; the engine thread is ended by `stop` or with the process

    async def _serve(self) -> None:
        """Live one life after the other, until the worker ends."""
        self._stop_requested = stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        lasting = self._make_lasting()
        self._view = lasting.engine
        self._events.attach()
        try:
            role: common_pb2.Role | None = self._role
            for flips in itertools.count():
                if role is None or stop.is_set() or self._ends:
                    return
                role = await self._live(Life(lasting, role, flips), stop)
        finally:
            self._events.detach()

    async def _live(self, life: Life, stop: asyncio.Event) -> common_pb2.Role | None:
        """Live one life, and return the role of the next one. Raises `ReplicaLost` instead when this one may still write."""
        next_role, clean = None, False
        try:
            await life.open()
            self.address, self.incarnation, self._member = life.address, life.incarnation, life.member
            self.role = life.role
            if self._ends:
                life.member.drain()
            if not self._started.done():
                self._started.set_result(None)
            next_role = await life.run(stop)
        finally:
            clean = await life.close()
        if next_role is not None and not clean:
            raise ReplicaLost("the role cannot change: a read of this process may still write into the KV pool")
        return next_role

    def _make_lasting(self) -> Lasting:
        assert self._runner is not None
        assert self._first_snapshot is not None
        engine = EngineView(
            self._first_snapshot,
            self._engine.submit,
            step_timeout_s=self._step_timeout_s,
            prefix_caching=self._config.engine.enable_prefix_caching,
            peak_flops_per_s=self._peaks.flops_per_s,
            peak_bytes_per_s=self._peaks.bytes_per_s,
        )
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        make_transport = self._make_transport
        return Lasting(
            self._config, self._card, self._tokenizer, self._runner, engine, make_transport, niceness, self._grammars.start
        )


def _spare_garbage_collector() -> None:
    """Keep the garbage collector from walking the loaded objects again: no thread runs during such a walk of 300 ms (measured).

    A step of 256 sequences makes 1,500 objects and drops them. With Python's threshold of 700 it would pay for two walks.
    Where the collector rests during the load, in an actor's process, nothing that takes memory became garbage: 9,158 of 344,443
    objects, and no page of memory, for a first walk of 0.17 s.
    """
    if gc.isenabled():  # this process may have had another worker, whose memory would stay
        gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
