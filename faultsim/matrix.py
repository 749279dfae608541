"""The directed matrix: every step of the protocol, every actor in it, killed, stalled, or its message dropped or repeated.

A first run without faults counts the steps. Each cell is then a run of its own, with the same few requests, in which one
thing happens once. Requests of such a run must all succeed, except where the fault is more than one loss can be hidden.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from faultsim.engine import BLOCK_SIZE
from faultsim.faults import Fault, FaultKind
from faultsim.oracle import MAX_MODEL_LEN
from faultsim.run import RunReport, calm_plan, draw_asks, simulate
from faultsim.swarm import mapped
from faultsim.tap import Act, Cell, Census
from faultsim.transfer import ReadFaults
from faultsim.world import Shape
from pdserve.core.errors import ErrorCode
from pdserve.sim.network import Weather

UNTIL_S: Final = 7.0
NUM_ASKS: Final = 6
SEED: Final = 1

ROUGH_FAULTS: Final = (
    Fault(0.5, FaultKind.DRAIN, "decode0"),
    Fault(3.0, FaultKind.DRAIN, "decode1", other="router"),
    Fault(2.0, FaultKind.DRAIN, "prefill1", other="router"),
)
NOT_A_STEP: Final = ("end_of_stream",)
"""How a connection closes: an end that is lost is a connection that broke, which is what `kill` shows."""


@dataclass(slots=True)
class CellReport:
    cell: Cell
    hits: int
    run: RunReport


@dataclass(slots=True)
class MatrixReport:
    cells: list[CellReport] = field(default_factory=list)

    @property
    def failed(self) -> list[CellReport]:
        return [report for report in self.cells if report.run.problems]

    @property
    def missed(self) -> list[Cell]:
        """Cells of which no occurrence was hit: their steps were not reached."""
        hits: Counter[tuple[str, str, Act]] = Counter()
        for report in self.cells:
            hits[_key(report.cell)] += report.hits
        return [report.cell for report in self.cells if not hits[_key(report.cell)]]

    def lines(self) -> list[str]:
        """A table: steps and actors down, faults across, and in each field how often it was hit."""
        hits: Counter[tuple[str, str, Act]] = Counter()
        outcomes: Counter[str] = Counter()
        for report in self.cells:
            hits[_key(report.cell)] += report.hits
            outcomes += report.run.outcomes
        rows = dict.fromkeys((step, actor) for step, actor, _ in map(_key, [r.cell for r in self.cells]))
        lines = [f"{'step':<24}{'actor':<10}" + "".join(f"{act.value:>12}" for act in Act)]
        for step, actor in rows:
            fields = [_field(hits, (step, actor, act)) for act in Act]
            lines.append(f"{step:<24}{actor:<10}" + "".join(f"{text:>12}" for text in fields))
        for report in self.failed:
            cell = report.cell
            lines.append(f"cell {cell} failed; again: python -m faultsim --cell {cell}")
            lines += [f"    {problem}" for problem in report.run.problems[:5]]
        lines += [f"never reached: {cell}" for cell in self.missed]
        ended = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
        lines.append(f"{len(self.cells)} cells, {sum(hits.values())} hit, {len(self.failed)} failed; requests: {ended}")
        return lines


def cells_of(*, nths: tuple[int, ...]) -> list[Cell]:
    """Every fault that each step can meet, at those of its occurrences. Of the rough scenario only what is its own."""
    calm, rough = _steps(rough=False), _steps(rough=True)
    cells = []
    for (step, actor), acts in {**rough, **calm}.items():
        is_rough = (step, actor) not in calm
        cells += [Cell(step, actor, act, nth, is_rough) for act in acts for nth in nths]
    return sorted(cells, key=_order)


def _steps(*, rough: bool) -> dict[tuple[str, str], tuple[Act, ...]]:
    """By step and actor, from a run in which nothing is done to them."""
    census = Census()
    report = _run(census, rough=rough)
    assert not report.problems, report.problems
    messages = {step for step, _ in census.arrived}
    ends = (Act.KILL, Act.STALL, Act.LONG_STALL)
    found = {key: tuple(Act) if key[0] in messages else ends for key in census.sent}
    found.update({key: ends for key in census.arrived if key not in found})
    return {key: acts for key, acts in found.items() if key[0] not in NOT_A_STEP}


def run_cell(cell: Cell) -> CellReport:
    census = Census(cell)
    report = _run(census, rough=cell.rough)
    if not report.problems:
        report.problems += _must_succeed(cell, report)
    return CellReport(cell, census.hits, report)


def run_matrix(
    *,
    nths: tuple[int, ...] = (0, 1, 3),
    every: int = 1,
    jobs: int = 1,
    progress: Callable[[MatrixReport], None] = lambda _: None,
) -> MatrixReport:
    """`every`: only each so many-th cell, for a quick look."""
    matrix = MatrixReport()
    with mapped(jobs) as apply:
        for report in apply(run_cell, cells_of(nths=nths)[::every]):
            matrix.cells.append(report)
            progress(matrix)
    matrix.cells.sort(key=lambda report: _order(report.cell))
    return matrix


def _run(census: Census, *, rough: bool) -> RunReport:
    rng = random.Random(f"{SEED} matrix")
    asks = draw_asks(rng, NUM_ASKS, until_s=UNTIL_S / 2, unruly=False)
    if not rough:
        return simulate(SEED, Shape(), calm_plan(UNTIL_S), asks, census)
    crowd = draw_asks(rng, 2 * NUM_ASKS, until_s=0.5, unruly=False)
    asks += [replace(ask, name=f"leaves-{ask.name}", leaves_after_s=0.02 * i) for i, ask in enumerate(crowd)]
    plan = replace(calm_plan(UNTIL_S), faults=ROUGH_FAULTS, weather=Weather(delay_s=0.03), reads=ReadFaults(failed=0.3))
    shape = Shape()
    tight = replace(shape, decode=replace(shape.decode, num_blocks=MAX_MODEL_LEN // BLOCK_SIZE))
    return simulate(SEED, tight, plan, asks, census)


def _must_succeed(cell: Cell, report: RunReport) -> list[str]:
    """One fault is hidden from every client, unless it is the router's, which the clients are connected to."""
    if cell.rough:
        return []  # its other faults may use up what is allowed
    bad = {name: count for name, count in report.outcomes.items() if name != "ok"}
    if cell.actor == "router" and cell.act not in (Act.DROP, Act.DUPLICATE):
        bad.pop(ErrorCode.REPLICA_LOST.value, None)  # a broken connection: the client tries again
        bad.pop(ErrorCode.UNAVAILABLE.value, None)  # asked before the workers were found, or found again
    return [f"{count} requests ended with {name}, of a single fault" for name, count in bad.items()]


def _order(cell: Cell) -> tuple[str, str, int, int]:
    return cell.step, cell.actor, list(Act).index(cell.act), cell.nth


def _key(cell: Cell) -> tuple[str, str, Act]:
    return cell.step, cell.actor, cell.act


def _field(hits: Counter[tuple[str, str, Act]], key: tuple[str, str, Act]) -> str:
    return str(hits[key]) if key in hits else "-"
