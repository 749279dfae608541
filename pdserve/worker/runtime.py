"""The life of a worker process: it loads, starts three threads, serves and stops.

The role, prefill or decode, is an object that gets the router's commands and the engine's events. It runs on the loop
thread.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvtransfer.backends.registry import prepare
from kvtransfer.reads.thread import TransferThread
from kvtransfer.staging.staging import Staging
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, WorkerConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import ConfigError, InternalBug, ReplicaLost
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.worker import WorkerLoad
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.memory.host import resident_bytes
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.warm_up import check_before_loading, settle
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import common_pb2
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.engine_thread import EngineThread, Runner
from pdserve.worker.engine_watch import step_timeout_s
from pdserve.worker.host import Host, RoleFactory, close_role, region_of
from pdserve.worker.kv_staging import StagedKv, most_staged_bytes
from pdserve.worker.mailbox import Mailbox
from pdserve.worker.member import Member
from pdserve.worker.memory_report import MemoryReport
from pdserve.worker.messages import EngineSnapshot, StepEvents

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0005
"""The interval at which Python's threads switch. Three threads share the GIL: 300 small torch operations beside a busy Python
thread take 0.3 to 8 ms with this interval, and a median of up to 438 ms with Python's default of 5 ms (measured)."""
GC_OBJECTS: Final = 20_000
LOAD_TIMEOUT_S: Final = 600.0
START_TIMEOUT_S: Final = 60.0
FAILED_LOAD_STOP_S: Final = 1.0  # the thread has ended, unless the load took too long
LAG_PERIOD_S: Final = 0.5


