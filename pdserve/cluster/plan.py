"""The plan of a cluster: one configuration becomes the processes that it asks for. Pure, but for the count of cores."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pdserve.checkpoint.card import resolve_kv_dtype
from pdserve.checkpoint.resolve import check_known
from pdserve.cluster.nodes import CPU, GPU, Needs, Node, spread
from pdserve.config import ClusterConfig, EngineConfig, PoolConfig, RouterConfig, RouterProcessConfig, WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import DTYPE_BITS
from pdserve.core.settings.labels import LabelSelector
from pdserve.planner.limits import PoolSizes
from pdserve.plugins import check_name

PREFILL: Final = "prefill"
DECODE: Final = "decode"
WORKER_ENTRIES: Final[Mapping[str, str]] = MappingProxyType(
    {PREFILL: "prefill_worker.main:start", DECODE: "decode_worker.main:start"}
)
"""MODULE:FUNCTION that starts a worker from its `WorkerConfig`. Only the worker's own process imports the module."""

PLACE: Final = ("num_cpus", "num_gpus", "resources", "labels")
"""The settings of a pool that say which node has room for its workers. A worker that changes its role stays on its node."""
PASSIVE: Final[Mapping[str, str]] = MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE"})
"""Threads of OpenMP that wait passively leave the core to other workers."""
MAX_PORT: Final = 65535
LOCAL_HOST: Final = "127.0.0.1"
"""The address of a private Ray and of its router."""
LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
WILDCARD_HOSTS: Final = ("", "0.0.0.0", "::", "[::]")


def check_parts(config: ClusterConfig) -> None:
    """Raise `ConfigError` for a model, a chat template, a transport or a policy that is not there.

    The processes would say so as well, but after Ray has started. They alone check what only the files of the model tell.
    """
    from kvtransfer.backends import registry
    from router.service import policies

    check_known(config.engine.model, config.engine.load_format)
    if template := config.router.chat_template:
        try:
            Path(template).read_bytes()
        except OSError as exc:
            raise ConfigError(f"router.chat_template: cannot read {template}: {exc.strerror}") from exc
    check_name(config.transfer.transport, registry.BUILTINS, registry.SETTING)
    check_name(config.router.prefill_policy, policies.BUILTINS, "router.prefill_policy")
    check_name(config.router.decode_policy, policies.BUILTINS, "router.decode_policy")


