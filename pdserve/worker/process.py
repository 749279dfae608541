"""A worker process: it loads, starts three threads, serves and stops. `run` is the command line of a worker without Ray.

The loop thread lives one life after the other. A life is a role with its own incarnation, transport, address and link: a role
flip ends a life, and the next one has the other role. The engine thread, the weights and the KV pool stay, and nothing else
does: leases, tickets, handles and connections belong to an incarnation, and so end with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
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
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import click
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve import plugins
from pdserve.checkpoint.progress import Progress, silent
from pdserve.config import WorkerConfig, load
from pdserve.core.errors import ConfigError, InternalBug, ReplicaLost
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.observe.logs import flush_logs, setup_logging
from pdserve.observe.title import set_title
from pdserve.rpc import codec
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.engine import WorkerEngine
from pdserve.worker.engine_thread import EngineView
from pdserve.worker.host import Host, close_role
from pdserve.worker.member import LinkMember
from pdserve.worker.openengine.port import OpenEnginePort
from pdserve.worker.start_report import MemoryReport

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0005
"""The interval at which Python's threads switch. Three threads share the GIL: 300 small torch operations beside a busy Python
thread take 0.3 to 8 ms with this interval, and a median of up to 438 ms with Python's default of 5 ms (measured)."""
GC_OBJECTS: Final = 20_000
START_TIMEOUT_S: Final = 60.0
FAILED_LOAD_STOP_S: Final = 1.0
LAG_PERIOD_S: Final = 0.5


ENGINES: Final = {
    "pdserve": "pdserve.worker.own_engine:OwnEngine",
    "vllm": "pdserve.worker.vllm.engine:VllmEngine",
}
"""The class of each engine. Only the one that is used is imported: a worker of vLLM's loads no torch."""


