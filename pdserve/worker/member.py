"""A worker as its router knows it: it introduces itself, sends heartbeats, takes commands and drains. Loop thread only.

It knows no threads, no model and no transport, so both a real process and a simulation on virtual time can run it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import grpc

from pdserve.config import WorkerConfig
from pdserve.core.errors import InvalidRequest, ReplicaLost
from pdserve.core.ids import WorkerId
from pdserve.core.roofline import since
from pdserve.core.worker import LINK_VERSIONS, PEER_VERSIONS, WorkerHello, WorkerLoad, check_budget
from pdserve.rpc import codec
from pdserve.rpc.beats import Beats
from pdserve.rpc.channel import open_channel
from pdserve.rpc.v1 import common_pb2, link_pb2
from pdserve.worker.engine_thread import LOOK_S, EngineView
from pdserve.worker.host import CLOSE_TIMEOUT_S, Host, HostedRole, RoleFactory
from pdserve.worker.link import MakeBeats, RouterLink
from pdserve.worker.messages import SetBudget
from pdserve.worker.prefix_log import PrefixCursor

log = logging.getLogger(__name__)

DRAIN_LOOK_S: Final = 0.1


class LinkMember:
    """The membership of one worker in its cluster. Make it before the `Host`, which sends by its `link`; then call `start` with
    the host, and run the link."""

    def __init__(
        self,
        config: WorkerConfig,
        role_number: common_pb2.Role,
        engine: EngineView,
        *,
        pid: int = 0,
        niceness: int = 0,
        flips: int = 0,
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
        make_beats: MakeBeats | None = Beats,
    ) -> None:
        """`engine` is the view that the member before had, if the process served another role. `flips` counts these members."""
        self.role: HostedRole[Any] | None = None
        self.loop_lag_ms = 0.0
        self._config = config
        self._role_number = role_number
        self._engine = engine
        engine.take = None  # the role of the life before has ended
        self._base = engine.snapshot.load  # the engine counts on through a flip; this member's counts begin here
        self._began_s: float | None = None
        self._pid = pid
        self._niceness = niceness
        self._flips = flips
        self._host: Host | None = None
        self._drain_asked = asyncio.Event()
        self._next_role: common_pb2.Role | None = None
        self._cursor = self._new_cursor()
        self.link = RouterLink(
            config.router_address,
            config.cluster_token,
            self._hello,
            self._heartbeat,
            heartbeat_interval_s=config.heartbeat_interval_s,
            router_lost_s=config.router_lost_s,
            on_command=self._on_command,
            on_lost=self._on_link_lost,
            after_beat=self._tell_prefixes,
            on_welcome=self._on_welcome,
            open_channel=open_channel,
            make_beats=make_beats,
        )

    def start(self, host: Host, make_role: RoleFactory) -> None:
        """Set the host, and make the role on it, which gets the events of engine steps from now on."""
        self._host = host
        self.role = make_role(host)
        self._engine.take = self.role.on_step

    def drain(self) -> None:
        """Take no new request from now on; `drained` returns None when none is left. It ends a flip. Idempotent."""
        self._next_role = None
        self._start_to_drain("drains")

    def flip(self, role: common_pb2.Role) -> None:
        """Take no new request from now on; `drained` returns `role` when none is left. Idempotent.

        Raises `InvalidRequest` when the worker cannot take this role, and when it drains in order to end.
        """
        if self._config.flip_obstacle:
            raise InvalidRequest(f"the worker cannot change its role: {self._config.flip_obstacle}", field="role")
        if role not in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE) or role == self._role_number:
            raise InvalidRequest(f"{role} is not the other role", field="role")
        if self._host is None or (self._host.draining and self._next_role is None):
            raise InvalidRequest("the worker is about to end", field="role")
        self._next_role = role
        self._start_to_drain("changes its role")

    def _start_to_drain(self, what: str) -> None:
        if self._host is not None and not self._host.draining:
            log.info("%s %s: it takes no new request", self._config.worker_id, what)
            self._host.draining = True
            self._drain_asked.set()
            self.link.beat_now()  # the router hears of it before any refusal that follows

    @property
    def draining(self) -> bool:
        """True when the worker takes no new request."""
        return self._host is not None and self._host.draining

    @property
    def next_role(self) -> common_pb2.Role | None:
        """The role of the next life. None: there is none, as far as was asked until now."""
        return self._next_role

    async def drained(self) -> common_pb2.Role | None:
        """Wait until a drain or a flip was asked for, and no request, lease, read, block or unsent message is left.

        Return the role to take on, or None when the worker must end. After `drain_timeout_s` a drain returns with what is left.
        A flip gives up what is left, which the router replays. Raises `ReplicaLost` when that does not end: one of our reads
        may still write into the pool, so the process must end.
        """
        await self._drain_asked.wait()
        if not await self._emptied(self._config.drain_timeout_s):
            limit_s, left = self._config.drain_timeout_s, self._engine.snapshot
            log.warning("%s has not drained within %.0f s; it ends with %s", self._config.worker_id, limit_s, left)
            if self._next_role is None:
                return None
            await self._give_up_rest()
        await self.link.settle()
        log.info("%s has drained", self._config.worker_id)
        return self._next_role

    async def _emptied(self, limit_s: float) -> bool:
        """Return True once nothing was left at two looks in a row, and False after `limit_s`.

        A reader's commit empties a lender before the reader has told the router of it. If the lender's link ended in between,
        the router would take the KV for lost and replay the request.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        was_empty = False
        while not (self.empty and was_empty):
            was_empty = self.empty
            if loop.time() >= end_s and not was_empty:
                return False
            await asyncio.sleep(DRAIN_LOOK_S)
        return True

    async def _give_up_rest(self) -> None:
        """Drop all requests and end their leases. The router hears first, and replays them. Raises `ReplicaLost` if something
        stays."""
        _, role = self._started()
        message = f"it changes its role and has not drained within {self._config.drain_timeout_s:.0f} s"
        self.link.send(link_pb2.WorkerMessage(worker_lost=link_pb2.WorkerLost(message=message)))
        role.drop_all()
        if not await self._emptied(CLOSE_TIMEOUT_S):
            raise ReplicaLost(f"{message}; {CLOSE_TIMEOUT_S:.0f} s after all requests were dropped something is left")

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
            if self._engine.watch.look(looked_s - last_s):
                return self._engine.watch.reason

    async def _transfer_unhealthy(self) -> str:
        transfer = self._started()[0].transfer
        await transfer.unhealthy.wait()
        return transfer.unhealthy_reason

    @property
    def empty(self) -> bool:
        """True when no request, lease, read or block is left."""
        host, role = self._started()
        reads_ended = host.transfer.num_unstopped == 0 and (host.staging is None or host.staging.idle)
        return role.idle and reads_ended and self._engine.empty

    def _started(self) -> tuple[Host, HostedRole[Any]]:
        assert self._host is not None
        assert self.role is not None
        return self._host, self.role

    def _on_command(self, message: link_pb2.RouterMessage) -> None:
        body, (host, role) = message.WhichOneof("body"), self._started()
        if body == "drain":
            self.drain()
        elif body == "flip":
            self._flip(message.flip.role)
        elif body == "explain_work":
            self.link.send(host.stories.answer(message.explain_work))
        elif body == "prefix_resync":
            if self._cursor is not None:
                self._cursor.ask_full()
        elif body == "set_budget":
            self._set_budget(message.set_budget)
        else:
            role.on_command(message)

    def _flip(self, role: common_pb2.Role) -> None:
        try:
            self.flip(role)
        except InvalidRequest as exc:  # the router checks the same, so it did not know yet what this worker knows
            log.error("the router's flip is refused: %s", exc)

    def _set_budget(self, asked: link_pb2.SetBudget) -> None:
        """Give the step's budget to the engine. The next heartbeat after the engine has taken it tells it."""
        budget = SetBudget(asked.max_num_batched_tokens, asked.max_num_seqs)
        try:
            check_budget(self.hello(), budget.max_num_batched_tokens, budget.max_num_seqs)
        except InvalidRequest as exc:  # the router checks the same, so its version differs from ours
            log.error("the router's budget is refused: %s", exc)
        else:
            self._engine.submit(budget)

    def _on_welcome(self, link_version: int) -> None:
        self._started()[0].link_version = link_version

    def _on_link_lost(self) -> None:
        host, role = self._started()
        role.on_link_lost()
        host.counted.forget()
        self._cursor = self._new_cursor()

    def _new_cursor(self) -> PrefixCursor | None:
        return None if self._engine.prefixes is None else PrefixCursor(self._engine.prefixes)

    def _tell_prefixes(self) -> None:
        """Send what has changed among the keys of the pool. A heartbeat has just gone out, with the counts of the same
        snapshot."""
        if self._cursor is not None:
            delta = self._cursor.next(now_s=asyncio.get_running_loop().time())
            if delta is not None:
                self.link.send(link_pb2.WorkerMessage(prefix_delta=codec.prefix_delta_to_wire(delta)))

    def hello(self) -> WorkerHello:
        """Return the state of the worker that does not change."""
        host, _ = self._started()
        spec, engine = host.kv_spec, self._config.engine
        sizes = [region.num_blocks for region in host.regions]
        return WorkerHello(
            worker_id=WorkerId(self._config.worker_id),
            role=codec.role_from_wire(self._role_number),
            incarnation=host.incarnation,
            address=host.address,
            model_fingerprint=host.card.fingerprint,
            model_digest=host.model_digest,
            numerics=host.numerics,
            block_size=spec.block_size,
            num_blocks=spec.pool_tokens(sizes) // spec.block_size,
            max_model_len=host.max_model_len,
            max_num_seqs=self._engine.largest_batch,
            dtype=spec.dtype,
            kv_bytes_per_token=spec.bytes_per_token,
            pid=self._pid,
            step_timeout_s=self._engine.watch.timeout_s,
            niceness=self._niceness,
            quantization=engine.quantization or "",
            max_num_batched_tokens=self._engine.largest_step,
            peak_flops_per_s=self._engine.peak_flops_per_s,
            peak_bytes_per_s=self._engine.peak_bytes_per_s,
            isa=self._engine.isa,
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
            enable_expert_parallel=engine.enable_expert_parallel,
            cores=self._engine.cores,
            engine=host.traits.engine,
            refuses=host.traits.refuses,
            undivided=host.traits.undivided,
            unresumed=host.traits.unresumed,
            draining=host.draining,
            flips=self._flips,
            flip_obstacle=self._config.flip_obstacle,
            oldest_link_version=LINK_VERSIONS.oldest,
            link_version=LINK_VERSIONS.newest,
            oldest_peer_version=PEER_VERSIONS.oldest,
            peer_version=PEER_VERSIONS.newest,
            held_tokens=spec.held_tokens(sizes),
        )

    def _hello(self) -> common_pb2.WorkerHello:
        return codec.hello_to_wire(self.hello())

    def _uptime_s(self) -> float:
        """Return the time since the first heartbeat."""
        now_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = now_s
        return now_s - self._began_s

    def _heartbeat(self) -> common_pb2.WorkerLoad:
        self._started()[1].on_tick()
        return codec.load_to_wire(self.load())

    def load(self) -> WorkerLoad:
        """Return the engine's part of the load, completed with what the role, the link and the loop know."""
        host, role = self._started()
        return replace(
            self._engine.snapshot.load,
            leases_held=role.leases_held,
            loop_lag_ms=self.loop_lag_ms,
            draining=host.draining,
            engine_stalled_s=self._engine.watch.stalled_s,
            last_handle=host.counted.last_handle(self._engine.snapshot.last_seq_id),
            kv_corrupt_blocks=role.damage.corrupt_blocks,
            kv_rotted_blocks=role.damage.rotted_blocks,
            uptime_s=self._uptime_s(),
            **since(self._engine.snapshot.load, self._base),
        )
