"""The descriptions that a worker's process and its keeper give to the pool."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.worker.start_report import MemoryReport


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
