"""`pdserve bench verdict`: should this workload be disaggregated, how, and how sure is that?"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from pdserve.commands.failures import INTERRUPTED, one_line_errors
from pdserve.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pdserve_bench.report.files import Run
    from pdserve_bench.search.result import GoodputResult
    from pdserve_bench.verdict.data import VerdictData
    from pdserve_bench.verdict.plots import Material

NO_ANSWER: Final = 3
"""The exit status when the measurement allows no answer."""
FILE: Final = click.Path(dir_okay=False, path_type=Path)


@click.command(
    "verdict",
    short_help="Say whether two pools serve a workload better.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.option("--from", "sources", type=FILE, multiple=True, metavar="FILE", help="A search's result; also files of runs.")
@click.option("--workers", type=click.IntRange(2, 1024), metavar="N", help="Start a cluster of N workers for the search.")
@click.option("--config", type=FILE, metavar="FILE", help="The settings of that cluster, as for `pdserve up`.")
@click.option("--result-file", type=FILE, metavar="FILE.json", help="Keep the result of the search here, and go on with it.")
@click.option(
    "--price-per-hour", type=float, metavar="DOLLARS", help="Price of one worker; where degrees differ, of one core or GPU."
)
@click.option("--html", type=FILE, metavar="FILE.html", help="Write the page. It opens offline, in light and dark.")
@click.option("--png", type=FILE, metavar="FILE.png", help="Write the page as a picture.")
@click.option("--dark", is_flag=True, help="Draw the picture for dark pages.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
@one_line_errors
def verdict(
    context: click.Context,
    sources: tuple[Path, ...],
    workers: int | None,
    config: Path | None,
    result_file: Path | None,
    price_per_hour: float | None,
    html: Path | None,
    png: Path | None,
    dark: bool,
    as_json: bool,
) -> int:
    """Say whether two pools serve a workload better than one, on which layout, why, and how sure that is.

    With --from it reads the result of a search. Otherwise it searches first, and takes all flags of `pdserve bench goodput`:
    --workload, --ttft, --tpot, --address, --budget-minutes and the others. The cluster is the running one or, with --workers, a
    new one on this machine, which is stopped afterwards. With --tensor-parallel-size there is one for each degree in turn.

    The exit status is 0 after an answer, 3 when the measurement allows none, and 130 after Ctrl-C.
    """
    from pdserve.capacity.question import MOST_PRICE, check_real
    from pdserve_bench.verdict.decide import decide
    from pdserve_bench.verdict.plots import Material

    if price_per_hour is not None:
        check_real("--price-per-hour", price_per_hour, MOST_PRICE)
    if dark and png is None:
        raise ConfigError("--dark needs --png: the page has both themes already")
    result, runs, interrupted = _measured(sources, workers, config, result_file, context.args, as_json)
    found = decide(result, price_per_hour)
    write(Material(found, result, {name: run.rows for name, run in runs.items()}), html, png, dark)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        from pdserve.commands.console import make_console

        make_console().print(summary(found))
    return INTERRUPTED if interrupted else 0 if answered(found) else NO_ANSWER


def _measured(
    sources: tuple[Path, ...],
    workers: int | None,
    config: Path | None,
    result_file: Path | None,
    rest: list[str],
    as_json: bool,
) -> tuple[GoodputResult, dict[str, Run], bool]:
    """Return the result of a search, the runs beside it, and whether Ctrl-C ended the search."""
    from pdserve_bench.verdict.source import read, read_result

    if sources:
        given = [("--workers", workers), ("--config", config), ("--result-file", result_file), (" ".join(rest), rest or None)]
        for flag, value in given:
            if value is not None:
                raise ConfigError(f"{flag} is of a search, and --from reads the result of one: leave one of the two away")
        return *read(sources), False
    if config is not None and workers is None:
        rest = [
            *rest,
            "--config",
            str(config),
        ]  # for the clusters of a search over degrees, without which the search refuses it
    if workers is not None and any(one.partition("=")[0] in ("--tensor-parallel-size", "--tp", "-tp") for one in rest):
        raise ConfigError("--workers starts one cluster, and --tensor-parallel-size several ones: give --cores instead")
    if not rest:
        raise ConfigError("give --from FILE, or --workload and the other flags of `pdserve bench goodput` for a search")
    from pdserve_bench.commands.verdict_search import searched

    with tempfile.TemporaryDirectory(prefix="pdserve-verdict-") as folder:
        path = result_file or Path(folder, "goodput.json")
        interrupted = searched(rest, path, workers, config, quiet=as_json, kept=result_file is not None)
        return read_result(path), {}, interrupted


def answered(found: VerdictData) -> bool:
    """Tell whether the verdict has an answer."""
    from pdserve_bench.verdict.data import DecisionData

    return found.decision in (DecisionData.DISAGGREGATE, DecisionData.COLOCATE, DecisionData.EQUAL)


def write(material: Material, html: Path | None, png: Path | None, dark: bool) -> None:
    """Write the page and the picture, as far as they are wanted."""
    from pdserve_bench.report.files import write_whole
    from pdserve_bench.verdict import html_file
    from pdserve_bench.verdict.plots import DARK, LIGHT
    from pdserve_bench.verdict.plots import png as draw_png

    if html is not None:
        write_whole(html, html_file.html(material).encode())
    if png is not None:
        write_whole(png, draw_png(material, html_file.content(material.verdict), DARK if dark else LIGHT))


def summary(found: VerdictData) -> RenderableType:
    """Return the sentences of the page for a terminal."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from pdserve.commands.tables import table
    from pdserve_bench.verdict import words
    from pdserve_bench.verdict.plots import label
    from pdserve_bench.verdict.units import between, number

    layouts = table("layouts", ("layout",), ("requests/s", "95 % interval", "state"))
    for one in found.candidates:
        state = "settled" if one.settled else "not settled"
        layouts.add_row(label(one), number(one.goodput.value or 0.0), between(one.goodput), state)
    parts: list[RenderableType] = [Text(words.headline(found), "bold"), Text(words.trust(found), "dim"), Text()]
    sections = [
        ("", words.reasons(found)),
        ("The binding constraint", words.constraint(found.constraint) if found.constraint else []),
        ("Changes that alter the answer", words.flips(found)),
        ("How far to trust this", [f"{'! ' if one.serious else ''}{words.doubt(one)}" for one in found.doubts]),
        ("Conditions", [words.effort(found), *(f"{name}: {value}" for name, value in found.conditions.items())]),
    ]
    for title, sentences in sections:
        if title and sentences:
            parts += [Text(), Text(title, "bold")]
        parts += [Padding(Text(one), (0, 0, 0, 2 if title else 0)) for one in sentences]
    return Group(*parts, *((Text(), layouts) if found.candidates else ()))
