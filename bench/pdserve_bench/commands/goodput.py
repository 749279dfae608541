"""`pdserve bench goodput`: find the layout of a running cluster, and the rate, with the highest goodput."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from pdserve.commands.failures import INTERRUPTED, one_line_errors, report
from pdserve.commands.requests import DEFAULT_ADMIN_ADDRESS, address_option
from pdserve.commands.settings import POSITIVE, Whole
from pdserve.core.errors import ConfigError

UNFINISHED: Final = 3
"""The exit status of a search whose budget was used up before the best layout was certain."""
TEMPORARY: Final = "temporary"
"""The click object of a caller whose --result-file does not outlast the search."""
FILE: Final = click.Path(dir_okay=False, path_type=Path)


@click.command("goodput", short_help="Find the layout and the rate of the highest goodput.")
@address_option
@click.option("--admin-address", default=DEFAULT_ADMIN_ADDRESS, show_default=True, metavar="HOST:PORT", help="Admin address.")
@click.option(
    "--cluster-token", default="", envvar="PDSERVE_CLUSTER_TOKEN", show_envvar=True, help="Needed where that is not loopback."
)
@click.option("--workload", required=True, help="YAML file, or a short form such as random:1024/128, sessions:, mooncake:FILE.")
@click.option("--tokenizer", help="Directory, GGUF file or Hugging Face id with the model's tokenizer, for prompts of text.")
@click.option("--ttft", type=float, default=1.0, show_default=True, metavar="S", help="Target for the first token; 0: none.")
@click.option("--tpot", type=float, default=0.05, show_default=True, metavar="S", help="Target for each other token; 0: none.")
@click.option("--attainment", type=float, default=0.9, show_default=True, help="Share of requests that meets both targets.")
@click.option("--budget-minutes", type=float, default=30.0, show_default=True, help="Longest time of the search, in all.")
@click.option(
    "--max-point-s", type=float, metavar="S", help="Longest run of one rate.  [default: a 16th of the budget, less with --tp]"
)
@click.option("--tolerance", type=float, default=0.05, show_default=True, help="Share by which an interval may be wide.")
@click.option("--chunks", default="auto", show_default=True, help="Sizes of chunks, such as 128,256,512,1024.")
@click.option("--splits", default="auto", show_default=True, help="Prefill and decode workers, such as 1:3,2:2,0:4.")
@click.option(
    "--tensor-parallel-size",
    "-tp",
    "--tp",
    metavar="N,N",
    help="Degrees to compare, such as 1,2: the search starts clusters of each on this machine.",
)
@click.option(
    "--cores", type=POSITIVE, help="With it: cores of each layout, one for each rank.  [default: all of this machine]"
)
@click.option("--gpus", type=POSITIVE, help="With it: GPUs of each layout instead of cores (engine.backend vllm).")
@click.option("--config", type=FILE, metavar="FILE", help="With it: the settings of the clusters, as for `pdserve up`.")
@click.option("--model", help="With it: the model of the clusters, as for `pdserve up`.")
@click.option(
    "--placement",
    type=click.Choice(["disaggregated", "auto"]),
    default="disaggregated",
    show_default=True,
    help="Placement of requests where there are prefill workers. auto: the router colocates some.",
)
@click.option("--first-rate", type=float, help="Rate to begin with, in requests a second.  [default: a short measurement]")
@click.option("--allow-late", is_flag=True, help="Count points although the generator was late.")
@click.option("--seed", type=Whole(62), default=0, show_default=True, help="Seed of the workload.")
@click.option("--result-file", type=FILE, metavar="FILE.json", help="Keep every point here; a search goes on with its file.")
@click.option("--resume", type=FILE, metavar="FILE.json", help="Go on with this file.  [default: --result-file]")
@one_line_errors
def goodput(**flags: Any) -> int:
    """Find the highest rate at which enough requests meet their targets, over the layouts of a running cluster.

    The search changes the roles of the workers and their budgets, and brings the first ones back when it ends. Nobody else may
    use the cluster meanwhile. With --tensor-parallel-size it starts clusters itself, one after the other, and compares degrees
    too; each layout has all cores or GPUs. Ctrl-C ends it; the same command goes on with its file. The status is 3 when the
    budget was used up before the best layout was certain, and 130 after Ctrl-C.
    """
    from pdserve_bench.commands.goodput_session import search

    context = click.get_current_context()
    for name in ("address", "admin_address", "cluster_token"):
        given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if flags["tensor_parallel_size"] is not None and given:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} is of a running cluster, and with --tensor-parallel-size the search starts its own: leave one out"
            )
    outcome = search(flags)
    if outcome.interrupted:
        return INTERRUPTED
    if not outcome.complete:
        hint = "Run the same command again to go on, with more --budget-minutes if no rate was decided"
        if flags["result_file"] is None or context.obj is TEMPORARY:
            hint = "Give more --budget-minutes, and a --result-file with which a search goes on where it ended"
        return report(f"the search is not complete: {outcome.reason}. {hint}", UNFINISHED)
    return 0
