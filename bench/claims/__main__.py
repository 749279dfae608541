"""Measures what the literature says about LLM inference on this machine, and says what of it is confirmed.

    python -m bench.claims [--budget-minutes N] [--only NAME ...] [--again] [--quick] [--results FILE] [--write-docs | --check]

Each claim has a source, a measurement in interleaved rounds, and a rule that judges the figures by their intervals: confirmed,
refuted, or it depends. The results file gets an entry as soon as a claim is measured, so an interrupted run goes on where it
stopped; entries of another commit or machine are measured again. --write-docs puts the tables and verdicts into
docs/benchmarks.md between its markers, and leaves the prose as it is. --check tells whether the page says what the results
say, and measures nothing. --quick measures the fewest rounds of small sizes, to try the code: these figures never reach a page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.claims import document
from bench.claims.claim import Claim
from bench.claims.registry import CLAIMS, by_worth
from bench.claims.results import BadResults, Results
from bench.claims.run import Identity, Outcome, run
from bench.claims.setup import ROOT, Setup, commit, describe_machine
from pdserve.core.errors import ConfigError

BENCHMARKS: Final = ROOT / "docs" / "benchmarks.md"
RESULTS: Final = ROOT / "docs" / "results" / "claims.json"
IMAGES: Final = ROOT / "docs" / "images"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget-minutes", type=float, default=25.0, help="claims that need more than what is left are left out"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[claim.name for claim in CLAIMS], metavar="NAME", help="measure only these"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure also what the results file has for this commit and machine"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds and small sizes, to try the code; never written into a page"
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    docs = parser.add_mutually_exclusive_group()
    docs.add_argument("--write-docs", action="store_true", help="write docs/benchmarks.md and its pictures from the results")
    docs.add_argument("--check", action="store_true", help="only check that docs/benchmarks.md says what the results say")
    args = parser.parse_args()
    if args.quick and args.write_docs:
        parser.error("--quick measures nothing worth a page: run without it for --write-docs")
    if args.quick and args.results == RESULTS:
        parser.error("--quick would replace the kept figures: name another file with --results")
    if args.check and (args.quick or args.again or args.only):
        parser.error("--check measures nothing: leave out --quick, --again and --only")
    if args.write_docs and args.model != "default":
        parser.error("the document tells of the default model: leave out --model for --write-docs")
    if not args.budget_minutes >= 0:
        parser.error(f"--budget-minutes must be 0 or more, got {args.budget_minutes}")
    return args


def measure(args: argparse.Namespace, results: Results, console: Console) -> Outcome:
    """Run the chosen claims with a progress bar."""
    chosen = [claim for claim in by_worth() if args.only is None or claim.name in args.only]
    setup = Setup(args.model, args.quick)
    identity = Identity(commit(), describe_machine(), setup.card.name)
    columns = (TextColumn("{task.description:20}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {claim.name: progress.add_task(claim.name, total=1.0, start=False) for claim in chosen}

        def watch(name: str, share: float) -> None:
            if not share:
                progress.start_task(bars[name])
            progress.update(bars[name], completed=share)

        budget_s = 60 * args.budget_minutes
        return run(chosen, setup, results, identity, budget_s=budget_s, again=args.again, watch=watch)


def report(outcome: Outcome, results: Results, console: Console) -> None:
    """Print the verdict of each claim that has figures, and what was left out or failed."""
    for claim in CLAIMS:
        entry = results.entries.get(claim.name)
        if entry is not None:
            judgement = claim.judgement(entry.figures)
            console.print(
                f"[bold]{claim.name}[/]: {judgement.verdict.value}{' (quick)' if entry.quick else ''}. {judgement.why}"
            )
    for name in outcome.no_time:
        console.print(f"{name}: not enough time left; give more --budget-minutes, or --only {name}")
    for name, why in outcome.failed.items():
        console.print(f"{name}: failed: {why}", style="red", markup=False)


def write_docs(results: Results) -> None:
    """Write the page and the pictures from the results."""
    BENCHMARKS.write_text(document.write(BENCHMARKS.read_text(encoding="utf-8"), CLAIMS, results.entries), encoding="utf-8")
    for claim in CLAIMS:
        entry = results.entries.get(claim.name)
        if claim.draw is not None and entry is not None and not entry.quick:
            claim.draw(entry.figures, str(IMAGES / f"{claim.image}.png"))


def in_step(results: Results, text: str, claims: tuple[Claim, ...] = CLAIMS) -> bool:
    """Tell whether a page agrees with the results."""
    return document.write(text, claims, results.entries) == text


def main() -> int:
    """Run the command. Return 1 when a claim failed, or when the page is not in step with the results."""
    args, console = arguments(), Console()
    try:
        results = Results(args.results)
        if args.check:
            if in_step(results, BENCHMARKS.read_text(encoding="utf-8")):
                return 0
            console.print(
                f"{BENCHMARKS.name} and {args.results.name} differ: run python -m bench.claims --budget-minutes 0 --write-docs"
            )
            return 1
        if args.write_docs:
            document.check_marks(
                BENCHMARKS.read_text(encoding="utf-8"), [claim.name for claim in CLAIMS]
            )  # before the time is spent
        outcome = measure(args, results, console)
        report(outcome, results, console)
        if args.write_docs:
            write_docs(results)
        return 1 if outcome.failed else 0
    except (BadResults, document.BadDocument, ConfigError, OSError) as exc:
        console.print(str(exc), style="red", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
