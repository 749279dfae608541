"""It brings a live cluster to a layout and, at the end, back to what it was. No process is started or restarted.

Roles change by flips, and limits by budgets. Where an actuator runs and its planner decides the sizes, the sizes are ordered
first, as `pdserve scale` does, so that the planner does not undo the flips; a flip by an operator then moves a worker from one
pool to the other for the actuator too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from pdserve.client import AdminClient, CallFailed
from pdserve.core.errors import Unavailable
from pdserve.core.worker import Role
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2, inference_pb2, scaling_pb2
from pdserve_bench.layout import Layout
from pdserve_bench.search.reshape import (
    CannotShape,
    ClusterNow,
    FlipWorker,
    Home,
    SetLimits,
    Step,
    Wait,
    WantedShape,
    WorkerNow,
    flips_between,
    homes_of,
    next_step,
    targets_of,
)
from pdserve_bench.search.result import Busy, Counters

LOOK_S: Final = 0.2
"""The time between two looks while something is waited for. Heartbeats come once a second."""
TIMEOUT_S: Final = 180.0
"""The limit of one reshaping. A flip finishes the requests of the worker first, and joins within 60 s after that."""
AGAIN_S: Final = 5.0
"""The time after which limits are set again that no heartbeat has told."""
REPAIR: Final = "look at `pdserve status`; `pdserve flip` and `pdserve set-budget` change what is left"


class Shaper:
    """The layouts of one cluster. The first call of `shape` remembers what the cluster was, and `restore` brings that back.

    Only one call runs at a time. Whoever calls `shape` calls `restore` at the end, also after an error or a cancellation.
    """

    def __init__(
        self,
        port: AdminPort,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        owed: Home | None = None,
    ) -> None:
        """`owed` is the layout that an earlier search did not bring back. It is then what `restore` brings back."""
        self._port = port
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._first: ClusterNow | None = None  # the cluster before the first layout
        self._owed = owed
        self._ordered = owed is not None and owed.automatic  # the planner was told to leave the sizes alone

    @property
    def restored(self) -> bool:
        """The cluster is as it was first."""
        return self._first is None and self._owed is None

    async def shape(self, layout: Layout) -> None:
        """Bring the cluster to the layout, and return when it has settled: all workers are ready, they told their limits in
        heartbeats, and nothing runs. Raises `CannotShape`, which says what to do.
        """
        until_s = self._clock() + self._timeout_s
        try:
            now = await self._port.look()
        except CallFailed as exc:
            raise CannotShape(f"the cluster cannot be looked at: {exc.message}") from exc
        first = now if self._first is None else self._first
        if self._first is None and (bad := [one.name for one in now.workers if one.draining or not one.ready]):
            raise CannotShape(f"{', '.join(bad)} takes no requests now: wait until all workers are ready (`pdserve status`)")
        homes = homes_of(first) if self._owed is None else self._owed.workers
        targets = targets_of(layout, homes, {one.name: one.hello for one in first.workers})
        self._first = first
        if now.automatic:
            await self._keep_the_planner_away(now, until_s)
        await self._walk(targets, until_s, first)

    async def check(self, layout: Layout) -> None:
        """Raise `CannotShape` if somebody else has changed a role or a limit since `shape`, so that a run means nothing."""
        first = self._first
        assert first is not None, "shape comes first"
        try:
            now = await self._port.look()
        except CallFailed as exc:
            raise CannotShape(f"the cluster cannot be looked at: {exc.message}") from exc
        _check_same(first, now)
        homes = homes_of(first) if self._owed is None else self._owed.workers
        targets = targets_of(layout, homes, {one.name: one.hello for one in first.workers})
        wrong = [one.name for one in now.workers if one.draining] or targets != homes_of(now)
        if wrong:
            raise CannotShape(
                f"somebody else changed the workers while {layout.name} was measured, so that run does not count: let no other "
                "search, operator or planner change them, and search again"
            )

    async def restore(self) -> None:
        """Bring every worker back to its first role and limits, and let the planner decide the sizes if it did.

        Raises `CannotShape` when the time is up, or for workers that were lost meanwhile, after the others are back. A call
        after one that succeeded does nothing.
        """
        if self._owed is not None:
            homes = dict(self._owed.workers)
        elif self._first is not None:
            homes = homes_of(self._first)
        else:
            return
        try:
            await self._walk_back(homes, self._clock() + self._timeout_s)
        finally:
            if self._ordered:
                await self._give_the_sizes_back()
        self._first = self._owed = None

    async def _give_the_sizes_back(self) -> None:
        try:
            await self._port.order(None)
        except CallFailed as exc:
            raise CannotShape(
                f"the planner does not decide the sizes again: {exc.message}: run `pdserve scale --auto`"
            ) from exc
        self._ordered = False

    async def _walk(self, targets: Mapping[str, WantedShape], until_s: float, first: ClusterNow) -> None:
        """Take steps until every worker is its target, as long as the cluster is still `first`."""
        walk = _Walk(self._port, self._clock)
        flips: int | None = None
        while True:
            try:
                now = await walk.look()
                _check_same(first, now)
                left = flips_between(now, targets)
                if flips is not None and left is not None and left > flips:
                    raise CannotShape(
                        "somebody else changes roles while the cluster is reshaped: stop the other operator, and search again"
                    )
                flips = flips if left is None else left
                if (step := next_step(now, targets)) is None:
                    return
                waits_for = await walk.take(step, until_s)
                if isinstance(step, FlipWorker) and flips:
                    flips -= 1
            except CallFailed as exc:
                raise CannotShape(f"{walk.doing}: {exc.message}") from exc
            self._check_time(until_s, waits_for)
            await self._sleep(LOOK_S)

    async def _walk_back(self, targets: dict[str, WantedShape], until_s: float) -> None:
        """Take steps until every worker is its target. Failed calls are tried again, and who stays away is left out."""
        walk, half_s, lost = _Walk(self._port, self._clock), (self._clock() + until_s) / 2, list[str]()
        while True:
            try:
                now = await walk.look()
                if self._clock() >= half_s:
                    lost = sorted(set(targets) - {one.name for one in now.workers})
                present = {name: target for name, target in targets.items() if name not in lost}
                if (step := next_step(now, present, idle=False)) is None:
                    break
                waits_for = await walk.take(step, until_s)
            except CallFailed as exc:
                waits_for = f"the end of this: {walk.doing}: {exc.message}"
            self._check_time(until_s, waits_for)
            await self._sleep(LOOK_S)
        if lost:
            raise CannotShape(f"{', '.join(lost)} did not come back, and all others are as they were: {REPAIR}")

    def _check_time(self, until_s: float, waits_for: str) -> None:
        if self._clock() >= until_s:
            raise CannotShape(f"after {self._timeout_s:g} s the cluster still waits for {waits_for}: {REPAIR}")

    async def _keep_the_planner_away(self, now: ClusterNow, until_s: float) -> None:
        """Order the present sizes, and wait until the actuator follows the order."""
        roles = [one.hello.role for one in now.workers]
        self._ordered = True  # also if the answer is lost: to give the sizes back twice harms nobody
        try:
            number = await self._port.order((roles.count(Role.PREFILL), roles.count(Role.DECODE)))
            await self._order_taken(number, until_s)
        except CallFailed as exc:
            raise CannotShape(f"the planner cannot be kept from changing the sizes: {exc.message}") from exc

    async def _order_taken(self, number: int, until_s: float) -> None:
        while True:
            now = await self._port.look()
            if now.order > number:
                raise CannotShape("another order about the sizes came: let nobody else scale the cluster, and search again")
            if now.order == number:
                if now.refused:
                    raise CannotShape(f"{now.actuator} refuses to keep the sizes: {now.refused}")
                return
            if self._clock() >= until_s:
                raise CannotShape(f"{now.actuator or 'the actuator'} does not take the order: is `pdserve up` running?")
            await self._sleep(LOOK_S)


class _Walk:
    """The calls of one way. `doing` says what the last one did not do if it has failed."""

    def __init__(self, port: AdminPort, clock: Callable[[], float]) -> None:
        self._port = port
        self._clock = clock
        self._told: SetLimits | None = None
        self._told_s = 0.0
        self.doing = ""

    async def look(self) -> ClusterNow:
        """Return the present state of the cluster."""
        self.doing = "the cluster cannot be looked at"
        return await self._port.look()

    async def take(self, step: Step, until_s: float) -> str:
        """Take a step and return what is waited for after it. Limits that no heartbeat tells are set again now and then."""
        now_s = self._clock()
        match step:
            case Wait(why):
                return why
            case FlipWorker(worker_id, incarnation, role):
                self.doing = f"worker {worker_id!r} did not become a {role.value} worker"
                await self._port.flip(worker_id, role, incarnation, max(1.0, until_s - now_s))
                return f"{worker_id} to take requests as a {role.value} worker"
            case SetLimits(parts):
                names = ", ".join(name for part in parts for name in part.worker_ids)
                self.doing = f"the limits of {names} were not set"
                if step != self._told or now_s - self._told_s >= AGAIN_S:
                    self._told, self._told_s = step, now_s
                    for part in parts:
                        await self._port.set_budget(part.worker_ids, part.max_num_batched_tokens, part.max_num_seqs)
                return f"heartbeats of {names} with their limits"


def _check_same(first: ClusterNow, now: ClusterNow) -> None:
    """Refuse a cluster that is no longer the one that was measured. A worker may be away for a while, for its flip."""
    if now.router != first.router:
        raise CannotShape("the router was started anew during the search: its figures are gone; search again with --resume")
    pids = {one.name: one.hello.pid for one in first.workers}
    for one in now.workers:
        if one.name not in pids:
            raise CannotShape(f"worker {one.name!r} has joined during the search: keep the number of workers, and search again")
        if one.hello.pid != pids[one.name]:
            raise CannotShape(
                f"worker {one.name!r} was started anew during the search: look at its log, and search again with --resume"
            )


# The calls by which a cluster is looked at and changed, as the shaper makes them. `AdminPort` makes them on a router.


T = TypeVar("T")

ACTUATOR_LOST_S: Final = 10.0
"""The age of an actuator's last poll from which on the router takes no orders for it."""


