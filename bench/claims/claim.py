"""A claim of the literature: its words and source, its measurement, and the rule that judges it. Pure, except `measure`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from bench.claims.figures import Figures, MissingFigures
from bench.claims.setup import Rounds, Setup
from bench.ratios import Ratio


class Verdict(Enum):
    """The answer of a rule. `NOT_MEASURED` stands for figures that do not suffice; no rule returns it."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    DEPENDS = "depends"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason, a sentence for readers."""

    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class Table:
    """The figures for readers. Each row has as many cells as `header`."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim. `measure` takes about `minutes` minutes for all rounds; `value` is the worth of its answer, 1 to 3."""

    name: str
    says: str
    """The claim in one sentence."""
    source: str
    rule: str
    """The rule of `judge` in one sentence, for readers."""
    minutes: float
    measure: Callable[[Setup, Rounds], Figures]
    judge: Callable[[Figures], Judgement]
    table: Callable[[Figures], Table]
    value: int = 2
    timing: str = "CPU time of one compute thread"
    image: str = ""
    """A picture below `docs/images`, without its ending. Empty: there is none. `draw` makes it from the figures."""
    draw: Callable[[Figures, str], None] | None = None

    def judgement(self, figures: Figures) -> Judgement:
        """Judge the figures. Missing or too few figures neither confirm nor refute a claim."""
        try:
            return self.judge(figures)
        except MissingFigures as exc:
            return Judgement(Verdict.NOT_MEASURED, f"{exc}.")


INF: Final = float("inf")


def inside(found: Ratio, low: float, high: float = INF) -> Verdict:
    """Tell whether an interval lies within [low, high]: wholly (confirmed), not at all (refuted), or in part (depends)."""
    if low <= found.low and found.high <= high:
        return Verdict.CONFIRMED
    if found.high < low or found.low > high:
        return Verdict.REFUTED
    return Verdict.DEPENDS


def percent(share: float, digits: int = 0) -> str:
    """Return a share in percent, as the documents write it."""
    return f"{100 * share:.{digits}f} %"


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a claim with several parts. If the parts do not agree, the verdict is "depends". There is at least
    one part."""
    assert verdicts, "a claim has at least one part"
    return verdicts[0] if len(set(verdicts)) == 1 else Verdict.DEPENDS
