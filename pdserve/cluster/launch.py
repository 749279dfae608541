"""A whole cluster from one configuration: router, Ray, both pools. It is started, kept up, and stopped without leftovers.

Everything happens in the thread of the caller. An event asks it to stop; every wait looks at that event. Slow parts start
at the same time: the router starts while this process loads Ray's library, and Ray itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from pdserve.client import AdminClient, CallFailed
from pdserve.cluster import plan, processes, quorum, router_process
from pdserve.cluster.driver.driver import RayDriver
from pdserve.cluster.errors import ClusterError, Interrupted
from pdserve.cluster.events import (
    Event,
    EventPart,
    Listener,
    LogsKept,
    PartReady,
    PartStarted,
    PoolsResized,
    StartedWithout,
    WorkerChanged,
    WorkerPhase,
    ignore,
    tell,
)
from pdserve.cluster.folders import Folders
from pdserve.cluster.gpus import assigned, gpus_here, gpus_of
from pdserve.cluster.keeping.elsewhere import drain_elsewhere
from pdserve.cluster.keeping.order import ANY_ROUTER, WorkerReport, check_settings, running_workers
from pdserve.cluster.member import Member, MemberState
from pdserve.cluster.record import ClusterFacts, ClusterRecord, SizeFacts, default_name, mark_of, marked, tie_to
from pdserve.cluster.router.keeper import RouterKeeper
from pdserve.cluster.router_process import STOP_TIMEOUT_S, Endpoints, RouterProcess
from pdserve.cluster.scaling.actuator import Actuator
from pdserve.cluster.scaling.limits import limits_of, obstacle_of, planner_settings
from pdserve.cluster.scaling.planning import policies_of, policy_log
from pdserve.cluster.scaling.policy import check_policy
from pdserve.cluster.scaling.port import RouterPort
from pdserve.config import ClusterConfig, RouterProcessConfig, dump
from pdserve.core.errors import ConfigError
from pdserve.core.settings.types import is_loopback
from pdserve.core.worker import Role
from pdserve.observe.log_files import log_file
from pdserve.planner.limits import PoolSizes
from pdserve.rpc.codec import role_from_wire
from pdserve.worker.link import REDIAL_MAX_S

log = logging.getLogger(__name__)
DIAL_S: Final = 2 * REDIAL_MAX_S  # workers that run dial a new router within one such pause
JOIN_LOOK_S: Final = 0.1
RAY_BACK_S: Final = 120.0
"""A start waits so long for a Ray that was lost meanwhile; a private one is back within seconds. Later it is tried for ever."""
TICK_S: Final = 0.5  # a death is noticed this soon; each look costs two system calls and one look at Ray's memory


class Cluster:
    """One cluster, as a context manager: leaving it stops everything. Setting `stop` ends `start` and `supervise`."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        stop: threading.Event,
        listener: Listener = ignore,
        router_command: Sequence[str] = router_process.COMMAND,
        entries: Mapping[str, str] = plan.WORKER_ENTRIES,
        cluster_token: str = "",
        lasting: str = "",
        leave_running: bool = False,
    ) -> None:
        """Prepare the cluster without starting anything.

        lasting: the name of a cluster that outlives this process, and that the next `start` of that name adopts. Empty: it
        ends with this process, however this process ends. leave_running: once it has started, `close` and `kill` end nothing
        of it but what serves this process, for the next `start` of its name. Until then they do so where it ran before.
        cluster_token: the secret that administrators on other machines share. Empty makes a secret of this process. Raises
        `ConfigError` when other machines reach the administration and nobody could know its secret.
        """
        if not cluster_token and not is_loopback(config.router.admin_host):
            raise ConfigError(
                f"router.admin_host {config.router.admin_host!r} is reached by others, who must send the cluster's secret: "
                "give one with --cluster-token or PDSERVE_CLUSTER_TOKEN"
            )
        planner_settings(config)  # a wrong one is an error before anything starts
        self.config = config
        self._stop = stop
        self._listener = functools.partial(tell, listener)
        self._router_command = router_command
        self._entries = entries
        self._lasting = lasting
        self._leave_running = leave_running and bool(lasting)
        self._started = False
        self._kept_sizes: PoolSizes | None = None  # as they were recorded last
        self._adopts = False  # the router or workers ran before this process came
        self._joins = config.address != "local"
        self._host = ""  # the address of this node in a joined Ray
        self.left: tuple[str, ...] = ()  # workers of other machines that could not be told to end, after `close` or `kill`
        self._record: ClusterRecord | None = None  # of a lasting cluster
        self.name = lasting or default_name(0)
        self._given_token = cluster_token
        self._token = ""
        self._folders: Folders | None = None
        self._router: RouterKeeper | None = None
        self._router_back_s = 0.0  # the time at which another router served
        self._pool: RayDriver | None = None
        self._actuator: Actuator | None = None
        self._began: dict[EventPart, float] = {}
        self.endpoints: Endpoints | None = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        # a wrong setting needs no look into the logs, and a closed output (SystemExit) is not a failure
        broke = isinstance(exc, Exception) and not isinstance(exc, Interrupted)
        adopts = self._adopts or (self._router is not None and self._router.adopted)
        self.close(failed=broke and not isinstance(exc, ConfigError), leave=(broke and adopts) or self.leaves)

    @property
    def leaves(self) -> bool:
        """Tell whether the end of this process, by a signal too, leaves the cluster running.

        What ran before goes on if this process is told to end before it has adopted all of it.
        """
        return self._leave_running if self._started else self._adopts

    @property
    def folders(self) -> Folders:
        """The folders of the cluster. `start` makes them."""
        assert self._folders is not None, "start() first"
        return self._folders

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """The reports of the workers that run."""
        return self._pool.reports if self._pool else ()

    def start(self) -> Endpoints:
        """Start everything, and return once every worker takes requests, or a quorum of them (`pdserve.cluster.quorum`).

        Raises `Interrupted`, `ConfigError` or `ClusterError`. The caller then calls `close`.
        """
        self._begin_record()
        if not self._adopts:  # processes that run need none of these parts any more
            plan.check_parts(self.config)
        for role, setting, name in policies_of(self.config):
            check_policy(setting, name, policy_log(self.folders.logs, role), self._stop)
        if not self._joins:
            self._assign_gpus(gpus_here(os.environ))
            plan.check_cores(self.config)
            router = self._start_router(plan.LOCAL_HOST)
            pool = self._connect_ray()
        else:  # joining takes no time, and the address of this node is known only after it
            pool = self._connect_ray()
            self._host = pool.node_host
            self._assign_gpus(gpus_of(pool.nodes()))
            router = self._start_router(pool.node_host)
        self.endpoints = router.wait_ready(self._stop)
        self._listener(PartReady(EventPart.ROUTER, router.process.start_s))
        self._start_workers(pool, self.endpoints, router.process.settings)
        assert self._actuator is not None
        if pool.answers:
            self._actuator.tick(time.monotonic())  # from now on the router takes orders: an operator is told that all is ready
        self._started = True
        return self.endpoints

    def _begin_record(self) -> None:
        """Become the owner of a lasting cluster, and take over its secret and its logs, or make both.

        Raises `ClusterError` when it has an owner, and `ConfigError` when what runs has another secret.
        """
        facts = None
        if self._lasting:
            self._record = ClusterRecord.open(self._lasting)
            self._record.own()
            facts = self._record.facts
            self._adopts = bool(marked(self.name)) or (facts is not None and facts.joined)
        if facts is not None and self._given_token not in ("", facts.token) and self._adopts:
            raise ConfigError(
                f"the cluster {self.name} runs with another secret; stop it with `pdserve down`, or give its own with "
                "--cluster-token or PDSERVE_CLUSTER_TOKEN"
            )
        self._token = self._given_token or (facts.token if facts is not None else secrets.token_hex(32))
        before = Path(facts.logs) if facts is not None and facts.logs_are_ours else None
        self._folders = Folders.create(self.config.log_dir, before)
        if self._record is not None:
            logs, ours, kept = str(self._folders.logs), self._folders.logs_are_ours, facts or ClusterFacts("", "", False)
            kept = replace(kept, token=self._token, logs=logs, logs_are_ours=ours)
            joined, drain_s = self._joins or kept.joined, float(self.config.router.drain_s)
            self._record.write_facts(replace(kept, joined=joined, drain_s=drain_s))

    def _assign_gpus(self, present: int) -> None:
        """Assign the GPUs that are present, or those of before while workers run for which these were assigned: a GPU or a node
        that has come or gone since then must not make them ones with other settings. Raises as `_check_running` does."""
        facts = self._record.facts if self._record is not None else None
        digest = hashlib.sha256(dump(self.config).encode()).hexdigest()
        if facts is not None and facts.assigned == digest and (facts.joined or running_workers(self._record)):
            present = facts.gpus
        self.config = assigned(self.config, present)
        self._check_running()
        if self._record is not None and facts is not None:
            self._record.write_facts(replace(facts, gpus=present, assigned=digest))

    def _check_running(self) -> None:
        """Raise `ConfigError` when workers of before run with other settings, before anything was changed."""
        running = running_workers(self._record)
        blueprint = plan.Blueprint(self.config, ANY_ROUTER, self._token, self.folders.logs, self._entries, self._lasting)
        for worker_id, facts in running.items():
            check_settings(blueprint.plan(facts.role, worker_id), facts)

    def _start_router(self, node_host: str) -> RouterKeeper:
        """Adopt the router that an earlier process left, or spawn one without waiting until it is ready."""
        self._begin(EventPart.ROUTER)
        process = RouterProcess(
            plan.router_config(self.config, self._token, node_host),
            folder=self._record.folder if self._record is not None else self.folders.private,
            log=log_file(self.folders.logs, "router.log"),
            command=self._router_command,
            lasting=bool(self._lasting),
            variables=mark_of(self.name) | ({} if self._lasting else tie_to(self.folders.private)),
        )
        self._router = RouterKeeper(process, record=self._record, listener=self._listener, dial=reachable)
        self._router.begin(self._stop, self._router_stop_s)
        return self._router

    @property
    def _router_stop_s(self) -> float:
        """The longest time from SIGTERM until the router has finished its streams and ended."""
        return self.config.router.drain_s + STOP_TIMEOUT_S

    def _connect_ray(self) -> RayDriver:
        self._begin(EventPart.RAY)
        log = log_file(self.folders.logs, "ray.log")
        self._pool = RayDriver(self.config, self.folders.private, self.name, log, self._hear)
        self._pool.begin()
        self._pool.wait_joined(self._stop)
        self._listener(PartReady(EventPart.RAY, time.monotonic() - self._began[EventPart.RAY]))
        return self._pool

    def _start_workers(self, pool: RayDriver, endpoints: Endpoints, settings: RouterProcessConfig) -> None:
        blueprint = plan.Blueprint(
            self.config,
            plan.dial_address(endpoints.link, settings.router, pool.node_host),
            self._token,
            self.folders.logs,
            self._entries,
            self._lasting,
        )
        running, hosts = self._running(endpoints.admin)
        ordered = self._ordered_before()
        workers = plan.starting(running, ordered or plan.configured_sizes(self.config))
        plans = blueprint.plan_these(workers, pool.nodes(), hosts)
        self._begin(EventPart.WORKERS)
        port = RouterPort(reachable(endpoints.admin), self._token, f"pdserve up, pid {os.getpid()} at {pool.node_host}")
        self._actuator = Actuator(blueprint, pool, port, self._listener)
        if ordered is not None:
            self._actuator.wanted.keep(ordered)
            said = f"the pools keep the sizes that were ordered before: prefill {ordered.prefill}, decode {ordered.decode}"
            self._listener(PoolsResized(said, ordered.prefill, ordered.decode))
        elif self.config.autoscaling.enabled:  # the planner of before has decided how many there are
            roles = list(workers.values())
            self._actuator.wanted.sizes = PoolSizes(roles.count(plan.PREFILL), roles.count(plan.DECODE))
        self._keep_sizes(ordered)
        pool.launch(plans)
        self._router_back_s = time.monotonic()
        self._wait_started(pool, endpoints.admin)
        self._listener(PartReady(EventPart.WORKERS, time.monotonic() - self._began[EventPart.WORKERS]))

    def _ordered_before(self) -> PoolSizes | None:
        """Return the sizes that operators ordered while an earlier process served; None: they have not, or settings changed."""
        kept = self._record.sizes if self._record is not None else None
        configured = plan.configured_sizes(self.config)
        if kept is None or PoolSizes(kept.configured_prefill, kept.configured_decode) != configured:
            return None
        ordered = PoolSizes(kept.prefill, kept.decode)
        return None if obstacle_of(ordered.prefill, ordered.decode, configured, limits_of(self.config)) else ordered

    def _keep_sizes(self, ordered: PoolSizes | None) -> None:
        """Keep what operators ordered for the next process."""
        self._kept_sizes = ordered
        if self._record is not None:
            configured = plan.configured_sizes(self.config)
            try:
                self._record.write_sizes(SizeFacts(*astuple(configured), *astuple(ordered)) if ordered is not None else None)
            except OSError:  # they hold all the same, until the next `pdserve up`
                log.exception("the ordered sizes cannot be recorded")

    def _running(self, address: str) -> tuple[dict[str, str], dict[str, str]]:
        """Return the roles of the workers that run already, and the addresses of their nodes, each by the workers' ids.

        Those of this machine are in the record. Those of other nodes are known to the router, which they dial by themselves.
        """
        roles = {worker_id: facts.role for worker_id, facts in running_workers(self._record).items()}
        hosts: dict[str, str] = {}
        if not self._lasting or not self._joins:
            return roles, hosts
        deadline = time.monotonic() + DIAL_S
        with AdminClient(reachable(address), self._token) as client:
            while time.monotonic() < deadline and not self._stop.wait(JOIN_LOOK_S):
                with contextlib.suppress(CallFailed):
                    for hello in (worker.hello for worker in client.cluster_state().workers):
                        roles[hello.worker_id] = role_from_wire(hello.role).value
                        hosts[hello.worker_id] = hello.address.rpartition(":")[0]
        return roles, hosts

    def _hear(self, event: Event) -> None:
        """Pass an event of the workers on, to the actuator as well."""
        if self._actuator is not None:
            self._actuator.hear(event)
        self._listener(event)

    def _wait_started(self, pool: RayDriver, address: str) -> None:
        """Wait until the workers take requests, or enough of them do. Workers and the router are kept up meanwhile.

        Raises `Interrupted`, and `ConfigError` or `ClusterError` when no worker of a pool that is needed could start.
        """
        needed = (plan.PREFILL, plan.DECODE) if self.config.router.placement == "disaggregated" else (plan.DECODE,)
        began_s = time.monotonic()
        quorum_s: float | None = None
        lost_s: float | None = None
        told: set[str] = set()
        with AdminClient(reachable(address), self._token) as client:
            while True:
                pool.check(JOIN_LOOK_S)
                lost_s = (lost_s or time.monotonic()) if pool.lost else None
                if lost_s is not None and time.monotonic() - lost_s > RAY_BACK_S:
                    raise ClusterError(f"Ray was lost while the workers started, and is not back; see {self.folders.logs}")
                self._keep_router()
                ready = _ready_workers(client) if any(member.report for member in pool.members) else set()
                now_s = time.monotonic()
                starters = [self._starter(member, ready, now_s) for member in pool.members]
                for each in starters:
                    if each.ready and each.worker_id not in told:
                        told.add(each.worker_id)
                        self._hear(WorkerChanged(each.worker_id, WorkerPhase.READY))
                if quorum_s is None and quorum.has_quorum(starters, needed):
                    quorum_s = now_s
                since_quorum_s = None if quorum_s is None else now_s - quorum_s
                try:
                    if quorum.goes_on(starters, needed, since_start_s=now_s - began_s, since_quorum_s=since_quorum_s):
                        break
                except ClusterError as exc:
                    where = "" if "; see " in exc.message else f"; see {self.folders.logs}"
                    raise ClusterError(f"{exc.message}{where}") from exc
                if self._stop.is_set():
                    raise Interrupted
        late = tuple(each.worker_id for each in starters if not each.ready)
        if late:
            self._listener(StartedWithout(late))

    def _starter(self, member: Member, ready: set[str], now_s: float) -> quorum.Starter:
        failure = member.failure
        if failure is None and member.state is MemberState.GONE:
            failure = ClusterError(f"{member.worker_id} died too often; see {member.plan.log_dir}/{member.worker_id}.log")
        loaded_s = now_s - max(member.since_s, self._router_back_s) if member.state is MemberState.RUNNING else None
        is_ready = member.state is MemberState.RUNNING and member.worker_id in ready
        return quorum.Starter(member.worker_id, member.plan.role, failure, loaded_s, is_ready)

    def supervise(self) -> None:
        """Keep the cluster up until `stop` is set, and its pools at their wanted sizes.

        Raises `ClusterError` when the cluster cannot be kept up any more.
        """
        assert self._router is not None
        assert self._pool is not None
        assert self._actuator is not None
        while not self._stop.wait(TICK_S):
            self._keep_router()
            self._pool.check()
            if self._record is not None:
                self._record.refresh(time.monotonic())
            if self._pool.answers and not self._router.doubtful:  # nobody shall wait for a start, or for an answer
                self._actuator.tick(time.monotonic())
                if self._actuator.wanted.ordered != self._kept_sizes:
                    self._keep_sizes(self._actuator.wanted.ordered)
            serves = self._pool.serves(plan.DECODE)  # a pool that was drained is filled again by `pdserve scale`
            if not self._lasting and not serves and self._actuator.hopeless(Role.DECODE, time.monotonic()):
                raise ClusterError(f"no decode worker is left, so nothing can be served; see {self.folders.logs}")

    def _keep_router(self) -> None:
        """Look after the router, without waiting for it. The workers dial a new one by themselves."""
        assert self._router is not None
        self._router.tick(time.monotonic())
        if self._router.doubtful or self._router.endpoints != self.endpoints:
            self._router_back_s = time.monotonic()
        self.endpoints = self._router.endpoints

    def close(self, *, failed: bool = False, leave: bool = False) -> None:
        """Stop everything that was started, each part within its own time limit: the router first, which takes no new requests
        and finishes its streams while the workers live, and the workers last.

        After a failure (`failed`) the logs are kept, and the listener is told where. `leave`: what a lasting cluster has goes
        on, since it served before this process came and this process has failed, or since the operator wants that.
        Workers of other machines are drained through the router when Ray, which would stop them, is away. If that is not
        possible either, `left` has their names, and the record stays for the next `start` of its name.
        """
        pool, router, folders = self._pool, self._router, self._folders  # they stay known: `kill` may come meanwhile
        drains = pool is not None and pool.lost and self._joins and self._record is not None and not leave
        with contextlib.ExitStack() as stack:
            if self._record is not None:
                stack.callback(self._end_record, leave)
            if folders is not None:
                stack.callback(self._end_folders, folders, failed or leave)
            if self._record is not None and self._record.owned and not leave:
                stack.callback(self._sweep)  # of our own cluster: one that was refused to us goes on
            if pool:
                stack.callback(pool.close)
            if pool and not leave:
                stack.callback(self._stop_workers, pool, drained=drains)
            if router:
                stack.callback(router.close, self._router_stop_s, leave=self.leaves or (leave and router.adopted))
            if drains:
                stack.callback(self._drain_elsewhere)
            if self._actuator:
                self._actuator.close()

    def _drain_elsewhere(self) -> None:
        assert self._record is not None
        self.left = drain_elsewhere(self._record, reachable, log.info)

    def _stop_workers(self, pool: RayDriver, *, drained: bool) -> None:
        elsewhere = self._elsewhere(pool)
        if not pool.stop() and not drained:
            self.left = elsewhere

    def _elsewhere(self, pool: RayDriver) -> tuple[str, ...]:
        """Return the workers on other machines that no keeper ends by its own end, as far as they are known."""
        if not self._lasting or not self._joins:
            return ()
        members = [member for member in pool.members if not member.drained and member.host not in ("", self._host)]
        return tuple(f"{member.worker_id} at {member.host}" for member in members)

    def _sweep(self) -> None:
        """End what is left of the cluster on this machine: workers whose keepers are lost."""
        for process in marked(self.name):
            process.send(signal.SIGKILL)

    def _end_folders(self, folders: Folders, keep_logs: bool) -> None:
        folders.remove(keep_logs=keep_logs)
        if folders.logs_are_ours and folders.logs.exists():
            self._listener(LogsKept(str(folders.logs)))

    def _end_record(self, leave: bool) -> None:
        assert self._record is not None
        if not leave and not self.left and self._record.owned:
            self._record.remove()
        self._record.release()

    def kill(self) -> None:
        """End all processes now. Any thread may call it. It serves the second signal, after which this process ends as well.

        The janitor removes the private folder after that, since a thread that starts Ray may write to it until then.
        """
        if self._folders is None:
            return
        processes.kill(processes.with_argument(f"{self._folders.private}/session_", os.getpid()))  # Ray, not the janitor
        if self._pool:
            self._pool.kill()
        if self.leaves:
            return
        if self._router:
            self._router.kill()
        for process in marked(self.name):  # those that have lost their parents too
            process.send(signal.SIGKILL)
        self._folders.remove_logs(keep_logs=False)
        self.left = self._elsewhere(self._pool) if self._pool else ()
        if self._record is not None and self._record.owned and not self.left:
            self._record.remove()

    def _begin(self, part: EventPart) -> None:
        self._began[part] = time.monotonic()
        self._listener(PartStarted(part))


def reachable(address: str) -> str:
    """Return the host:port that this machine dials for a bound address. A wildcard host becomes 127.0.0.1."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in plan.WILDCARD_HOSTS else address


def _ready_workers(client: AdminClient) -> set[str]:
    """Return the ids of the workers that take requests. The set is empty while the router does not answer."""
    try:
        return {worker.hello.worker_id for worker in client.cluster_state().workers if worker.ready}
    except CallFailed:
        return set()