class AdminPort:
    """The administration port of a router. Calls raise `CallFailed`, and all of them end in bounded time.

    The blocking client runs in threads; the caller closes it.
    """

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    async def look(self) -> ClusterNow:
        """Return the present state of the cluster."""
        return cluster_now(await _in_thread(self._client.cluster_state))

    async def flip(self, worker_id: str, role: Role, incarnation: int, timeout_s: float) -> None:
        """Let a worker change its role, and return when it has joined in the new one.

        A cancellation ends the watching, and the flip goes on.
        """
        stream = self._client.flip(worker_id, codec.role_to_wire(role), incarnation=incarnation, timeout_s=timeout_s)

        def watch() -> None:
            for _ in stream:
                pass

        try:
            await _in_thread(watch, stream.cancel)
        finally:
            stream.cancel()

    async def set_budget(self, worker_ids: Sequence[str], max_num_batched_tokens: int, max_num_seqs: int) -> None:
        """Give workers new limits. 0: the limit stays."""
        nobody = common_pb2.ROLE_UNSPECIFIED
        await _in_thread(lambda: self._client.set_budget(worker_ids, nobody, max_num_batched_tokens, max_num_seqs=max_num_seqs))

    async def order(self, sizes: tuple[int, int] | None) -> int:
        """Order the sizes of the prefill and the decode pool; None leaves them to the planner. Returns the order's number."""
        given = {} if sizes is None else {"prefill": sizes[0], "decode": sizes[1]}
        request = scaling_pb2.ScaleRequest(automatic=sizes is None, **given)
        return await _in_thread(lambda: self._client.scale(request))


