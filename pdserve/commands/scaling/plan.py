"""`pdserve plan`: show which sizes the planner wants and why, or plan once from a cluster that nobody scales."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import click

from pdserve.commands.failures import FAILED, one_line_errors, report
from pdserve.commands.requests import admin_options

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.client import AdminClient
    from pdserve.config import ClusterConfig
    from pdserve.rpc.v1 import scaling_pb2

DRY_RUN_S: Final = 5.0


@click.command("plan", short_help="Show which sizes the planner wants, and why.")
@admin_options
@click.option("--explain", is_flag=True, help="Also show the reasons, and the numbers behind the sizes.")
@click.option("--dry-run", is_flag=True, help="Plan now from what happens in the next seconds; nobody follows this plan.")
@click.option("--seconds", type=click.FloatRange(1, 600), help="Length of what --dry-run looks at.  [default: 5]")
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False),
    default=None,
    help="YAML file with the limits and targets for --dry-run.",
)
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Set any setting of that YAML for --dry-run.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@one_line_errors
def plan(
    address: str,
    cluster_token: str,
    explain: bool,
    dry_run: bool,
    seconds: float | None,
    config_file: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show the last decision of the planner, also where the sizes are fixed and nobody follows it."""
    from pdserve.client import AdminClient
    from pdserve.commands.console import make_console
    from pdserve.config import ClusterConfig, load

    if (config_file or overrides or seconds) and not dry_run:
        raise click.UsageError("--config, --set and --seconds change only what --dry-run plans")
    config = load(ClusterConfig, config_file, overrides)
    console = make_console()
    with AdminClient(address, cluster_token) as client:
        if dry_run:
            made = _planned(client, config, seconds or DRY_RUN_S)
            _show(console, made, {}, explain=explain, as_json=as_json)
            return 0
        scaling = client.cluster_state().scaling
    if not scaling.report.HasField("plan"):
        return report(
            "nobody has planned yet: no `pdserve up` polls this router, or its first interval runs: try again in a few seconds",
            FAILED,
        )
    now = scaling.report
    present = {"mode": now.mode, "prefill": now.prefill, "decode": now.decode}
    _show(console, now.plan, present, explain=explain, as_json=as_json)
    return 0


def _show(console: Console, made: scaling_pb2.ScalingPlan, present: dict[str, Any], *, explain: bool, as_json: bool) -> None:
    from pdserve.commands.scaling import tables

    if as_json:
        from google.protobuf.json_format import MessageToDict

        click.echo(json.dumps(present | MessageToDict(made, preserving_proto_field_name=True)))
        return
    if present:
        followed = "follows the planner" if present["mode"] == "automatic" else "does not follow the planner"
        console.print(f"wanted: prefill {present['prefill']}, decode {present['decode']} ({present['mode']}, {followed})")
    console.print(tables.plan(made, explain=explain))


def _planned(client: AdminClient, config: ClusterConfig, seconds: float) -> scaling_pb2.ScalingPlan:
    """Plan once from what happens in the next `seconds`, and from the rates since the workers' start. Nothing is changed."""
    from pdserve.cluster.scaling.limits import limits_of, planner_settings, targets_of
    from pdserve.cluster.scaling.report import plan_to_wire, reading_of
    from pdserve.planner.observe import observe, since_start
    from pdserve.planner.planner import planned_once

    settings = planner_settings(config)
    before = reading_of(client.cluster_state(), at_s=time.monotonic())
    time.sleep(seconds)
    after = reading_of(client.cluster_state(), at_s=time.monotonic())
    window = observe(before, after, slo_class=config.slo_class)
    made = planned_once(window, since_start(after), targets_of(config), limits_of(config), settings)
    return plan_to_wire(made, 0.0)