class RunningWorker:
    """One worker, which `start` brings up. `wait` returns its exit status; `stop` ends it and is idempotent."""

    def __init__(self, config: WorkerConfig, role: common_pb2.Role, make_role: RoleFactory) -> None:
        self._config = config
        self._role_number = role
        self._make_role = make_role
        self.incarnation = Incarnation(secrets.randbits(64))
        self._exit: Future[int] = Future()
        self._first_snapshot: EngineSnapshot | None = None
        self._stop_requested: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._member: Member | None = None
        self._started: Future[None] = Future()
        self.address = ""
        self.memory = MemoryReport()
        self.computes = ""
        """A description, in words, of how steps are computed. It is empty until the worker has started."""
        self._step_bytes = 0
        self._step_timeout_s = config.engine.step_timeout_s
        self.load_s = 0.0

    def start(self) -> RunningWorker:
        """Load the model and bring the services up. Raises what went wrong; nothing runs any more then."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        transport, host = self._config.transfer.transport, self._config.host
        self._make_transport = prepare(transport, host, allow_public=self._config.allow_public_bind)
        began_s = time.monotonic()
        directory = resolve(self._config.engine.model)
        self._card = ModelCard.load(directory, self._config.engine.model_family)
        self._tokenizer = Tokenizer.load(directory)
        self._runner: ModelRunner | None = None
        self._events: Mailbox[StepEvents] = Mailbox(self._on_step)
        self._engine = EngineThread(lambda: self._build(directory), self._events.put, self._die, self._sums_of)
        try:
            self._engine.start(LOAD_TIMEOUT_S)
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
        return MemoryReport(weights, step, kv.nbytes, rest, kv.num_blocks, kv.spec.block_size, runner.max_model_len)

    def _converts(self, engine: EngineConfig) -> int:
        """Return the bytes that staging may take. Only decode workers stage: they read from peers of any dtype."""
        spec = self._card.kv_layout(engine.block_size, engine.dtype, engine.kv_cache_dtype)
        return sum(map(most_staged_bytes, spec.groups)) if self._role_number == common_pb2.ROLE_DECODE else 0

    # Engine thread.

    def _build(self, directory: Path) -> tuple[Runner, Scheduler, BlockPools]:
        engine = self._config.engine
        check_before_loading(self._card, engine)
        later = self._converts(engine)
        runner = ModelRunner.load(directory, self._card, engine, later=later)
        settled = settle(runner, engine, later=later)
        self._step_bytes = settled.step_bytes
        self._step_timeout_s = step_timeout_s(engine.step_timeout_s, settled.slowest_s)
        pool = BlockPools(*[cache.num_blocks for cache in runner.kv.caches])
        scheduler = Scheduler(
            pool,
            engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.batched_tokens(runner.kv.device.type),
            max_model_len=runner.max_model_len,
            eos_token_ids=self._card.eos_token_ids,
            prefix_salt=self._card.fingerprint.encode() if engine.enable_prefix_caching else None,
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
        """Return a function for each KV group that sums its blocks. None: this worker lends no blocks, or checksums are off."""
        if self._role_number != common_pb2.ROLE_PREFILL or not self._config.lease.kv_checksum:
            return None
        return tuple(BlockSums(cache.blocks) for cache in self.kv.caches)

    def _die(self, exc: BaseException) -> None:
        """Set exit status 1, because a thread died of a bug. The state of this process cannot be trusted, so it ends and is
        started again."""
        log.critical("a worker thread died", exc_info=exc)
        if not self._exit.done():
            self._exit.set_result(1)

    # Loop thread.

    def _on_step(self, events: StepEvents) -> None:
        if self._member is not None:
            self._member.on_step(events)

    def _drain(self) -> None:
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
        self._stop_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        assert self._runner is not None
        assert self._first_snapshot is not None
        runner, config = self._runner, self._config
        caches = runner.kv.caches
        regions = tuple(map(region_of, caches))
        sums = {region: BlockSums(cache.blocks, beside=True) for region, cache in zip(regions, caches, strict=True)}
        worker_id = WorkerId(config.worker_id)
        transfer = TransferThread(
            lambda: self._make_transport(worker_id, self.incarnation, regions),
            sum_blocks=sums if config.lease.kv_checksum else None,
        )
        staging = Staging(transfer, lambda layout, count: StagedKv(layout, count, _cache_for(layout, caches)))
        server = grpc.aio.server(options=server_options())
        try:
            agent_metadata = await transfer.start()
            self.address = self._bind(server)
            member = Member(
                config,
                self._role_number,
                self._first_snapshot,
                self._engine.submit,
                step_timeout_s=self._step_timeout_s,
                pid=os.getpid(),
                niceness=os.getpriority(os.PRIO_PROCESS, 0),
            )
            host = Host(
                config=config,
                card=self._card,
                kv_spec=runner.kv.spec,
                regions=regions,
                tokenizer=self._tokenizer,
                max_model_len=runner.max_model_len,
                incarnation=self.incarnation,
                transfer=transfer,
                agent_metadata=agent_metadata,
                address=self.address,
                server=server,
                submit=member.submit,
                send=member.link.send,
                staging=staging,
            )
            member.start(host, self._make_role)
            self._member = member
            self._events.attach()
            await self._run_services(server, member)
        finally:
            self._events.detach()
            if self._member is not None and self._member.role is not None:
                await close_role(self._member.role, transfer)
            await server.stop(grace=None)
            await transfer.close()
            staging.close()

    async def _run_services(self, server: grpc.aio.Server, member: Member) -> None:
        """Run link and services until a stop is asked for, the worker has drained, or a needed part has ended.

        Raises `ReplicaLost` when a part is stuck, and otherwise what ended the part.
        """
        assert self._stop_requested is not None
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await server.start()
        tasks = [
            asyncio.create_task(member.link.run(), name="link"),
            asyncio.create_task(_watch_lag(member), name="lag"),
        ]
        broken = asyncio.create_task(member.broken(), name="watch")
        drained = asyncio.create_task(member.drained(), name="drain")
        stop = asyncio.create_task(self._stop_requested.wait())
        self._started.set_result(None)
        try:
            done, _ = await asyncio.wait([*tasks, broken, stop, drained], return_when=asyncio.FIRST_COMPLETED)
            if broken in done:
                raise ReplicaLost(broken.result())
            for task in done - {stop, drained}:
                task.result()  # raises the error that ended it
                raise InternalBug(f"{task.get_name()} ended")
        finally:
            for task in [*tasks, broken, stop, drained]:
                task.cancel()
            await asyncio.gather(*tasks, broken, stop, drained, return_exceptions=True)

    def _bind(self, server: grpc.aio.Server) -> str:
        """Open the port and return the address that peers use. Raises `ConfigError`, which names the settings."""
        host, port = self._config.host, self._config.port
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as exc:
            raise ConfigError(
                f"cannot listen on {host}:{port}: set host to an address of this machine, port to a free one"
            ) from exc
        return f"{self._config.advertise_host or host}:{bound}"


def _cache_for(layout: KvGroup, caches: Sequence[KvCache]) -> KvCache:
    """Return the memory of our KV group that holds the same as blocks of `layout`. The ticket was checked, so there is one."""
    return next(cache for cache in caches if cache.layout.holds_the_same_as(layout))


def _spare_garbage_collector() -> None:
    """Keep the garbage collector from walking the loaded objects again: no thread runs during such a walk of 300 ms (measured).

    A step of 256 sequences makes 1,500 objects and drops them. With Python's threshold of 700 it would pay for two walks.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)


async def _watch_lag(member: Member) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        member.loop_lag_ms = max(0.0, (loop.time() - due_s) * 1000)
