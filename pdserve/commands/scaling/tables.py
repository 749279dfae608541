"""The sizes of the pools for people to read: who decides them, what the planner needs, who comes and leaves, what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pdserve.commands import tables
from pdserve.rpc.v1 import scaling_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN_EVENTS = 5
SILENT_S = 5.0  # an actuator polls once a second


def ago(seconds: float) -> str:
    """Write the time since an event."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def summary(scaling: scaling_pb2.ScalingState) -> list[Text | Table]:
    """Draw the wanted sizes, the workers that are not simply there, and the last events. Empty: no actuator has reported."""
    if not scaling.term:
        return []
    report = scaling.report
    silent = f", silent since {scaling.age_s:.0f} s" if scaling.age_s > SILENT_S else ""
    head = f"wanted: prefill {report.prefill}, decode {report.decode} ({report.mode}); {scaling.actuator}{silent}"
    shown: list[Text | Table] = [Text(head, "red" if silent else "")]
    if report.members:
        shown.append(_members(report.members))
    if scaling.history:
        made = tables.table("sizes of the pools", ("when",), ())
        made.add_column("what happened", overflow="fold")
        for event in scaling.history[-SHOWN_EVENTS:]:
            made.add_row(ago(event.age_s), Text(event.text))
        shown.append(made)
    return shown


def _members(members: Sequence[scaling_pb2.ScalingMember]) -> Table:
    made = tables.table("workers that come, leave or change", ("worker", "role", "phase"), ())
    made.add_column("detail", overflow="fold")
    for member in members:
        made.add_row(member.worker_id, tables.role(member.role), Text(member.phase), Text(member.detail))
    return made


def needs(pools: Sequence[scaling_pb2.PoolNeed]) -> Table:
    """Draw the way from the demand to the size of each pool. A dash: not known."""
    numbers = ("tokens/s needed", "of one worker", "correction", "workers needed", "wanted", "size")
    made = tables.table("", ("pool",), numbers)
    made.add_column("limited by", overflow="fold")
    for pool in pools:
        made.add_row(
            tables.role(pool.role),
            _number(pool, "demand_tokens_per_s", ",.0f"),
            _number(pool, "worker_tokens_per_s", ",.0f"),
            f"{pool.correction:.2f}",
            _number(pool, "raw_workers", ".2f"),
            str(pool.wanted),
            str(pool.size),
            ", ".join(pool.limits) or "-",
        )
    return made


def plan(plan: scaling_pb2.ScalingPlan, *, explain: bool) -> Group:
    """Draw a plan: the sizes, and with `explain` the reasons and the numbers behind them."""
    sizes = ", ".join(f"{tables.role(pool.role)} {pool.size}" for pool in plan.pools)
    parts: list[Text | Table] = [Text(f"the planner: {sizes}")]
    if explain:
        parts += [needs(plan.pools), *(Text(f"- {reason}") for reason in plan.reasons)]
    return Group(*parts)


def _number(pool: scaling_pb2.PoolNeed, name: str, form: str) -> str:
    return format(getattr(pool, name), form) if pool.HasField(name) else "-"
