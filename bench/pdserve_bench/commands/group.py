"""`pdserve bench`: the group of the commands that measure a running cluster."""

from __future__ import annotations

import click

from pdserve_bench.commands.compare import compare
from pdserve_bench.commands.goodput import goodput
from pdserve_bench.commands.run import run
from pdserve_bench.commands.verdict import verdict


@click.group("bench", short_help="Measure a cluster, find its best layout, get a verdict.")
def bench() -> None:
    """Measure a running cluster, find the best layout of its workers, and get a verdict."""


for command in (run, goodput, compare, verdict):
    bench.add_command(command)
