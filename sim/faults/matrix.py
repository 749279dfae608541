"""The matrix of directed faults. At each step of the protocol each actor is killed or stalled, its message is dropped or
repeated, a worker loses a rank, is asked for its other role, or a request that it computes ends it and every worker after it.

A first run without faults counts the steps. Each cell is then a separate run, with the same few requests, in which one fault
happens once. All requests of a calm cell must succeed, except requests that lose the router, which nothing can hide, and except
the request that ends its workers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from pdserve.core.errors import ErrorCode
from pdserve.core.shards import Degrees
from sim.faults.client import CONSTRAINTS, ClientAsk
from sim.faults.drafts import Drafting
from sim.faults.faults import Fault, FaultKind
from sim.faults.oracle import BLOCK_SIZE, MAX_MODEL_LEN
from sim.faults.run import RunReport, calm_plan, draw_asks, simulate, with_drafting, with_prefix_caching, with_ranks
from sim.faults.swarm import mapped
from sim.faults.tap import Act, Cell, Census
from sim.faults.transfer import ReadFaults
from sim.faults.world import WorldShape
from sim.world.network import Weather

UNTIL_S: Final = 7.0
NUM_ASKS: Final = 6
SEED: Final = 1

ROUGH_FAULTS: Final = (
    Fault(0.5, FaultKind.DRAIN, "decode0"),
    Fault(3.0, FaultKind.DRAIN, "decode1", other="router"),
    Fault(2.0, FaultKind.DRAIN, "prefill1", other="router"),
    *(Fault(0.7, FaultKind.WRONG_KEYS, name, other="digest") for name in ("prefill0", "prefill1", "decode1")),
)
DRAFTING: Final = Drafting(right=0.7, token_s=(0.0003,), place_s=0.0001)
GANGS: Final = with_drafting(with_ranks(WorldShape(), Degrees(tensor=2), Degrees(pipeline=2)), DRAFTING)
NOT_A_STEP: Final = ("end_of_stream",)
"""The step that closes a connection gets no cells. If it were lost, the connection would be broken, and KILL tests that."""


@dataclass(slots=True)
class CellReport:
    """The result of one cell. `hits` 0: the run did not reach the step, so the fault did not happen."""

    cell: Cell
    hits: int
    run: RunReport


@dataclass(slots=True)
class MatrixReport:
    """The results of all cells."""

    cells: list[CellReport] = field(default_factory=list)

    @property
    def failed(self) -> list[CellReport]:
        """The cells whose runs had problems."""
        return [report for report in self.cells if report.run.problems]

    @property
    def missed(self) -> list[Cell]:
        """The cells whose step was reached in no run, for any occurrence `nth`."""
        hits: Counter[tuple[str, str, Act]] = Counter()
        for report in self.cells:
            hits[_key(report.cell)] += report.hits
        return [report.cell for report in self.cells if not hits[_key(report.cell)]]

    def lines(self) -> list[str]:
        """Write a table of the hits, with a row for each step and actor and a column for each fault, and then the failures."""
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
            lines.append(f"cell {cell} failed; again: python -m sim.faults --cell {cell}")
            lines += [f"    {problem}" for problem in report.run.problems[:5]]
        lines += [f"never reached: {cell}" for cell in self.missed]
        ended = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
        lines.append(f"{len(self.cells)} cells, {sum(hits.values())} hit, {len(self.failed)} failed; requests: {ended}")
        return lines


def cells_of(*, nths: tuple[int, ...]) -> list[Cell]:
    """Return a cell for each step, actor, possible fault and occurrence of `nths` (from 0).

    Cells of the rough scenario are only for steps and actors that the calm scenario lacks.
    """
    calm, rough = _steps(rough=False), _steps(rough=True)
    cells = []
    for (step, actor), acts in {**rough, **calm}.items():
        is_rough = (step, actor) not in calm
        cells += [Cell(step, actor, act, nth, is_rough) for act in acts for nth in nths]
    return sorted(cells, key=_order)


def _steps(*, rough: bool) -> dict[tuple[str, str], tuple[Act, ...]]:
    """Return the faults that are possible at each (step, actor). A run without directed faults finds the steps."""
    census = Census()
    report = _run(census, rough=rough)
    assert not report.problems, report.problems
    messages = {step for step, _ in census.arrived}
    ends = (Act.KILL, Act.RANK, Act.STALL, Act.LONG_STALL, Act.FLIP)
    found = {key: (*ends, Act.DROP, Act.DUPLICATE) if key[0] in messages else ends for key in census.sent}
    found.update({key: ends for key in census.arrived if key not in found})
    return {key: _possible(*key, acts) for key, acts in found.items() if key[0] not in NOT_A_STEP}


def _possible(step: str, actor: str, acts: tuple[Act, ...]) -> tuple[Act, ...]:
    """Leave out the role flips and the ranks of a router. A request ends its workers at their steps."""
    if step.startswith("engine_step"):
        return (*acts, Act.POISON)
    return tuple(act for act in acts if act not in (Act.FLIP, Act.RANK) or actor != "router")


def run_cell(cell: Cell) -> CellReport:
    """Run one cell of the matrix and check that its requests succeed."""
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
    """Run the matrix in `jobs` processes. `every` N runs only each N-th cell, for a quick look."""
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
    asks = [_with_field(number, ask) for number, ask in enumerate(asks)]
    if not rough:
        return simulate(SEED, GANGS, calm_plan(UNTIL_S), asks, census)
    crowd = draw_asks(rng, 2 * NUM_ASKS, until_s=0.5, unruly=False)
    asks += [replace(ask, name=f"leaves-{ask.name}", leaves_after_s=0.02 * i) for i, ask in enumerate(crowd)]
    plan = replace(calm_plan(UNTIL_S), faults=ROUGH_FAULTS, weather=Weather(delay_s=0.03), reads=ReadFaults(failed=0.3))
    shape = with_prefix_caching(GANGS, True)
    tight = replace(shape, decode=replace(shape.decode, num_blocks=MAX_MODEL_LEN // BLOCK_SIZE))
    return simulate(SEED, tight, plan, asks, census)


def _with_field(number: int, ask: ClientAsk) -> ClientAsk:
    """Give a third of the requests a constraint, and let a third ask for the scores of their prompts."""
    if number % 3 == 0:
        return replace(ask, params=replace(ask.params, min_tokens=0), constraint=CONSTRAINTS[number % 2])
    return replace(ask, params=replace(ask.params, prompt_logprobs=1)) if number % 3 == 1 else ask


def _must_succeed(cell: Cell, report: RunReport) -> list[str]:
    """Check that clients do not notice a single fault, unless it hits the router, to which they are connected."""
    if cell.rough:
        return []  # the other faults of the rough scenario may use up the attempts
    bad = {name: count for name, count in report.outcomes.items() if name != "ok"}
    if cell.actor == "router" and cell.act not in (Act.DROP, Act.DUPLICATE):
        bad.pop(ErrorCode.REPLICA_LOST.value, None)  # a broken connection: the client tries again
        bad.pop(ErrorCode.UNAVAILABLE.value, None)  # the request came before the workers had joined
    if cell.act is Act.POISON and report.ended:
        if bad.pop(ErrorCode.POISON_REQUEST.value, 0) != 1:
            return ["the request that ends its workers was not found"]
        if not report.unplaced:
            bad.pop(ErrorCode.UNAVAILABLE.value, None)  # the request came when no worker was left, and was refused
    return [f"{count} requests ended with {name}, of a single fault" for name, count in bad.items()]


def _order(cell: Cell) -> tuple[str, str, int, int]:
    return cell.step, cell.actor, list(Act).index(cell.act), cell.nth


def _key(cell: Cell) -> tuple[str, str, Act]:
    return cell.step, cell.actor, cell.act


def _field(hits: Counter[tuple[str, str, Act]], key: tuple[str, str, Act]) -> str:
    return str(hits[key]) if key in hits else "-"
