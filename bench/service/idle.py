"""Measure the cost of an idle cluster: CPU and memory of each of its processes, beside the limits.

    python -m bench.service.idle [--seconds 30] [flags of `pdserve up`]

CPU is user and system time over the window, in percent of one core. Memory is PSS: a page that n processes share
counts 1/n in each, so the sum is what the cluster really takes. The driver is counted as well; it is this process here,
and `pdserve up` otherwise. The exit status is 1 when a limit is exceeded.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from pdserve.cluster.launch import Cluster
from pdserve.commands.console import make_console
from pdserve.commands.failures import one_line_errors
from pdserve.commands.progress import StartView
from pdserve.commands.settings import cluster_config, cluster_options
from pdserve.commands.stopping import StopSignals
from pdserve.commands.tables import size, table
from pdserve.config import ClusterConfig
from pdserve.observe.title import PREFIX

CPU_LIMIT_PERCENT = 15.0
MEMORY_LIMIT_BYTES = 5 << 30
SETTLE_S = 5.0  # until Ray's agents and the workers' heartbeats have settled


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU and memory that one process took during the window."""

    name: str
    cpu_percent: float
    pss_bytes: int


def tree() -> list[psutil.Process]:
    """Return this process and all its descendants."""
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    """Return the user and system time of a process, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


def name_of(process: psutil.Process, workers: Mapping[int, str]) -> str:
    """Return a readable name of a process, from its pid, its title or its command line. Ray's services in Python are named by
    their scripts."""
    if process.pid == os.getpid():
        return "driver"
    if process.pid in workers:
        return workers[process.pid]
    arguments = process.cmdline()
    if arguments and arguments[0].startswith(PREFIX):
        return arguments[0].removeprefix(PREFIX)
    scripts = [Path(argument).name for argument in arguments if argument.endswith(".py")]
    return scripts[0] if scripts else Path(arguments[0]).name if arguments else process.name()


def measure(seconds: float, workers: Mapping[int, str], stop: threading.Event) -> list[Cost]:
    """Return the costs of every process that lived through the window. `workers` maps pids to worker ids; `stop` ends the
    window early.
    """
    before = {process: cpu_s(process) for process in tree()}
    began = time.monotonic()
    stop.wait(seconds)
    elapsed_s = time.monotonic() - began
    costs = []
    for process, was in before.items():
        try:
            percent = 100 * (cpu_s(process) - was) / elapsed_s
            costs.append(Cost(name_of(process, workers), percent, process.memory_full_info().pss))
        except psutil.NoSuchProcess:
            continue  # the process has ended in the meantime
    return costs


def report(costs: list[Cost]) -> int:
    """Print the table. Return 1 when a limit is exceeded, else 0."""
    made = table("idle cluster", ("process",), ("CPU, % of a core", "PSS"))
    for cost in sorted(costs, key=lambda cost: -cost.cpu_percent):
        made.add_row(cost.name, f"{cost.cpu_percent:.2f}", size(cost.pss_bytes))
    cpu, memory = sum(cost.cpu_percent for cost in costs), sum(cost.pss_bytes for cost in costs)
    made.add_section()
    made.add_row("all", f"{cpu:.2f}", size(memory), style="bold")
    made.add_row("limit", f"{CPU_LIMIT_PERCENT:.2f}", size(MEMORY_LIMIT_BYTES))
    make_console().print(made)
    return int(cpu > CPU_LIMIT_PERCENT or memory > MEMORY_LIMIT_BYTES)


def run(config: ClusterConfig, seconds: float, stop: StopSignals) -> int:
    """Start the cluster, let it settle, measure it for `seconds`, and return the exit status."""
    view = StartView(make_console(), after_ray=stop.reclaim)
    with Cluster(config, stop=stop.event, listener=view) as cluster:
        stop.at_once = cluster.kill
        with view:
            cluster.start()
        supervisor = threading.Thread(target=cluster.supervise, daemon=True)  # the supervisor's ticks are part of the cost
        supervisor.start()
        stop.event.wait(SETTLE_S)
        workers = {worker.pid: worker.worker_id for worker in cluster.reports}
        status = report(measure(seconds, workers, stop.event))
        stop.event.set()
        supervisor.join(5.0)
    return status


@click.command()
@cluster_options
@click.option("--seconds", type=float, default=30.0, show_default=True, help="Length of the window.")
@one_line_errors
def main(seconds: float, **flags: Any) -> int:
    """Measure an idle cluster."""
    given = {name: value for name, value in flags.items() if value is not None}
    config = cluster_config(**{"http_port": 0, "prefill": 1, "decode": 2, **given})
    with StopSignals() as stop:
        return stop.run(lambda: run(config, seconds, stop))


if __name__ == "__main__":
    sys.exit(main())
