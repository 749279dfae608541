"""A worker as its router knows it: it introduces itself, sends heartbeats, takes commands and drains. Loop thread only.

It knows no threads, no model and no transport, so both a real process and a simulation on virtual time can run it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import grpc

from pdserve.config import WorkerConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import WorkerId
from pdserve.core.worker import WorkerHello, check_step_tokens
from pdserve.rpc import codec
from pdserve.rpc.channel import open_channel
from pdserve.rpc.v1 import common_pb2, link_pb2
from pdserve.worker.engine_watch import LOOK_S, EngineWatch
from pdserve.worker.host import Host, Role, RoleFactory
from pdserve.worker.link import Link
from pdserve.worker.messages import Command, EngineSnapshot, SetBudget, StepEvents
from pdserve.worker.prefix_log import PrefixCursor, PrefixLog

log = logging.getLogger(__name__)

DRAIN_LOOK_S: Final = 0.1


class Member:
    """The membership of one worker in its cluster. Make it before the `Host`, which sends by its `link`; then call `start` with
    the host, and run the link."""

    def __init__(
        self,
        config: WorkerConfig,
        role_number: common_pb2.Role,
        snapshot: EngineSnapshot,
        submit: Callable[[Command], None],
        *,
        step_timeout_s: float,
        pid: int = 0,
        niceness: int = 0,
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self.role: Role | None = None
        self.loop_lag_ms = 0.0
        self._config = config
        self._role_number = role_number
        self._snapshot = snapshot
        self._largest_step = snapshot.load.max_num_batched_tokens  # in tokens; the engine has memory for it
        self._submit = submit
        self._watch = EngineWatch(step_timeout_s)
        self._pid = pid
        self._niceness = niceness
        self._host: Host | None = None
        self._drain_asked = asyncio.Event()
        self._prefixes = PrefixLog() if config.engine.enable_prefix_caching else None
        self._cursor = None if self._prefixes is None else PrefixCursor(self._prefixes)
        self.link = Link(
            config.router_address,
            config.cluster_token,
            self._hello,
            self._heartbeat,
            heartbeat_interval_s=config.heartbeat_interval_s,
            router_lost_s=config.router_lost_s,
            on_command=self._on_command,
            on_lost=self._on_link_lost,
            after_beat=self._tell_prefixes,
            open_channel=open_channel,
        )

    def start(self, host: Host, make_role: RoleFactory) -> None:
        """Set the host, and make the role on it."""
        self._host = host
        self.role = make_role(host)

    def submit(self, command: Command) -> None:
        """Give a command to the engine. Raises `Overloaded` when its queue is full."""
        self._submit(command)
        self._watch.submitted()

    def on_step(self, events: StepEvents) -> None:
        """Take the events of an engine step, and give them to the role."""
        self._watch.heard(events)
        if events.snapshot is not None:
            self._snapshot = events.snapshot
            if events.snapshot.keys is not None and self._prefixes is not None:
                self._prefixes.note(events.snapshot.keys)
        if self.role is not None:
            self.role.on_step(events)

    def drain(self) -> None:
        """Take no new request from now on; `drained` returns when none is left. Idempotent."""
        if self._host is not None and not self._host.draining:
            log.info("%s drains: it takes no new request", self._config.worker_id)
            self._host.draining = True
            self._drain_asked.set()
            self.link.beat_now()  # the router hears of it before any refusal that follows

    async def drained(self) -> None:
        """Return when a drain was asked for, and no request, lease, read, block or unsent message is left.

        Return also after `drain_timeout_s`.
        """
        await self._drain_asked.wait()
        loop, limit_s = asyncio.get_running_loop(), self._config.drain_timeout_s
        end_s = loop.time() + limit_s
        while not self.empty:
            if loop.time() >= end_s:
                log.warning(
                    "%s has not drained within %.0f s; it ends with %s", self._config.worker_id, limit_s, self._snapshot
                )
                return
            await asyncio.sleep(DRAIN_LOOK_S)
        await self.link.settle()
        log.info("%s has drained", self._config.worker_id)

    async def broken(self) -> str:
        """Wait until the engine or the transfer thread is stuck, tell the router, and return the reason.

        The process must then end: no thread can be stopped from outside, and nobody knows what a stuck one still writes.
        """
        watches = [asyncio.create_task(watch) for watch in (self._engine_stuck(), self._transfer_unhealthy())]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            reason = done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        log.error("%s is lost: %s", self._config.worker_id, reason)
        self.link.send(link_pb2.WorkerMessage(worker_lost=link_pb2.WorkerLost(message=reason)))
        await self.link.settle()
        return reason

    async def _engine_stuck(self) -> str:
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            last_s, looked_s = looked_s, loop.time()
            if self._watch.look(looked_s - last_s):
                return self._watch.reason

    async def _transfer_unhealthy(self) -> str:
        transfer = self._started()[0].transfer
        await transfer.unhealthy.wait()
        return transfer.unhealthy_reason

    @property
    def empty(self) -> bool:
        """True when no request, lease, read or block is left."""
        load, (_, role) = self._snapshot.load, self._started()
        blocks = load.blocks
        return role.idle and load.running_sequences == load.queued_requests == blocks.held == blocks.quarantined == 0

    def _started(self) -> tuple[Host, Role]:
        assert self._host is not None
        assert self.role is not None
        return self._host, self.role

    def _on_command(self, message: link_pb2.RouterMessage) -> None:
        body, (host, role) = message.WhichOneof("body"), self._started()
        if body == "drain":
            self.drain()
        elif body == "explain_work":
            self.link.send(host.stories.answer(message.explain_work))
        elif body == "prefix_resync":
            if self._cursor is not None:
                self._cursor.ask_full()
        elif body == "set_budget":
            self._set_budget(message.set_budget.max_num_batched_tokens)
        else:
            role.on_command(message)

    def _set_budget(self, tokens: int) -> None:
        """Give the step's budget to the engine. The next heartbeat after the engine has taken it tells it."""
        try:
            check_step_tokens(codec.hello_from_wire(self._hello()), tokens)
        except InvalidRequest as exc:  # the router checks the same, so its version differs from ours
            log.error("the router's budget is refused: %s", exc)
        else:
            self.submit(SetBudget(tokens))

    def _on_link_lost(self) -> None:
        host, role = self._started()
        role.on_link_lost()
        host.counted.forget()
        self._cursor = None if self._prefixes is None else PrefixCursor(self._prefixes)

    def _tell_prefixes(self) -> None:
        """Send what has changed among the keys of the pool. A heartbeat has just gone out, with the counts of the same
        snapshot."""
        if self._cursor is not None:
            delta = self._cursor.next(now_s=asyncio.get_running_loop().time())
            if delta is not None:
                self.link.send(link_pb2.WorkerMessage(prefix_delta=codec.prefix_delta_to_wire(delta)))

    def _hello(self) -> common_pb2.WorkerHello:
        host, _ = self._started()
        spec, engine = host.kv_spec, self._config.engine
        hello = WorkerHello(
            worker_id=WorkerId(self._config.worker_id),
            role=codec.role_from_wire(self._role_number),
            incarnation=host.incarnation,
            address=host.address,
            model_fingerprint=host.card.fingerprint,
            block_size=spec.block_size,
            num_blocks=min(region.num_blocks for region in host.regions),
            max_model_len=host.max_model_len,
            max_num_seqs=min(engine.max_num_seqs, self._largest_step or engine.max_num_seqs),  # a token each a step
            dtype=spec.dtype,
            kv_bytes_per_token=spec.bytes_per_token,
            pid=self._pid,
            step_timeout_s=self._watch.timeout_s,
            niceness=self._niceness,
            quantization=engine.quantization or "",
            max_num_batched_tokens=self._largest_step,
        )
        return codec.hello_to_wire(hello)

    def _heartbeat(self) -> common_pb2.WorkerLoad:
        """Return the engine's part of the load, completed with what the role, the link and the loop know."""
        host, role = self._started()
        role.on_tick()
        load = replace(
            self._snapshot.load,
            leases_held=role.leases_held,
            loop_lag_ms=self.loop_lag_ms,
            draining=host.draining,
            engine_stalled_s=self._watch.stalled_s,
            last_handle=host.counted.last_handle(self._snapshot.last_seq_id),
            kv_corrupt_blocks=role.damage.corrupt_blocks,
            kv_rotted_blocks=role.damage.rotted_blocks,
        )
        return codec.load_to_wire(load)
