"""The figures of the comparison with other servers: medians of rounds, ratios of rounds with intervals, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.table import Table

from bench.ratios import Ratio, ratio
from bench.service.cells import Cell, Turn, agreement

FIGURES: Final[tuple[tuple[str, Callable[[Turn], float], float], ...]] = (
    ("tokens/s", lambda turn: turn.output_tokens_per_s, 1.0),
    ("TTFT p50 ms", lambda turn: turn.ttft_s.p50, 1e3),
    ("TTFT p99 ms", lambda turn: turn.ttft_s.p99, 1e3),
    ("ITL p50 ms", lambda turn: turn.itl_s.p50, 1e3),
    ("ITL p99 ms", lambda turn: turn.itl_s.p99, 1e3),
)
RATE: Final = FIGURES[0][1]
ITL_P99: Final = FIGURES[4][1]


@dataclass
class Comparison:
    """All turns, by cell and server. ours: the names of our servers, in the order of the table. The goals leave out the servers
    of `not_counted`. The servers of `inexact` have quantised weights, so their answers may differ from the others."""

    ours: tuple[str, ...]
    apart: str
    theirs: str | None
    not_counted: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    turns: dict[tuple[Cell, str], list[Turn]] = field(default_factory=dict)
    floors: dict[Cell, list[float]] = field(default_factory=dict)
    """For each cell the most output tokens a second that a server can give, in each round."""

    def add(self, cell: Cell, name: str, turn: Turn) -> None:
        """Add the turn of a round. All servers must have the same rounds."""
        self.turns.setdefault((cell, name), []).append(turn)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that were measured, in order."""
        return tuple(dict.fromkeys(cell for cell, _ in self.turns))

    def median(self, cell: Cell, name: str, figure: Callable[[Turn], float]) -> float:
        """Return the median of the rounds."""
        return statistics.median(map(figure, self.turns[cell, name]))

    def above(self, cell: Cell, name: str, figure: Callable[[Turn], float]) -> Ratio:
        """Return the ratio of our figure to the other server's figure, round by round."""
        assert self.theirs is not None
        return ratio(*([figure(turn) for turn in self.turns[cell, one]] for one in (name, self.theirs)))

    def best(self, cell: Cell) -> str:
        """Return the layout of ours with the most output tokens a second."""
        counted = [name for name in self.ours if name not in self.not_counted and (cell, name) in self.turns]
        return max(counted, key=lambda name: self.median(cell, name, RATE))

    def differing(self) -> int:
        """Count the requests of which two servers of ours gave different answers."""
        found = 0
        for cell in self.cells:
            rounds = [self.turns[cell, name] for name in self.ours if (cell, name) in self.turns and name not in self.inexact]
            for turns in zip(*rounds, strict=True):
                found += sum(len(set(texts)) > 1 for texts in zip(*(turn.texts for turn in turns), strict=True))
        return found

    def agreement(self) -> float | None:
        """Return the mean share of our answers before the first difference to the other server's. None: there is none."""
        if self.theirs is None:
            return None
        pairs = [
            agreement(a.texts, b.texts)
            for cell in self.cells
            for a, b in zip(self.turns[cell, self.best(cell)], self.turns[cell, self.theirs], strict=True)
        ]
        return statistics.fmean(pairs)

    def table(self, title: str) -> Table:
        """Return the table of medians, and of ratios where there is another server."""
        made = Table("cell", "server", *(name for name, _, _ in FIGURES), title=title)
        for cell in self.cells:
            names = [name for name in (self.theirs, *self.ours) if name is not None and (cell, name) in self.turns]
            for row, name in enumerate(names):
                shown = [f"{scale * self.median(cell, name, figure):,.0f}" for _, figure, scale in FIGURES]
                if self.theirs not in (None, name):
                    ratios = (self.above(cell, name, figure) for _, figure, _ in FIGURES)
                    shown = [f"{value}\n{one}" for value, one in zip(shown, ratios, strict=True)]
                made.add_row(cell.name if not row else "", name, *shown)
            made.add_section()
        made.caption = "medians of rounds; below ours: the median ratio to the other server, with its 95 % interval"
        return made

    def floor_lines(self) -> list[str]:
        """Return a line for each cell: what no server can exceed here, and how near ours comes."""
        lines = []
        for cell, floors in self.floors.items():
            name = self.best(cell)
            share = ratio([RATE(turn) for turn in self.turns[cell, name]], floors)
            line = f"{cell.name}: at most {statistics.median(floors):,.0f} tokens/s in bfloat16"
            if self.theirs is not None:
                most = ratio(floors, [RATE(turn) for turn in self.turns[cell, self.theirs]])
                line += f", {most.median:.2f} ({most.low:.2f} to {most.high:.2f}) times theirs"
            lines.append(f"{line}; {name} gives {share.median:.0%} of it")
        return lines

    def goals(self) -> list[str]:
        """Return a line for each goal, which says whether it is reached."""
        if self.theirs is None:
            return []
        lines = []
        for cell in self.cells:
            name = self.best(cell)
            found = self.above(cell, name, RATE)
            lines.append(
                _line(f"{cell.name}, output tokens/s of {name}", found, f"at least {cell.goal}", found.median >= cell.goal)
            )
            if cell.itl_goal is not None and (cell, self.apart) in self.turns:
                found = self.above(cell, self.apart, ITL_P99)
                met = found.median <= cell.itl_goal
                lines.append(_line(f"{cell.name}, p99 ITL of {self.apart}", found, f"at most {cell.itl_goal:.3f}", met))
        return lines


def _line(what: str, found: Ratio, goal: str, met: bool) -> str:
    shown = f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"
    return f"{'reached' if met else 'MISSED '}  {what}: {shown} times theirs; goal {goal}"


def order_of(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round. Each server begins in turn, so no server always runs after the same other server."""
    start = number % len(names)
    return [*names[start:], *names[:start]]
