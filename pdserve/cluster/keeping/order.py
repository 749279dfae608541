"""The order by which a keeper starts a worker's process, and the facts by which another keeper finds that process again."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.cluster.plan import WorkerPlan
from pdserve.cluster.record import ClusterRecord, ProcessId
from pdserve.config import WorkerConfig, dump
from pdserve.core.errors import ConfigError
from pdserve.worker.start_report import MemoryReport

# The descriptions that a worker's process and its keeper give to the pool.


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The node on which the process of a worker runs."""

    node_id: str
    host: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The description that a worker's process gives after the start. The `*_s` fields are the parts of the start's time."""

    worker_id: str
    role: str
    address: str
    pid: int
    memory: MemoryReport
    computes: str
    niceness: int  # niceness of the process; Ray's default is 15, which yields to every ordinary process of the machine
    process_s: float  # time from the request to Ray until our code runs; it is right only if both are on one machine
    import_s: float
    load_s: float
    adopted: bool = False  # the process ran already, and an earlier `pdserve up` had started it


@dataclass(frozen=True, slots=True)
class StartOrder:
    """All that a worker's process needs to know at its start."""

    plan: WorkerPlan
    host: str  # the address of its node
    asked_at: float  # the time (of the wall clock) at which Ray was asked for the keeper
    given: str = ""  # the GPU that Ray gave to the keeper; the worker's own is the one that its process sees


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker's process as the record of a lasting cluster describes it."""

    process: ProcessId
    control: str  # the name of the socket at which the process takes calls, and the key of that
    role: str  # the role in which the worker serves now
    router_address: str  # the address that it dials
    settings_digest: str
    gpu: str = ""  # the one that its process sees; empty: it was started without one
    share: float = 0.0  # its share of that
    given: str = ""  # the GPU that Ray gave to its present keeper


ANY_ROUTER: Final = "any"
"""Stands for the address of the router, which is another one for each `pdserve up`."""


def settings_digest(config: WorkerConfig) -> str:
    """Return a digest of the settings of a plan, but for the address of the router.

    The facts that only the node knows, such as its cores, are not among them.
    """
    return hashlib.sha256(dump(dataclasses.replace(config, router_address=ANY_ROUTER)).encode()).hexdigest()


def check_settings(plan: WorkerPlan, facts: WorkerFacts) -> None:
    """Raise `ConfigError` when a process that runs already was started with other settings than the plan's."""
    if facts.settings_digest != settings_digest(plan.config):
        raise ConfigError(
            f"{plan.worker_id} of the cluster {plan.lasting} runs already, with other settings: end the cluster first with "
            f"`pdserve down --name {plan.lasting}`, or start it with the settings that it has"
        )


def write_facts(record: ClusterRecord, worker_id: str, facts: WorkerFacts) -> None:
    """Write the facts into the record."""
    record.write_worker(worker_id, dataclasses.asdict(facts))


def read_facts(read: Mapping[str, Any] | None) -> WorkerFacts | None:
    """Return the facts of one worker of a record; None when they are not such facts, or the process has ended."""
    try:
        facts = WorkerFacts(**{**(read or {}), "process": ProcessId(**(read or {})["process"])})
    except (KeyError, TypeError):
        return None
    return facts if facts.process.alive else None


def running_workers(record: ClusterRecord | None) -> dict[str, WorkerFacts]:
    """Return the workers of a cluster that run on this machine, by their ids."""
    found = {worker_id: read_facts(read) for worker_id, read in (record.workers if record else {}).items()}
    return {worker_id: facts for worker_id, facts in found.items() if facts is not None}
