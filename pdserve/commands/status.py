"""`pdserve status`: show the pools, their KV and their queues, once or continuously."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from pdserve.commands.failures import one_line_errors
from pdserve.commands.requests import admin_options

if TYPE_CHECKING:
    from rich.console import Console, Group

    from pdserve.client import AdminClient
    from pdserve.rpc.v1 import inference_pb2

INTERVAL_S = 1.0  # workers report once a second


@click.command(short_help="Show workers, queues, KV and the sizes of the pools.")
@admin_options
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the state as one JSON object.")
@one_line_errors
def status(address: str, cluster_token: str, watch: bool, as_json: bool) -> int:
    """Show the workers, their queues and their use of KV, and how the sizes of the pools change."""
    from pdserve.client import AdminClient
    from pdserve.commands.console import make_console

    console = make_console()
    with AdminClient(address, cluster_token) as client:
        state = client.cluster_state()
        if as_json:
            from google.protobuf.json_format import MessageToDict

            fields = MessageToDict(state, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            click.echo(json.dumps(fields))
        elif watch:
            _watch(client, console)
        else:
            console.print(_drawn(state, console))
    return 0


def _drawn(state: inference_pb2.GetClusterStateResponse, console: Console) -> Group:
    from rich.console import Group

    from pdserve.commands import tables
    from pdserve.commands.scaling.tables import summary

    return Group(tables.status(state, console.width), *summary(state.scaling))


def _watch(client: AdminClient, console: Console) -> None:
    """Draw the state every second, in place on a terminal. Ctrl-C ends it and is not an error."""
    from rich.live import Live

    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                now = _drawn(client.cluster_state(), console)
                if console.is_terminal:
                    live.update(now, refresh=True)
                else:
                    console.print(now)
                time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        return
