"""`pdserve bench compare`: two runs side by side, with intervals."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pdserve.commands.failures import FAILED, one_line_errors, report
from pdserve.commands.settings import UINT32

FILE = click.Path(exists=False, dir_okay=False, path_type=Path)


@click.command("compare", short_help="Compare two runs, with intervals.")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON object.")
@click.option("--plot", type=FILE, help="Draw TTFT and ITL of both into this file, and with -dark in its name for dark pages.")
@click.option("--seed", type=UINT32, default=0, help="Seed of the bootstrap.  [default: 0]")
@one_line_errors
def compare(a: Path, b: Path, as_json: bool, plot: Path | None, seed: int) -> int:
    """Compare run B with run A, two files of `pdserve bench run`.

    Each figure gets the ratio B / A with its 95 % interval. B is better or worse only where the whole interval is on one side
    of 1. Both are judged by the targets of A. Runs with different workloads are shown, but not compared: the status is then 1.
    """
    from pdserve.commands.console import make_console
    from pdserve_bench.report.compare import compare_runs
    from pdserve_bench.report.files import read_run
    from pdserve_bench.report.meta import slos_of
    from pdserve_bench.report.summary import columns
    from pdserve_bench.report.table import comparison_table

    run_a, run_b = read_run(a), read_run(b)
    slo_of = slos_of(run_a.meta)
    compared = compare_runs(run_a, run_b, slo_of, seed=seed)
    if as_json:
        click.echo(json.dumps(compared.to_dict()))
    else:
        make_console().print(comparison_table(compared))
    if plot is not None:
        from pdserve_bench.report.plot import draw

        draw(plot, {f"A: {a.stem}": columns(run_a.rows, slo_of), f"B: {b.stem}": columns(run_b.rows, slo_of)})
    if not compared.same_workload:
        return report("the runs had different workloads: compare runs of the same --workload and --request-rate", FAILED)
    return 0