class RunningWorker:
    """One worker, which `start` brings up. `wait` returns its exit status; `stop` ends it and is idempotent."""

    def __init__(self, config: WorkerConfig, role: common_pb2.Role, progress: Progress = silent) -> None:
        """`role` is the role of the first life. `progress` is told how far the loading is."""
        self.config = config
        make_engine = plugins.resolve(config.engine.backend, ENGINES, "engine.backend")
        self.engine: WorkerEngine = make_engine(config, role, progress, self._die)
        self._role = role
        self._ends = False
        """True: a drain was asked for, so no further life begins."""
        self._exit: Future[int] = Future()
        self._stop_requested: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._member: LinkMember | None = None
        self._started: Future[None] = Future()
        self.incarnation = Incarnation(0)
        """The incarnation of the present life; 0 before the first one. The address and the role are those of the same life."""
        self.address = ""
        self.openengine_address = ""
        """The address at which the present life serves OpenEngine. Empty: it does not."""
        self.role = codec.role_from_wire(role).value
        self.memory = MemoryReport()
        self.computes = ""
        """A description, in words, of how steps are computed. It is empty until the worker has started."""
        self.load_s = 0.0

    def start(self) -> RunningWorker:
        """Load the model and bring the services up. Raises what went wrong; nothing runs any more then."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        began_s = time.monotonic()
        try:
            self.engine.load()
        except BaseException:
            self.engine.stop(FAILED_LOAD_STOP_S)
            raise
        self._thread = threading.Thread(target=self._run_loop, name="loop", daemon=True)
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        _spare_garbage_collector()
        self.memory = self.engine.memory
        self.load_s = time.monotonic() - began_s
        self.computes = self.engine.describe()
        if self.openengine_address:
            log.info("%s serves OpenEngine at %s", self.config.worker_id, self.openengine_address)
        log.info(
            "%s ready at %s in %.1f s; %s; memory: %s",
            self.config.worker_id,
            self.address,
            self.load_s,
            self.computes,
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
        self.engine.stop(timeout_s)
        if not self._exit.done():
            self._exit.set_result(0)

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

    def on_end(self, call: Callable[[], object]) -> None:
        """Call `call` once `wait` has an exit status to return, in any thread; at once if it has one."""
        self._exit.add_done_callback(lambda _: call())

    @property
    def healthy(self) -> bool:
        """True while the worker runs."""
        return not self._exit.done()

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
        view = await self.engine.open()
        try:
            role: common_pb2.Role | None = self._role
            for flips in itertools.count():
                if role is None or stop.is_set() or self._ends:
                    return
                role = await self._live(Life(self, view, role, flips), stop)
        finally:
            await self.engine.close()

    async def _live(self, life: Life, stop: asyncio.Event) -> common_pb2.Role | None:
        """Live one life, and return the role of the next one. Raises `ReplicaLost` instead when this one may still write."""
        next_role, clean = None, False
        try:
            await life.open()
            self.address, self.incarnation, self._member = life.address, life.incarnation, life.member
            self.openengine_address = life.openengine.address if life.openengine is not None else ""
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
        self._transfer = worker.engine.make_transfer(WorkerId(worker.config.worker_id), self.incarnation)
        self._staging = worker.engine.make_staging(self._transfer)
        self._server = grpc.aio.server(options=server_options())
        send = self.member.link.send
        opens = worker.config.openengine_port is not None
        self.openengine = OpenEnginePort(worker.config, send, view.largest_batch) if opens else None

    async def open(self) -> None:
        """Start transport, role and services. Raises what went wrong; `close` must follow then, too."""
        worker, engine = self._worker, self._worker.engine
        await engine.take_role(self._role)
        agent_metadata = await self._transfer.start()
        self.address = self._bind()
        host = Host(
            config=worker.config,
            traits=engine.traits,
            card=engine.card,
            model_digest=engine.model_digest,
            numerics=engine.numerics,
            kv_spec=engine.kv_spec,
            regions=engine.regions,
            tokenizer=engine.tokenizer,
            max_model_len=engine.max_model_len,
            transport=engine.transport,
            incarnation=self.incarnation,
            transfer=self._transfer,
            agent_metadata=agent_metadata,
            address=self.address,
            server=self._server,
            submit=self._view.submit,
            send=self.member.link.send if self.openengine is None else self.openengine.send,
            start_grammar=engine.start_grammar,
            staging=self._staging,
            seq_ids=self._view.seq_ids,
        )
        self.member.start(host, plugins.resolve(codec.role_from_wire(self._role).value, ROLES, "role"))
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        await self._server.start()
        if self.openengine is not None:
            await self.openengine.start(host, self.member, codec.role_from_wire(self._role))

    async def run(self, stop: asyncio.Event) -> common_pb2.Role | None:
        """Run the link until the worker has drained or `stop` is set. Return the role of the next life, or None for the end.

        Raises `ReplicaLost` when a part is stuck, and otherwise what ended a part that is needed.
        """
        member = self.member
        needed = [asyncio.create_task(_watch_lag(member), name="lag")]
        if self._worker.config.router_address:
            needed.append(asyncio.create_task(member.link.run(), name="link"))
        if self.openengine is not None:
            needed.append(asyncio.create_task(self.openengine.run(member), name="openengine"))
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
        if self.openengine is not None:
            await self.openengine.close()
        if self.member.role is not None:
            ended = await close_role(self.member.role, self._transfer)
        await self._server.stop(grace=None)
        await self._transfer.close()
        if self._staging is not None:
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
            worker_config = _with_cores(load(WorkerConfig, config, overrides))
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
        flush_logs()
        # If rdma-core is installed, a process that created a UCX backend crashes in its exit handlers. All clean-up that
        # is needed has been done here.
        os._exit(status)

    command()


def _with_cores(config: WorkerConfig) -> WorkerConfig:
    """Return the settings of a worker that has this machine for itself. A gang gets as many threads as its ranks have cores.

    Raises `ConfigError` for a gang that needs more cores.
    """
    engine, cores = config.engine, len(os.sched_getaffinity(0))
    if engine.ranks > 1:
        engine = dataclasses.replace(engine, threads=engine.threads or max(1, cores // engine.ranks))
    engine.check_cores(cores)
    return dataclasses.replace(config, engine=engine)


def _stop_at_eof(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1):  # the interpreter cannot end while a thread reads a buffered file
        pass
    stop.set()


def _serve(worker: RunningWorker, drain: threading.Event, stop: threading.Event) -> int:
    """Serve until the worker ends by itself, which it also does when it has drained, or until `stop` is set. Return the exit
    status."""
    ready = {"event": "ready", "address": worker.address, "pid": os.getpid(), "load_s": round(worker.load_s, 3)}
    if worker.openengine_address:
        ready["openengine"] = worker.openengine_address
    print(json.dumps(ready), flush=True)
    while not stop.is_set():
        status = worker.wait(LOOK_S)  # a worker that breaks ends at once
        if status is not None:
            return status
        if drain.is_set():
            worker.drain()
    worker.stop()
    return worker.wait(0) or 0
