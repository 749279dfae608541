"""`pdserve demo`: a real model answers through two pools on free ports. Then all is stopped and checked for leftovers."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from pdserve.commands.failures import FAILED, INTERRUPTED, one_line_errors, report
from pdserve.commands.requests import build
from pdserve.commands.settings import cluster_config, cluster_options
from pdserve.core.errors import PdserveError

if TYPE_CHECKING:
    from pathlib import Path

    from psutil import Process
    from rich.console import Console

    from pdserve.cluster.launch import Cluster
    from pdserve.commands.progress import StartView
    from pdserve.commands.prompts import PromptStream
    from pdserve.commands.stopping import StopSignals
    from pdserve.config import ClusterConfig

MAX_TOKENS: Final = 48
PROMPTS: Final = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a haiku about two machines that share one memory.",
    "List three uses of a Raspberry Pi.",
    "What does a key-value cache hold in a language model?",
)
DEFAULTS: Final = {
    "http_port": 0,
    "grpc_port": 0,
    "link_port": 0,
    "admin_port": 0,
    "prefill": 1,
    "decode": 2,
    "placement": "disaggregated",
}
POOL_BYTES: Final = 64 << 20
"""The KV pool of each worker for the default model: 2,900 tokens, of which the prompts need a tenth. A start touches all pages
of a pool, so a small one starts sooner. Other models keep the default of `pdserve up`."""


@dataclass(slots=True)
class DemoSeen:
    """The things that must be gone at the end of the demonstration."""

    folders: list[Path] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)  # log folders; after a failure they are kept and not listed here
    addresses: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)


@click.command(short_help="Start three workers, stream a few prompts, and stop.")
@cluster_options
@one_line_errors
def demo(**flags: Any) -> int:
    """Start one prefill worker and two decode workers, stream a few prompts, stop, and check that nothing is left."""
    given = {name: value for name, value in flags.items() if value is not None}
    small = {} if {"model", "config"} & given.keys() else {"kv_cache_memory": POOL_BYTES}
    config = cluster_config(**{**DEFAULTS, **small, **given})
    from pdserve.commands.stopping import StopSignals

    with StopSignals() as stop:
        return stop.run(functools.partial(_demonstrate, config, stop))


def _demonstrate(config: ClusterConfig, stop: StopSignals) -> int:
    """Run the demonstration and check what it left. Return the exit status; an earlier failure wins over leftovers."""
    from pdserve.cluster.errors import Interrupted
    from pdserve.cluster.leftovers import Before
    from pdserve.cluster.processes import age_s
    from pdserve.commands.console import make_console

    console = make_console()
    begun = time.monotonic() - age_s(os.getpid())
    before = Before.now()
    seen = DemoSeen()
    status = 0
    try:
        _run(config, stop, console, seen, begun)
    except Interrupted:
        status = INTERRUPTED
    except PdserveError:
        seen.logs.clear()
        raise
    finally:  # a start that failed must leave nothing either
        left = before.compare(seen.folders + seen.logs, seen.addresses, seen.processes)
        _say_left(console, left.found, seen)
    return FAILED if left and not status else status


def _run(config: ClusterConfig, stop: StopSignals, console: Console, seen: DemoSeen, begun: float) -> None:
    """Start the cluster, stream the prompts and print the tables.

    Raises `ClusterError` when a request failed or moved no KV, and `Interrupted` when a signal asked to stop.
    """
    from pdserve.client import InferenceClient
    from pdserve.cluster.errors import ClusterError
    from pdserve.cluster.launch import Cluster, reachable
    from pdserve.commands import prompts, tables
    from pdserve.commands.progress import StartView

    imported_s = time.monotonic() - begun
    view = StartView(console, after_ray=stop.reclaim)
    with Cluster(config, stop=stop.event, listener=view) as cluster:
        stop.at_once = cluster.kill
        try:
            with view:
                endpoints = cluster.start()
        finally:
            _remember(cluster, seen)
        started_s = time.monotonic() - begun
        with InferenceClient(reachable(endpoints.grpc)) as client:
            console.print(tables.pool(cluster.reports))
            streams = prompts.run(client, _requests(), console, stop.event)
        served = {s.name: (s.last.report, s.last.usage) for s in streams if s.last is not None}
        console.print(tables.requests(served))
        _say_start(console, cluster, view, imported_s, started_s, begun, streams)
        if problems := [f"{stream.name}: {problem}" for stream in streams if (problem := _problem(stream))]:
            raise ClusterError(f"{'; '.join(problems)}; see {cluster.folders.logs}")
        console.print("stopping")


def _requests() -> dict[str, tuple[str, Any]]:
    return {
        f"r{number}": (prompt, build(messages=[("user", prompt)], max_tokens=MAX_TOKENS, temperature=0.0))
        for number, prompt in enumerate(PROMPTS)
    }


def _problem(stream: PromptStream) -> str | None:
    """Return why a request does not count as served; None when it was served whole and its KV crossed between workers."""
    if stream.problem or stream.last is None:
        return stream.problem
    return None if stream.last.report.kv_bytes else "no KV bytes were moved between workers"


def _remember(cluster: Cluster, seen: DemoSeen) -> None:
    """Note the folders, addresses and processes that exist now, so that their absence can be checked later."""
    from pdserve.cluster.launch import reachable
    from pdserve.cluster.processes import descendants

    if cluster.folders is None:
        return
    seen.folders += [cluster.folders.private]
    if cluster.folders.logs_are_ours:
        seen.logs += [cluster.folders.logs]
    if cluster.endpoints:
        found = cluster.endpoints
        seen.addresses += [reachable(address) for address in (found.http, found.grpc, found.link, found.admin)]
    seen.addresses += [worker.address for worker in cluster.reports]
    seen.processes += descendants(os.getpid())


def _say_start(
    console: Console,
    cluster: Cluster,
    view: StartView,
    imported_s: float,
    started_s: float,
    begun: float,
    streams: Sequence[PromptStream],
) -> None:
    """Print the parts of the time to the first token. They overlap: router and Ray start together, and so do workers."""
    from pdserve.commands import tables

    firsts = [stream.first_token_at - begun for stream in streams if stream.first_token_at is not None]
    made = tables.table("where the time goes", ("step",), ("seconds",))
    made.add_row("this command's own start", f"{imported_s:.1f}")
    for part, seconds in view.seconds.items():
        made.add_row(part.value, f"{seconds:.1f}")
    for worker in cluster.reports:
        steps = f"  {worker.worker_id}: process {worker.process_s:.1f}, imports {worker.import_s:.1f}, model and agent"
        made.add_row(steps, f"{worker.load_s:.1f}")
    if firsts:
        made.add_row("ready to first token", f"{min(firsts) - started_s:.1f}")
        made.add_row("start of the command to first token", f"{min(firsts):.1f}", style="bold")
    console.print(made)


def _say_left(console: Console, found: Sequence[str], seen: DemoSeen) -> None:
    if found:
        for line in found:
            report(f"left behind: {line}", FAILED)
        return
    counts = f"{len(seen.processes)} processes, {len(seen.addresses)} ports, {len(seen.folders + seen.logs)} folders"
    console.print(f"stopped; nothing is left ({counts} and shared memory checked)")