def cluster_now(state: inference_pb2.GetClusterStateResponse) -> ClusterNow:
    """Read the answer of a router."""
    scaling = state.scaling
    polls = bool(scaling.actuator) and scaling.age_s <= ACTUATOR_LOST_S
    return ClusterNow(
        router=state.router_incarnation,
        requests=state.queued_requests + state.running_requests,
        workers=tuple(_worker(one) for one in state.workers),
        actuator=scaling.actuator if polls else "",
        automatic=polls and scaling.report.mode == "automatic",
        order=scaling.report.order,
        refused=scaling.report.refused,
    )


def _worker(state: inference_pb2.WorkerState) -> WorkerNow:
    hello, load = codec.hello_from_wire(state.hello), state.load
    return WorkerNow(
        hello=hello,
        max_num_batched_tokens=load.max_num_batched_tokens or hello.max_num_batched_tokens,
        max_num_seqs=load.max_num_seqs or hello.max_num_seqs,
        ready=state.ready,
        draining=state.draining,
        work=state.requests_placed + load.queued_requests + load.running_sequences + load.leases_held,
    )


async def _in_thread(call: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """Run a blocking call in a thread. A cancellation stops the call, and waits until the thread has left it."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait((running,))
        if not running.cancelled():
            running.exception()  # it is told to nobody else
        raise


# A live cluster as a search sees it, through the router's port for administration.


_POLL_S: Final = 0.2


class LiveCluster:
    """The counters of the workers, and whether they work. The caller closes the client."""

    def __init__(self, client: AdminClient) -> None:
        """Look at the cluster of a client."""
        self._client = client

    async def counters(self) -> Counters:
        """Return what the workers have counted so far. It is as old as their last heartbeats."""
        return counters_of(await asyncio.to_thread(self._client.cluster_state))

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request runs or waits. Raises `Unavailable`."""
        end_s = time.monotonic() + timeout_s
        while busy := busy_of(await asyncio.to_thread(self._client.cluster_state)):
            if time.monotonic() > end_s:
                raise Unavailable(
                    f"the cluster still works {timeout_s:g} s after the last request of the search ended ({busy}): other "
                    "clients must not use it during a search"
                )
            await asyncio.sleep(_POLL_S)


def counters_of(state: inference_pb2.GetClusterStateResponse) -> Counters:
    """Return the counters of all workers."""
    return {
        (one.hello.worker_id, one.hello.incarnation): Busy(
            one.hello.role == common_pb2.ROLE_PREFILL,
            one.load.prompt_busy_s + one.load.decode_busy_s,
            one.load.uptime_s,
            one.load.prompt_busy_s,
        )
        for one in state.workers
    }


def busy_of(state: inference_pb2.GetClusterStateResponse) -> str:
    """Return what the router and the workers still have, in words. Empty: nothing."""
    counts = [("the router", state.queued_requests + state.running_requests)]
    counts += [(one.hello.worker_id, one.load.running_sequences + one.load.queued_requests) for one in state.workers]
    return ", ".join(f"{name} has {count} requests" for name, count in counts if count)
