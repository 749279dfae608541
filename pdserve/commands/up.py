"""`pdserve up`: start a cluster, print its addresses, and keep it up until a signal."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from pdserve.commands.failures import one_line_errors
from pdserve.commands.settings import ClusterCommand, cluster_config, cluster_options

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.cluster.launch import Cluster
    from pdserve.commands.progress import StartView
    from pdserve.commands.stopping import StopSignals
    from pdserve.config import ClusterConfig


@click.command(cls=ClusterCommand)
@cluster_options
@click.option(
    "--cluster-token",
    default="",
    envvar="PDSERVE_CLUSTER_TOKEN",
    show_envvar=True,
    help="Secret of the router, its workers, and administrators on other machines (default: a new one).",
)
@one_line_errors
def up(cluster_token: str, **flags: Any) -> int:
    """Start a router and both pools, and run until SIGINT or SIGTERM. A second signal stops at once.

    Stopping cancels all running requests. `pdserve drain` takes a worker out of service without losing anything.
    """
    config = cluster_config(**flags)
    from pdserve.commands.stopping import StopSignals
    from pdserve.observe.title import set_title

    set_title("up")

    with StopSignals() as stop:
        return stop.run(functools.partial(_serve, config, stop, cluster_token))


def _serve(config: ClusterConfig, stop: StopSignals, cluster_token: str) -> int:
    """Start the cluster, supervise it and close it. Return 0, also when a signal came during the start."""
    from pdserve.cluster.errors import Interrupted
    from pdserve.cluster.launch import Cluster
    from pdserve.commands.console import make_console
    from pdserve.commands.progress import StartView

    console = make_console()
    view = StartView(console, after_ray=stop.reclaim)
    try:
        with Cluster(config, stop=stop.event, listener=view, cluster_token=cluster_token) as cluster:
            stop.at_once = cluster.kill
            _start(cluster, view, console)
            cluster.supervise()
            console.print("stopping")
    except Interrupted:
        console.print("stopped while starting")
        return 0
    console.print("stopped; nothing is left running")
    return 0


def _start(cluster: Cluster, view: StartView, console: Console) -> None:
    from pdserve.client import InferenceClient
    from pdserve.cluster.launch import reachable
    from pdserve.commands import tables

    with view:
        endpoints = cluster.start()
    with InferenceClient(reachable(endpoints.grpc)) as client:
        info = client.model_info()
        console.print(tables.pool(cluster.reports))
    dtypes = f"{info.dtype}, KV in {info.kv_cache_dtype}"
    console.print(f"model  {info.model}, {dtypes}, up to {info.max_model_len} tokens a request")
    console.print(f"HTTP   http://{endpoints.http}/v1")
    console.print(f"gRPC   {endpoints.grpc}")
    console.print(f"admin  {endpoints.admin}")
    console.print(f"logs   {cluster.folders.logs}")
    console.print(f"try    {first_request(reachable(endpoints.grpc), chat=info.has_chat_template)}")
    console.print("ready; Ctrl-C stops it")


def first_request(address: str, *, chat: bool) -> str:
    """Return a command that sends a first request. chat: the model has a chat template. A model without one goes on with a
    text."""
    prompt = "--chat 'Why is the sky blue?'" if chat else "'The sky is blue because'"
    return f"pdserve generate --address {address} {prompt}"
