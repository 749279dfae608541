"""The planner on loads that it was not tuned on, beside static splits and schedules that know each load in advance.

`python -m bench.planner_loads [--group GROUP ...] [--only LOAD ...] [--json FILE]`

`sim.perf.loads` has the groups `tune`, `check` and `held-out`, and says what is drawn. `sim.perf.judge` says what counts as
a loss, and `sim.perf.oracle` what the schedules are. All runs use the production core and schedulers, and modelled steps
(docs/design/0033 and 0035). A load takes minutes of one core; `--json` keeps each one as soon as it is judged.
`--reference` keeps the splits and schedules, which have nothing to do with the planner, and takes those that it has. The
planner alone takes a minute.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdserve.core.errors import ConfigError
from sim.perf.days import Day
from sim.perf.judge import Judged, Reference, judge, reference_of
from sim.perf.loads import GROUPS, Load, loads_of
from sim.perf.oracle import Oracle
from sim.perf.statics import Split


def table_of(judged: Sequence[Judged], day: Day) -> Table:
    """Return the table of some loads. Worker-hours never stand without the share that was attained with them."""
    columns = ("load", "planner", "worst 40", "overdue s", "static split", "planner takes", "oracle", "planner takes")
    table = Table(*columns, title="worker-hours and the share in time; the static split is the cheapest that attains the same")

    def cost(run: Judged | Split | Oracle) -> str:
        return f"{run.worker_s / (60.0 * day.minutes_per_hour):.1f} at {run.attainment:.2%}"

    for one in judged:
        same, oracle = one.same, one.oracle
        table.add_row(
            f"{one.load.name}: {one.load.words}",
            cost(one),
            f"{one.below.worst:.0%}",
            f"{one.below.overdue_s:.0f}",
            "none attains it" if same is None else f"{same.prefill} + {same.decode}: {cost(same)}",
            "" if same is None else f"{one.worker_s / same.worker_s:.0%}",
            "none was found" if oracle is None else cost(oracle),
            "" if oracle is None else f"{one.worker_s / oracle.worker_s:.0%}",
        )
    return table


def losses_of(judged: Sequence[Judged]) -> list[str]:
    """Return a line for each loss, and one for each group."""
    lines = [f"{one.load.name} loses: {loss}" for one in judged for loss in one.losses]
    for group in GROUPS:
        of_group = [one for one in judged if one.load.group == group]
        if of_group:
            lines.append(f"{group}: {sum(bool(one.losses) for one in of_group)} of {len(of_group)} loads are lost")
    return lines


def record_of(one: Judged) -> dict[str, object]:
    """Return what the file keeps of a load."""
    runs = {name: run and asdict(run) for name, run in (("same", one.same), ("asked", one.asked), ("oracle", one.oracle))}
    own = {"load": one.load.name, "words": one.load.words, "requests": one.requests, "losses": one.losses}
    return {**own, "attainment": one.attainment, "worker_s": one.worker_s, "below": asdict(one.below), **runs}


def read_references(path: Path, day: Day) -> dict[str, Reference]:
    """Read the references of a day from a file that may not exist yet, by load."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in map(json.loads, lines):
        if line["day"] == asdict(day):
            oracle = line["oracle"] and Oracle((), line["oracle"]["attainment"], line["oracle"]["worker_s"])
            found[line["load"]] = Reference(tuple(Split(**one) for one in line["splits"]), oracle)
    return found


def reference_record(name: str, day: Day, one: Reference) -> dict[str, object]:
    """Return what a file keeps of the reference of a load."""
    splits = [asdict(split) for split in one.splits]
    return {"load": name, "day": asdict(day), "splits": splits, "oracle": one.oracle and asdict(one.oracle)}


def judged_with(load: Load, day: Day, reference: Reference | None) -> tuple[Judged, Reference]:
    """Judge a load, and return its reference too."""
    reference = reference or reference_of(load, day)
    return judge(load, day, reference), reference


def _positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, not {text}")
    return value


def parser_of() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", action="append", choices=GROUPS, help="a group to run; all unless it is given")
    parser.add_argument(
        "--only", action="append", metavar="LOAD", help="a load to run, such as check-3; all of the groups otherwise"
    )
    parser.add_argument("--minutes-per-hour", type=_positive, default=10.0, help="minutes that stand for an hour of the day")
    parser.add_argument("--hours", type=_positive, default=24.0, help="hours of the day")
    parser.add_argument("--jobs", type=int, default=2, help="loads that run at the same time, each in a process")
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and lengths; the loads stay the same")
    parser.add_argument("--json", type=Path, help="file to which a line is added for each load that was judged")
    parser.add_argument(
        "--reference", type=Path, help="file with splits and schedules that were run, to which others are added"
    )
    return parser


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Load]:
    """Return the loads of the arguments, and refuse a name that none has."""
    loads = [one for group in args.group or GROUPS for one in loads_of(group)]
    for name in args.only or ():
        if name not in {one.name for one in loads}:
            parser.error(f"--only {name}: the loads are {', '.join(one.name for one in loads)}")
    return [one for one in loads if not args.only or one.name in args.only]


def main() -> None:
    """Judge the loads of the arguments, and print the table and the losses."""
    parser = parser_of()
    args = parser.parse_args()
    loads, console = chosen(parser, args), Console(width=200)
    day = Day(args.hours, 8.0, args.minutes_per_hour, seed=args.seed)
    judged: dict[str, Judged] = {}
    known = {} if args.reference is None else read_references(args.reference, day)
    with ProcessPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(judged_with, one, day, known.get(one.name)) for one in loads]):
            try:
                one, reference = done.result()
            except ConfigError as exc:
                parser.error(str(exc))
            if args.reference is not None and one.load.name not in known:
                with args.reference.open("a") as file:
                    file.write(json.dumps(reference_record(one.load.name, day, reference)) + "\n")
            judged[one.load.name] = one
            console.print(f"{one.load.name} is judged ({len(judged)} of {len(loads)})")
            if args.json is not None:
                with args.json.open("a") as file:
                    file.write(json.dumps(record_of(one)) + "\n")
    ordered = [judged[one.name] for one in loads]
    console.print(table_of(ordered, day))
    for line in losses_of(ordered):
        console.print(line)


if __name__ == "__main__":
    main()
