"""A worker process: it loads, starts three threads, serves and stops. `run` is the command line of a worker without Ray.

The loop thread lives one life after the other. A life is a role with its own incarnation, transport, address and link: a role
flip ends a life, and the next one has the other role. The engine thread, the weights and the KV pool stay, and nothing else
does: leases, tickets, handles and connections belong to an incarnation, and so end with it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import click
import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvtransfer.api import Region
from kvtransfer.backends.registry import prepare
from kvtransfer.staging import STAGING_BLOCKS, Staging
from kvtransfer.thread import TransferThread
from pdserve import plugins
from pdserve.checkpoint.card import KV_DTYPES, ModelCard
from pdserve.checkpoint.progress import Progress, silent
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, WorkerConfig, load
from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import ConfigError, InternalBug, ReplicaLost
from pdserve.core.ids import BlockSum, Incarnation, WorkerId
from pdserve.core.kv_layout import DTYPE_BITS, KvGroup
from pdserve.core.roofline import ModelShape, StepCounts, StepFlops
from pdserve.core.worker import WorkerLoad
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.memory.host import resident_bytes
from pdserve.engine.numerics import numerics_of
from pdserve.engine.peaks import Peaks, peaks_of
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.warm_up import check_before_loading, settle
from pdserve.observe.logs import setup_logging
from pdserve.observe.title import set_title
from pdserve.rpc import codec
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import common_pb2
from pdserve.structured.compilations import GrammarSource, StartGrammar
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.engine_thread import EngineThread, EngineView, Mailbox, Runner, step_timeout_s
from pdserve.worker.host import Host, close_role, device_of, region_of
from pdserve.worker.member import LinkMember
from pdserve.worker.messages import EngineSnapshot, SetLending, StepEvents
from pdserve.worker.start_report import MemoryReport

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
        self.config = config
        self._progress = progress
        self._role = role
        self._ends = False
        """True: a drain was asked for, so no further life begins."""
        self._exit: Future[int] = Future()
        self._first_snapshot: EngineSnapshot | None = None
        self._stop_requested: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
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
        transport, host = self.config.transfer.transport, self.config.host
        self.make_transport = prepare(transport, host, allow_public=self.config.allow_public_bind)
        began_s = time.monotonic()
        engine = self.config.engine
        directory = resolve(engine.model, progress=self._progress, load_format=engine.load_format)
        self.card = ModelCard.load(directory, engine.model_family, load_format=engine.load_format)
        self.tokenizer = Tokenizer.load(directory)
        self._grammars = GrammarSource(self.tokenizer, self.card.vocab_size, self.card.eos_token_ids)
        self._preparing = threading.Thread(target=self._grammars.prepare, name="vocabulary", daemon=True)
        self._preparing.start()
        self._runner: ModelRunner | None = None
        self._events: Mailbox[StepEvents] = Mailbox()
        self._engine = EngineThread(lambda: self._build(directory), self._events.put, self._die, self._sums_of, self._counts_of)
        try:
            self._engine.start(self.config.start_timeout_s)
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
        _spare_garbage_collector()
        self.memory = self._measure(self.runner)
        self.load_s = time.monotonic() - began_s
        self.computes = self.runner.describe()
        log.info(
            "%s ready at %s in %.1f s; %s; a step may take %.0f s; memory: %s",
            self.config.worker_id,
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
    def runner(self) -> ModelRunner:
        """The model, once it is loaded."""
        assert self._runner is not None
        return self._runner

    @property
    def kv(self) -> KvPool:
        """The KV pool, which the engine writes."""
        return self.runner.kv

    @property
    def start_grammar(self) -> StartGrammar:
        """Compiles the constraint of a request."""
        return self._grammars.start

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
        spec = self.card.kv_layout(engine.block_size, engine.dtype, engine.kv_cache_dtype)
        decodes = self._role == common_pb2.ROLE_DECODE or not self.config.flip_obstacle
        return sum(map(most_staged_bytes, spec.groups)) if decodes else 0

    # Engine thread.

    def _build(self, directory: Path) -> tuple[Runner, Scheduler, BlockPools]:
        engine = self.config.engine
        check_before_loading(self.card, engine)
        later = self._converts(engine)
        runner = ModelRunner.load(directory, self.card, engine, later=later, progress=self._progress)
        runner.numerics = numerics_of(runner, self.card, engine)
        self._preparing.join()  # it holds the interpreter, which would slow the steps that are measured now
        settled = settle(runner, engine, later=later)
        self._step_bytes = settled.step_bytes
        self._step_timeout_s = step_timeout_s(engine.step_timeout_s, settled.slowest_s)
        flops = StepFlops.of(ModelShape.of(self.card.spec)).chunk(0, settled.prompt_tokens)
        seen_flops_per_s = flops / settled.prompt_s
        self._peaks = peaks_of(runner.kv, engine, products=runner.products, seen_flops_per_s=seen_flops_per_s)
        caches = runner.kv.caches
        pool = BlockPools(*[cache.num_blocks for cache in caches], layouts=[cache.layout for cache in caches])
        scheduler = Scheduler(
            pool,
            engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.batched_tokens(runner.kv.device.type),
            max_model_len=runner.max_model_len,
            eos_token_ids=self.card.eos_token_ids,
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
        if not self.config.lease.kv_checksum:
            return None
        return tuple(BlockSums(cache.blocks) for cache in self.kv.caches)

    def _counts_of(self) -> StepCounts:
        shape = ModelShape.of(self.card.spec)
        return StepCounts(StepFlops.of(shape), self.runner.traffic(shape), self.runner.expert_load)

    def _die(self, exc: BaseException) -> None:
        """Set exit status 1, because a thread died of a bug. The state of this process cannot be trusted, so it ends and is
        started again."""
        log.critical("a worker thread died", exc_info=exc)
        if not self._exit.done():
            self._exit.set_result(1)

    # Loop thread.

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
        view = self._make_view()
        self._events.attach(view.on_step)
        try:
            role: common_pb2.Role | None = self._role
            for flips in itertools.count():
                if role is None or stop.is_set() or self._ends:
                    return
                role = await self._live(Life(self, view, role, flips), stop)
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

    def _make_view(self) -> EngineView:
        assert self._first_snapshot is not None
        return EngineView(
            self._first_snapshot,
            self._engine.submit,
            step_timeout_s=self._step_timeout_s,
            prefix_caching=self.config.engine.enable_prefix_caching,
            peak_flops_per_s=self._peaks.flops_per_s,
            peak_bytes_per_s=self._peaks.bytes_per_s,
            isa=self.runner.isa,
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


ROLES: Final = {"prefill": "prefill_worker.role:PrefillRole", "decode": "decode_worker.role:DecodeRole"}
"""The class of each role. The two never import each other, and this package imports neither before it is needed."""


class Life:
    """One life of a worker. Call `open` and `run` once each, and `close` in any case. `flips` counts the lives before it. What
    outlives it belongs to the worker: configuration, model, engine and `view`."""

    def __init__(self, worker: RunningWorker, view: EngineView, role: common_pb2.Role, flips: int) -> None:
        self.incarnation = Incarnation(secrets.randbits(64))
        self.address = ""
        self.role = codec.role_from_wire(role).value
        self._worker = worker
        self._view = view
        self._role = role
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.member = LinkMember(worker.config, role, view, pid=os.getpid(), niceness=niceness, flips=flips)
        caches = worker.kv.caches
        self._regions = tuple(map(region_of, caches))
        self._transfer = self._make_transfer()
        self._staging = Staging(
            self._transfer,
            # The memory is that of our KV group that holds the same. The ticket was checked, so there is one.
            lambda layout, count: StagedKv(layout, count, next(c for c in caches if c.layout.holds_the_same_as(layout))),
        )
        self._server = grpc.aio.server(options=server_options())

    def _make_transfer(self) -> TransferThread:
        worker, regions = self._worker, self._regions
        worker_id = WorkerId(worker.config.worker_id)
        sums = {region: BlockSums(cache.blocks, beside=True) for region, cache in zip(regions, worker.kv.caches, strict=True)}
        return TransferThread(
            lambda: worker.make_transport(worker_id, self.incarnation, regions),
            sum_blocks=sums if worker.config.lease.kv_checksum else None,
        )

    async def open(self) -> None:
        """Start transport, role and services. Raises what went wrong; `close` must follow then, too."""
        worker = self._worker
        agent_metadata = await self._transfer.start()
        self.address = self._bind()
        host = Host(
            config=worker.config,
            card=worker.card,
            model_digest=worker.runner.model_digest,
            numerics=worker.runner.numerics,
            kv_spec=worker.kv.spec,
            regions=self._regions,
            tokenizer=worker.tokenizer,
            max_model_len=worker.runner.max_model_len,
            incarnation=self.incarnation,
            transfer=self._transfer,
            agent_metadata=agent_metadata,
            address=self.address,
            server=self._server,
            submit=self._view.submit,
            send=self.member.link.send,
            start_grammar=worker.start_grammar,
            staging=self._staging,
            seq_ids=self._view.seq_ids,
        )
        self.member.start(host, plugins.resolve(codec.role_from_wire(self._role).value, ROLES, "role"))
        self._view.submit(SetLending(self._role == common_pb2.ROLE_PREFILL))
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        await self._server.start()

    async def run(self, stop: asyncio.Event) -> common_pb2.Role | None:
        """Run the link until the worker has drained or `stop` is set. Return the role of the next life, or None for the end.

        Raises `ReplicaLost` when a part is stuck, and otherwise what ended a part that is needed.
        """
        member = self.member
        needed = [
            asyncio.create_task(member.link.run(), name="link"),
            asyncio.create_task(_watch_lag(member), name="lag"),
        ]
        broken = asyncio.create_task(member.broken(), name="watch")
        drained = asyncio.create_task(member.drained(), name="drain")
        stopped = asyncio.create_task(stop.wait())
        tasks: list[asyncio.Task[Any]] = [*needed, broken, drained, stopped]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if broken in done:
                raise ReplicaLost(broken.result())
            for task in needed:
                if task in done:
                    task.result()  # raises the error that ended it
                    raise InternalBug(f"{task.get_name()} ended")
            if stopped in done:
                return None
            drained.result()  # raises if something is left that may still write
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return member.next_role  # a drain that came until the link ended has ended the flip

    async def close(self) -> bool:
        """End role, services and transport. Return True if nothing of this life can write into the pool any more."""
        ended = True
        if self.member.role is not None:
            ended = await close_role(self.member.role, self._transfer)
        await self._server.stop(grace=None)
        await self._transfer.close()
        self._staging.close()
        return ended and self._transfer.num_unstopped == 0 and not self._transfer.unhealthy.is_set()

    def _bind(self) -> str:
        """Open the port and return the address that peers use. Raises `ConfigError`, which names the settings."""
        config = self._worker.config
        try:
            bound = self._server.add_insecure_port(f"{config.host}:{config.port}")
        except RuntimeError as exc:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port}: set host to an address of this machine, port to a free one"
            ) from exc
        return f"{config.advertise_host or config.host}:{bound}"


async def _watch_lag(member: LinkMember) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        member.loop_lag_ms = max(0.0, (loop.time() - due_s) * 1000)


def most_staged_bytes(layout: KvGroup) -> int:
    """Return the bytes that staging takes in a worker with such a pool once peers of all other dtypes have come. Scales, which
    are a hundredth of the bytes, are left out."""
    numbers = layout.data_bytes * 8 // DTYPE_BITS[layout.dtype]
    bits = sum(DTYPE_BITS[dtype] for dtype in KV_DTYPES.values() if dtype != layout.dtype)
    return STAGING_BLOCKS * numbers * bits // 8


class StagedKv:
    """Staging blocks of a peer's layout, on the device of our pool. See `kvtransfer.staging.StagingBlocks`."""

    def __init__(self, layout: KvGroup, num_blocks: int, kv: KvCache) -> None:
        device = kv.device
        self._source, self._target = layout, kv.layout
        self._staged = torch.empty(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self._sums = BlockSums(self._staged, beside=True)
        self._pool = kv.blocks
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # One block fits a CPU's cache, so the conversion of one block after the other is up to 5 times as fast (bf16 to int8).
        self._step = 1 if self._stream is None else num_blocks

    def sums(self, staged: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return the checksums of these staging blocks, in order. Runs in the converter thread."""
        return self._sums(staged)

    @property
    def region(self) -> Region:
        """The region of the staging blocks."""
        staged = self._staged
        return Region(staged.data_ptr(), len(staged), self._source.block_bytes, device_of(staged))

    def convert(self, staged: Sequence[int], local: Sequence[int], tokens: int) -> None:
        """Convert staging blocks into the `local` blocks of the pool, and write no others. Return when all are written.

        The blocks hold `tokens` tokens; all are full except the last. Runs in the converter thread.
        """
        with torch.inference_mode(), torch.cuda.stream(self._stream):  # a stream of None changes nothing
            for first in range(0, len(staged), self._step):
                ours, theirs = list(local[first : first + self._step]), list(staged[first : first + self._step])
                left = min(tokens - first * self._source.block_size, len(theirs) * self._source.block_size)
                self._pool[ours] = convert_blocks(self._staged[theirs], self._source, self._target, left)
        if self._stream is not None:
            self._stream.synchronize()


LOOK_S: Final = 0.2


def run(start: Callable[[WorkerConfig], RunningWorker], role: str) -> None:
    """Run the command line of one role. It never returns: the process ends with the worker's exit status, or with 2 for a
    wrong setting."""

    @click.command(
        name=f"{role}_worker", help=f"Run one {role} worker. SIGTERM or Ctrl-C drains it; a second one stops it at once."
    )
    @click.option(
        "--config", type=click.Path(dir_okay=False), required=True, help="YAML file with the settings of WorkerConfig."
    )
    @click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override one setting.")
    @click.option("--log-level", default="info", show_default=True)
    @click.option("--exit-with-parent", is_flag=True, help="Stop when standard input closes.")
    def command(config: str, overrides: tuple[str, ...], log_level: str, exit_with_parent: bool) -> None:
        setup_logging(log_level)
        try:
            worker_config = load(WorkerConfig, config, overrides)
            set_title(worker_config.worker_id)
            drain, stop = threading.Event(), threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set() if drain.is_set() else drain.set())
            if exit_with_parent:
                threading.Thread(target=_stop_at_eof, args=(stop,), daemon=True).start()
            status = _serve(start(worker_config), drain, stop)
        except ConfigError as exc:
            print(f"error: {exc.message}", file=sys.stderr)
            status = 2
        sys.stdout.flush()
        sys.stderr.flush()
        logging.shutdown()
        # If rdma-core is installed, a process that created a UCX backend crashes in its exit handlers. All clean-up that
        # is needed has been done here.
        os._exit(status)

    command()


def _stop_at_eof(stop: threading.Event) -> None:
    sys.stdin.buffer.read()
    stop.set()


def _serve(worker: RunningWorker, drain: threading.Event, stop: threading.Event) -> int:
    """Serve until the worker ends by itself, which it also does when it has drained, or until `stop` is set. Return the exit
    status."""
    ready = {"event": "ready", "address": worker.address, "pid": os.getpid(), "load_s": round(worker.load_s, 3)}
    print(json.dumps(ready), flush=True)
    while not stop.wait(LOOK_S):
        if drain.is_set():
            worker.drain()
        status = worker.wait(0)
        if status is not None:
            return status
    worker.stop()
    return worker.wait(0) or 0