def check_cores(config: ClusterConfig) -> None:
    """Raise `ConfigError` for a gang that needs more cores than this machine has, on which a private Ray would start it."""
    for name, pool in ((PREFILL, config.prefill), (DECODE, config.decode)):
        engine = config.engine_for(pool)
        threads = threads_of(engine, num_cpus=pool.num_cpus, share=engine.ranks)
        if pool.most:
            try:
                dataclasses.replace(engine, threads=threads).check_cores(len(os.sched_getaffinity(0)))
            except ConfigError as exc:
                raise ConfigError(f"{name}.engine: {exc.message}") from exc


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker: the settings for its start, and the resources that Ray must set aside for it."""

    role: str
    entry: str
    config: WorkerConfig
    max_restarts_per_hour: int
    num_cpus: float  # of all its ranks
    num_gpus: float
    resources: dict[str, float]
    labels: dict[str, str]  # selectors of the node's labels; empty for a private Ray, which has one node
    env: dict[str, str]  # variables of its process; empty for a private Ray, whose processes inherit them
    log_dir: str
    node_address: bool  # bind and advertise the node's own address, which only the worker's process can know
    share: int  # the number of processes that compute on its node, which divide the cores
    start_timeout_s: float  # it may load for so long
    host: str = ""  # the address of the node on which its process may run already; empty: it does not
    lasting: str = ""  # the name of its cluster, whose next `pdserve up` adopts it; empty: it ends with its keeper

    @property
    def worker_id(self) -> str:
        """The worker's id, such as "prefill-0"."""
        return self.config.worker_id

    @property
    def needs(self) -> Needs:
        """The resources and labels that the worker needs of its node."""
        amounts = {CPU: self.num_cpus, GPU: self.num_gpus, **self.resources}
        engine = self.config.engine
        shares = self.ranks == 1 or self.num_cpus or self.num_gpus or engine.oversubscribe
        cores = 0 if shares else self.ranks * max(1, engine.threads)
        return Needs({name: amount for name, amount in amounts.items() if amount}, self.labels, self.ranks, cores)

    @property
    def ranks(self) -> int:
        """The number of processes that compute the worker's model."""
        return self.config.engine.ranks


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The facts from which the plan of any worker is made, at the start of the cluster or later."""

    config: ClusterConfig
    router_address: str
    cluster_token: str
    log_dir: Path
    entries: Mapping[str, str]
    lasting: str = ""  # the name of the cluster if its workers outlive `pdserve up`; empty: they end with it

    def plan(self, role: str, worker_id: str, share: int = 1) -> WorkerPlan:
        """Plan one worker of the role. `share` is the number of ranks on its node, its own included."""
        config, local = self.config, self.config.address == "local"
        pool = config.prefill if role == PREFILL else config.decode
        engine = config.engine_for(pool)
        if pool.num_gpus:
            engine = dataclasses.replace(engine, device="cuda")  # a worker with a GPU computes there, or does not start
        worker = WorkerConfig(
            worker_id=worker_id,
            router_address=self.router_address,
            engine=engine,
            lease=config.lease,
            transfer=config.transfer,
            cluster_token=self.cluster_token,
            openengine_port=openengine_port(config, worker_id),
            advertise_host=config.advertise_host,
            heartbeat_interval_s=config.router.heartbeat_interval_s,
            router_lost_s=config.router.heartbeat_lost_s,
            flip_obstacle=flip_obstacle(config),
            start_timeout_s=config.start_timeout_s,
            drain_timeout_s=config.drain_timeout_s,
        )
        return WorkerPlan(
            role=role,
            entry=self.entries[role],
            config=worker,
            max_restarts_per_hour=pool.max_restarts_per_hour,
            num_cpus=pool.num_cpus * engine.ranks,
            num_gpus=pool.num_gpus,
            resources=dict(pool.resources),
            labels={} if local else {name: str(LabelSelector.parse(text)) for name, text in pool.labels.items()},
            env={} if local else dict(PASSIVE),
            log_dir=str(self.log_dir),
            node_address=not local,
            share=share,
            start_timeout_s=config.start_timeout_s,
            lasting=self.lasting,
        )

    def plan_all(self, nodes: Sequence[Node] = ()) -> tuple[WorkerPlan, ...]:
        """Plan every worker that is configured, prefill first. They spread over `nodes`; empty: a private Ray has one node."""
        return self.plan_these(starting({}, configured_sizes(self.config)), nodes)

    def plan_these(
        self, workers: Mapping[str, str], nodes: Sequence[Node] = (), hosts: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[WorkerPlan, ...]:
        """Plan the workers, whose roles are given by their ids, in that order. `nodes` as in `plan_all`.

        hosts: the addresses of the nodes on which workers run already, by their ids.
        """
        plans = [
            dataclasses.replace(self.plan(role, worker_id), host=hosts.get(worker_id, ""))
            for worker_id, role in workers.items()
        ]
        shares = shares_of([plan.needs for plan in plans], nodes)
        return tuple(dataclasses.replace(plan, share=share) for plan, share in zip(plans, shares, strict=True))


def openengine_port(config: ClusterConfig, worker_id: str) -> int | None:
    """Return the port at which a worker serves OpenEngine. None: it does not. It goes by the worker's id, such as "prefill-0",
    and stays when the worker changes its role. Raises `ConfigError` if there is none left."""
    pool, index, _ = _by_index(worker_id)
    first = (config.prefill if pool == PREFILL else config.decode).openengine_port
    if not first:
        return first
    if first + index > MAX_PORT:
        raise ConfigError(f"{pool}.openengine_port is {first}, which leaves no port for worker {worker_id!r}")
    return first + index


def configured_sizes(config: ClusterConfig) -> PoolSizes:
    """Return the sizes of the pools as they are configured."""
    return PoolSizes(config.prefill.replicas, config.decode.replicas)


def starting(running: Mapping[str, str], sizes: PoolSizes) -> dict[str, str]:
    """Return the role of each worker, by its id, with which a cluster starts. sizes: those that are wanted.

    All workers that run already (`running`: id to role) are among them, also where a pool has too many, which then drain in
    order. Missing workers get the lowest free ids, those of the prefill pool first.
    """
    workers: dict[str, str] = {}
    for role, size in ((PREFILL, sizes.prefill), (DECODE, sizes.decode)):
        there = sorted(worker_id for worker_id, its in running.items() if its == role)
        free = (name for name in (f"{role}-{index}" for index in itertools.count()) if name not in running)
        missing = max(0, size - len(there))
        workers |= dict.fromkeys(sorted([*there, *itertools.islice(free, missing)], key=_by_index), role)
    return workers


def _by_index(worker_id: str) -> tuple[str, int, str]:
    """Return a sort key: decode-2 comes before decode-10."""
    name, _, index = worker_id.rpartition("-")
    return name, int(index) if index.isdecimal() else 0, worker_id


def plan_workers(
    config: ClusterConfig,
    *,
    router_address: str,
    cluster_token: str,
    log_dir: Path,
    nodes: Sequence[Node] = (),
    entries: Mapping[str, str] = WORKER_ENTRIES,
) -> tuple[WorkerPlan, ...]:
    """Plan every worker of both pools, prefill first. They spread over `nodes`; empty stands for the one of a private Ray."""
    return Blueprint(config, router_address, cluster_token, log_dir, entries).plan_all(nodes)


def flip_obstacle(config: ClusterConfig) -> str:
    """Return the reason why a worker of one pool cannot serve in the other one, in words. Empty: nothing prevents it.

    A flip keeps the process, its engine and its place, so the pools must not differ in their settings or in what they need of a
    node.
    """
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if (nodes := config.engine_for(pool).vllm.nodes) > 1:
            return f"{name}.engine.vllm.nodes is {nodes}, and the other nodes of a server keep their role"
    prefill, decode = _flip_facts(config, config.prefill), _flip_facts(config, config.decode)
    for setting, ours in prefill.items():
        if ours != decode[setting]:
            return f"prefill.{setting} {_shown(ours)} and decode.{setting} {_shown(decode[setting])} differ"
    return ""


def _flip_facts(config: ClusterConfig, pool: PoolConfig) -> dict[str, object]:
    """Return the settings of a pool in which it must be like the other one. A private Ray has one node and ignores labels."""
    engine = config.engine_for(pool)
    facts = {f"engine.{field.name}": getattr(engine, field.name) for field in dataclasses.fields(EngineConfig)}
    place = PLACE if config.address != "local" else PLACE[:-1]
    return facts | {name: getattr(pool, name) for name in place}


def _shown(value: object) -> str:
    return "unset" if value in (None, {}) else str(value)


def shares_of(workers: Sequence[Needs], nodes: Sequence[Node]) -> list[int]:
    """Return, for each worker, the number of ranks that are expected on its node, those of other workers included.

    For a worker that has no node yet, it is the number that each node would have in an even spread, and no less than its own.
    """
    chosen = spread(workers, nodes)
    even = -(-sum(needs.ranks for needs in workers) // max(1, len(nodes)))
    there: Counter[str | None] = Counter()
    for node_id, needs in zip(chosen, workers, strict=True):
        there[node_id] += needs.ranks
    return [max(even, n.ranks) if node_id is None else there[node_id] for node_id, n in zip(chosen, workers, strict=True)]


def local_resources(config: ClusterConfig) -> dict[str, float]:
    """Return the custom resources that a private Ray must offer so that every worker fits."""
    total: dict[str, float] = {}
    for pool in (config.prefill, config.decode):
        for name, amount in pool.resources.items():
            total[name] = total.get(name, 0.0) + amount * pool.offered
    return {name: amount for name, amount in total.items() if amount > 0}


def router_config(config: ClusterConfig, cluster_token: str, node_host: str) -> RouterProcessConfig:
    """Return the settings of the router's process.

    Its engine settings have the KV pool of the role whose workers hold fewer tokens, since a request must fit wherever it
    may be placed. A pool that its workers measure becomes known when they join. Workers on other machines cannot dial a
    loopback address, so outside a private Ray the link listens at this node's address.
    """
    router = config.router
    if config.address != "local" and router.link_host is None and router.host in LOOPBACK_HOSTS:
        router = dataclasses.replace(router, link_host=node_host)
    engine = config.engine_for(config.decode)
    if config.prefill.most:
        small = min(engine, config.engine_for(config.prefill), key=_kv_numbers)
        engine = dataclasses.replace(engine, kv_cache_memory=small.known_kv_bytes, kv_cache_dtype=small.kv_cache_dtype)
    return RouterProcessConfig(router, engine, cluster_token)


def _kv_numbers(engine: EngineConfig) -> tuple[bool, float]:
    """Return a sort key: the number of KV values that a worker's pool holds, where scales of quantised KV are not counted.

    Pools whose bytes only their workers will measure come last. Among themselves they count as pools of equal bytes.
    """
    numbers = engine.cpu_kv_bytes * 8 / DTYPE_BITS[resolve_kv_dtype(engine.kv_cache_dtype, engine.dtype)]
    return engine.known_kv_bytes is None, numbers


def dial_address(bound: str, router: RouterConfig, node_host: str) -> str:
    """Return the host:port at which workers dial the router: the port of `bound`, at the configured host.

    A wildcard host becomes this node's.
    """
    _, _, port = bound.rpartition(":")
    host = router.advertise_host or router.link_host or router.host
    if host in WILDCARD_HOSTS:
        host = node_host
    return f"{host}:{port}"


def threads_of(engine: EngineConfig, *, num_cpus: float, share: int) -> int:
    """Return the number of threads of one rank, at least 1. num_cpus: those of this rank.

    Ranks that together spin more threads than there are cores slow down many times.
    """
    if engine.threads:
        return engine.threads
    if num_cpus >= 1:
        return int(num_cpus)
    return max(1, len(os.sched_getaffinity(0)) // share)


def on_this_node(plan: WorkerPlan, node_host: str) -> WorkerConfig:
    """Return the worker's configuration with the facts that only its own machine knows: address and cores.

    In a Ray cluster that was joined, workers are spread over nodes, so other machines must reach them. Raises `ConfigError` for
    a gang that needs more cores.
    """
    engine = plan.config.engine
    engine = dataclasses.replace(engine, threads=threads_of(engine, num_cpus=plan.num_cpus / plan.ranks, share=plan.share))
    engine.check_cores(len(os.sched_getaffinity(0)), f"the node {node_host}" if plan.node_address else "this machine")
    if not plan.node_address:
        return dataclasses.replace(plan.config, engine=engine)
    advertise = plan.config.advertise_host or node_host
    return dataclasses.replace(plan.config, engine=engine, host=node_host, advertise_host=advertise, allow_public_bind=True)


def local_environment() -> dict[str, str]:
    """Return the variables that the processes of a private Ray inherit. The workers import the same code as this process does.

    Variables that each worker asks for would keep Ray from starting it before its agent for environments runs, seconds later.
    """
    root = str(Path(__file__).resolve().parents[2])
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    return {**PASSIVE, "PYTHONPATH": os.pathsep.join([root, *known])}
