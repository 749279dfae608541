"""A whole cluster from one configuration: router, Ray, both pools. It is started, kept up, and stopped without leftovers.

Everything happens in the thread of the caller. An event asks it to stop; every wait looks at that event. Slow parts start
at the same time: the router starts while this process loads Ray's library, and Ray itself.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from pdserve.client import AdminClient, CallFailed
from pdserve.cluster import plan, processes, router_process
from pdserve.cluster.actor import WorkerReport
from pdserve.cluster.backoff import Backoff
from pdserve.cluster.errors import ClusterError, Interrupted
from pdserve.cluster.events import (
    Event,
    Listener,
    LogsKept,
    Part,
    PartReady,
    PartStarted,
    RouterBack,
    RouterLost,
    WorkerChanged,
    WorkerPhase,
    ignore,
)
from pdserve.cluster.folders import Folders
from pdserve.cluster.router_process import Endpoints, RouterProcess
from pdserve.cluster.scaling.actuator import Actuator
from pdserve.cluster.scaling.limits import planner_settings
from pdserve.cluster.scaling.planning import policies_of, policy_log
from pdserve.cluster.scaling.policy import check_policy
from pdserve.cluster.scaling.port import RouterPort
from pdserve.config import ClusterConfig, RouterProcessConfig
from pdserve.core.errors import ConfigError
from pdserve.core.settings.types import is_loopback
from pdserve.core.worker import Role

if TYPE_CHECKING:  # these two load Ray, for half a second or more, in which the router can start already
    from pdserve.cluster.ray_pool import WorkerPool
    from pdserve.cluster.ray_session import RaySession

JOIN_TIMEOUT_S: Final = 60.0  # a loaded worker dials the router at once, so joining takes about one round trip
JOIN_LOOK_S: Final = 0.1
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
    ) -> None:
        """Prepare the cluster without starting anything.

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
        self._listener = listener
        self._router_command = router_command
        self._entries = entries
        self._token = cluster_token or secrets.token_hex(32)
        self._folders: Folders | None = None
        self._router: RouterProcess | None = None
        self._ray: RaySession | None = None
        self._pool: WorkerPool | None = None
        self._actuator: Actuator | None = None
        self._began: dict[Part, float] = {}
        self.endpoints: Endpoints | None = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        # a wrong setting needs no look into the logs, and a closed output (SystemExit) is not a failure
        self.close(failed=isinstance(exc, Exception) and not isinstance(exc, (Interrupted, ConfigError)))

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
        """Start everything, and return once every worker takes requests.

        Raises `Interrupted`, `ConfigError` or `ClusterError`. The caller then calls `close`.
        """
        self._folders = Folders.create(self.config.log_dir)
        for role, setting, name in policies_of(self.config):
            check_policy(setting, name, policy_log(self._folders.logs, role), self._stop)
        if self.config.address == "local":
            router = self._start_router(plan.LOCAL_HOST)
            session = self._connect_ray()
        else:  # joining takes no time, and the address of this node is known only after it
            session = self._connect_ray()
            router = self._start_router(session.node_host)
        self.endpoints = router.wait_ready(self._stop)
        self._listener(PartReady(Part.ROUTER, router.start_s))
        self._start_workers(session, self.endpoints, router.settings)
        return self.endpoints

    def _start_router(self, node_host: str) -> RouterProcess:
        """Spawn the router without waiting until it is ready."""
        self._begin(Part.ROUTER)
        self._router = RouterProcess(
            plan.router_config(self.config, self._token, node_host),
            folder=self.folders.private,
            log=self.folders.logs / "router.log",
            command=self._router_command,
        )
        self._router.start()
        return self._router

    def _connect_ray(self) -> RaySession:
        self._begin(Part.RAY)
        from pdserve.cluster.ray_session import RaySession

        self._ray = RaySession.connect(self.config, self.folders.private)
        self._listener(PartReady(Part.RAY, time.monotonic() - self._began[Part.RAY]))
        return self._ray

    def _start_workers(self, session: RaySession, endpoints: Endpoints, settings: RouterProcessConfig) -> None:
        from pdserve.cluster.ray_pool import WorkerPool

        blueprint = plan.Blueprint(
            self.config,
            plan.dial_address(endpoints.link, settings.router, session.node_host),
            self._token,
            self.folders.logs,
            self._entries,
        )
        plans = blueprint.plan_all(session.nodes())
        self._begin(Part.WORKERS)
        self._pool = WorkerPool(plans, self._hear, look=session.look)
        port = RouterPort(reachable(endpoints.admin), self._token, f"pdserve up, pid {os.getpid()} at {session.node_host}")
        self._actuator = Actuator(blueprint, self._pool, port, self._listener)
        self._pool.launch()
        self._pool.wait_loaded(self._stop)
        self._wait_joined(endpoints.admin, [item.worker_id for item in plans])
        self._listener(PartReady(Part.WORKERS, time.monotonic() - self._began[Part.WORKERS]))

    def _hear(self, event: Event) -> None:
        """Pass an event of the workers on, to the actuator as well."""
        if self._actuator is not None:
            self._actuator.hear(event)
        self._listener(event)

    def _wait_joined(self, address: str, expected: Sequence[str]) -> None:
        """Wait until the router reports every worker ready. Raises `ClusterError` after `JOIN_TIMEOUT_S`."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        waiting = list(expected)
        with AdminClient(reachable(address), self._token) as client:
            while waiting:
                if time.monotonic() > deadline:
                    raise ClusterError(f"{', '.join(waiting)} did not join the router; see {self.folders.logs}")
                ready = _ready_workers(client)
                for worker_id in [name for name in waiting if name in ready]:
                    waiting.remove(worker_id)
                    self._hear(WorkerChanged(worker_id, WorkerPhase.READY))
                if waiting and self._stop.wait(JOIN_LOOK_S):
                    raise Interrupted

    def supervise(self) -> None:
        """Keep the cluster up until `stop` is set, and its pools at their wanted sizes.

        Raises `ClusterError` when the cluster cannot be kept up any more.
        """
        assert self._router is not None
        assert self._pool is not None
        assert self._actuator is not None
        backoff = Backoff()
        while not self._stop.wait(TICK_S):
            status = self._router.exit_status()
            if status is not None:
                self._restart_router(self._router, status, backoff)
            self._pool.check()
            self._actuator.tick(time.monotonic())
            if not self._pool.serves(plan.DECODE) and self._actuator.hopeless(Role.DECODE):
                raise ClusterError(f"no decode worker is left, so nothing can be served; see {self.folders.logs}")

    def _restart_router(self, router: RouterProcess, status: int, backoff: Backoff) -> None:
        """Start a new router at the same addresses. The workers dial it again by themselves.

        Raises `ClusterError` when the router died too often or hangs.
        """
        delay = backoff.next_delay_s(time.monotonic())
        if delay is None:
            raise ClusterError(f"the router died too often (last status {status}); see {self.folders.logs / 'router.log'}")
        self._listener(RouterLost(f"exit status {status}", delay))
        router.stop()
        if self._stop.wait(delay):
            return
        try:
            router.start()
            self.endpoints = router.wait_ready(self._stop)
        except Interrupted:
            return
        except ClusterError:
            if router.exit_status() is None:  # the router hangs, and another start would not cure that
                raise
            return  # the router died; the next look finds it dead and counts the death
        self._listener(RouterBack(self.endpoints.pid))

    def close(self, *, failed: bool = False) -> None:
        """Stop everything that was started, in reverse order, each part within its own time limit.

        After a failure (`failed`) the logs are kept, and the listener is told where.
        """
        pool, session, router = self._pool, self._ray, self._router
        self._pool = self._ray = None  # the router stays known: `kill` may come while it is being stopped
        try:
            if self._actuator:
                self._actuator.close()
            if pool:
                pool.stop()
        finally:
            try:
                if session:
                    session.close()
            finally:
                if router:
                    router.stop()
                if self._folders:
                    self._folders.remove(keep_logs=failed)
                    if self._folders.logs_are_ours and self._folders.logs.exists():
                        self._listener(LogsKept(str(self._folders.logs)))

    def kill(self) -> None:
        """End all processes now. Any thread may call it. It serves the second signal, after which this process ends as well.

        The janitor removes the private folder after that, since a thread that starts Ray may write to it until then.
        """
        if self._folders is None:
            return
        processes.kill(processes.with_argument(f"{self._folders.private}/session_", os.getpid()))  # Ray, not the janitor
        if self._router:
            self._router.kill()
        self._folders.remove_logs(keep_logs=False)

    def _begin(self, part: Part) -> None:
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
