"""`pdserve bench run`: send one workload to a running server and report its figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pdserve.commands.failures import FAILED, one_line_errors, report
from pdserve.commands.requests import DEFAULT_ADDRESS
from pdserve.commands.settings import Whole

if TYPE_CHECKING:
    from pdserve_bench.commands.run_session import RunOutcome

REFUSED: Final = 3
"""The exit status of a run that does not count, because the generator was late."""
SIGNALLED: Final = 128
"""Shells report the end by a signal so: 130 for Ctrl-C and 143 for SIGTERM."""
BACKENDS: Final = click.Choice(["grpc", "openai", "openai-chat"])
POSITIVE: Final = click.IntRange(min=1)
FILE: Final = click.Path(dir_okay=False, path_type=Path)


@click.command("run", short_help="Send a workload to a server and report its figures.")
@click.option("--backend", type=BACKENDS, help="API of the server.  [default: openai with --base-url, else grpc]")
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, metavar="HOST:PORT", help="gRPC address of the router.")
@click.option(
    "--admin-address", metavar="HOST:PORT", help="Admin address, to note the workers.  [default: that of a default --address]"
)
@click.option(
    "--cluster-token", default="", envvar="PDSERVE_CLUSTER_TOKEN", help="Needed where the admin port is not on loopback."
)
@click.option("--base-url", metavar="URL", help="Server with OpenAI's API, such as http://127.0.0.1:8000.")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="Better set OPENAI_API_KEY: other users see arguments.")
@click.option("--model", default="", help="Name of the model.  [default: the one that the server names first]")
@click.option("--tokenizer", help="Directory, GGUF file or Hugging Face id with the model's tokenizer, for prompts of text.")
@click.option("--workload", help="YAML file, or a short form such as random:1024/128, sessions:, mooncake:FILE.")
@click.option("--random-input-len", type=POSITIVE, help="Without --workload: tokens of each prompt.  [default: 1024]")
@click.option("--random-output-len", type=POSITIVE, help="Without --workload: tokens of each answer.  [default: 128]")
@click.option("--request-rate", type=float, help="Requests a second; inf: all at once.  [default: the workload's, else inf]")
@click.option("--burstiness", type=float, help="1 is Poisson; less is more bursty, more is more even.  [default: 1]")
@click.option("--trace-timestamps", is_flag=True, help="Send the requests at their recorded times.")
@click.option(
    "--max-concurrency", type=POSITIVE, help="Most requests at the same time; those that wait for a place are not late."
)
@click.option("--num-prompts", type=POSITIVE, help="Measured requests.  [default: 1000 without --duration]")
@click.option("--duration", "duration_s", type=float, metavar="S", help="Send measured requests for so many seconds.")
@click.option("--warmup-requests", type=click.IntRange(min=0), default=0, help="Do not measure the first requests.")
@click.option("--warmup-s", type=float, default=0.0, metavar="S", help="Do not measure requests of the first seconds.")
@click.option(
    "--request-timeout-s", type=float, default=600.0, show_default=True, metavar="S", help="Longest time of a request."
)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Answers have exactly the planned length.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Randomness of the tokens.")
@click.option("--seed", type=Whole(63), default=0, show_default=True, help="Seed of the workload.")
@click.option(
    "--goodput",
    multiple=True,
    metavar="ttft:MS tpot:MS",
    help="Targets of each request, in milliseconds.  [default: ttft:1000 tpot:50]",
)
@click.option("--percentiles", default="50,90,99", show_default=True, help="Percentiles of times, with commas between.")
@click.option("--result-file", type=FILE, help="Write all rows and the meta as JSON. An earlier file is replaced.")
@click.option("--parquet", type=FILE, help="Write the same as parquet.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Put this into the files.")
@click.option("--compare", type=FILE, help="Compare the run with an earlier one, a file of --result-file.")
@click.option("--allow-late", is_flag=True, help="Only warn when the generator was late.")
@click.option(
    "--continuous-usage/--no-continuous-usage", default=None, help="Ask for token counts in each chunk.  [default: if known]"
)
@click.argument("more", nargs=-1, metavar="")
@one_line_errors
def run(more: tuple[str, ...], **flags: Any) -> int:
    """Send a workload to a running server and report its figures.

    The status is 3 when the generator was late, so that its figures do not count; 1 when no request was answered; 130 after
    Ctrl-C and 143 after SIGTERM, which report and write what was measured until then.
    """
    from pdserve_bench.commands.run_session import measure

    _take_more(more, flags)
    outcome = measure(flags)
    return _status(outcome, flags["allow_late"])


def _take_more(more: tuple[str, ...], flags: dict[str, Any]) -> None:
    """Give each further word to the flag that it belongs to: vLLM's flags take several words after each other."""
    for word in more:
        flag = "metadata" if "=" in word else "goodput"
        if not flags[flag]:
            raise click.UsageError(f"unexpected argument {word!r}")
        flags[flag] = (*flags[flag], word)


def _status(outcome: RunOutcome, allow_late: bool) -> int:
    if outcome.refused:
        if not allow_late:
            return report(outcome.refused, REFUSED)
        click.echo(f"warning: {outcome.refused}", err=True)
    if outcome.stopped_by:
        return SIGNALLED + outcome.stopped_by
    if not outcome.requests:
        return report("no request was sent: none was due before the end of the run; raise --request-rate or --duration", FAILED)
    if not outcome.completed:
        return report("no request was answered; the table of errors says why", FAILED)
    return 0
