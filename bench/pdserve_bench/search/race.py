"""The layouts of one family, colocated or disaggregated, and which of them race against its leader. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdserve_bench.layout import Layout
from pdserve_bench.search.curve import Curve, curve_of
from pdserve_bench.search.result import Point
from pdserve_bench.search.settings import SearchSettings

_ROOM = 1.25
"""A batch is limited to the sequences that it has at the goodput, and a quarter more for chance."""


@dataclass(frozen=True, slots=True)
class TestFamily:
    """The layouts with a prefill pool, or those without one, that have points."""

    settings: SearchSettings
    prefills: tuple[int, ...]
    """The splits of the family, the most promising first."""
    points: dict[Layout, list[Point]]
    """The points that count, by layout, in the order of the first point of each."""

    def curve(self, layout: Layout) -> Curve:
        """Return what is known of a layout."""
        return curve_of(self.points.get(layout, ()), self.settings.attainment)

    @property
    def disaggregated(self) -> bool:
        """Tell whether the layouts of the family have a prefill pool."""
        return self.prefills[0] > 0

    @property
    def leader(self) -> Layout:
        """The best layout so far: it keeps the highest rate. Of equal ones, it is the one that was measured first."""
        layouts = [*self.points] or [self.settings.base(self.prefills[0])]
        return max(layouts, key=lambda one: self.curve(one).low_per_s)

    @property
    def knee(self) -> int:
        """The smallest `max_num_seqs` with which the leader's layout keeps a rate that the leader keeps."""
        leader, low_per_s = self.leader, self.curve(self.leader).low_per_s
        alike = [one for one in self.points if replace(one, max_num_seqs=leader.max_num_seqs) == leader]
        return min((one.max_num_seqs for one in alike if self.curve(one).low_per_s >= low_per_s), default=leader.max_num_seqs)

    def settled(self, layout: Layout) -> bool:
        """Tell whether the goodput of a layout is known as exactly as is asked for, and was measured twice at its low end."""
        settings, points = self.settings, self.points.get(layout, [])
        curve = self.curve(layout)
        if curve.points >= settings.max_points:
            return True
        if not curve.settled(settings.reachable_tolerance, settings.floor_per_s):
            return False
        return curve.low_per_s == 0.0 or curve.confirmed(points)

    def challengers(self) -> Iterator[Layout]:
        """Yield the layouts that might be better than the leader: other splits, then other chunks, then smaller batches."""
        leader, settings = self.leader, self.settings
        for prefill in self.prefills:
            near = abs(prefill - leader.prefill) == 1
            if prefill != leader.prefill and (near or not any(one.prefill == prefill for one in self.points)):
                yield replace(leader, prefill=prefill, decode=settings.workers - prefill)
        chunks = sorted(settings.chunks)
        at = chunks.index(leader.chunk_tokens)
        for chunk in [*chunks[at + 1 : at + 2], *chunks[max(0, at - 1) : at]]:
            yield replace(leader, chunk_tokens=chunk)
        for seqs in self._batches(leader):
            yield replace(leader, max_num_seqs=seqs)

    def _batches(self, leader: Layout) -> list[int]:
        """Return smaller limits of a batch that might do as well, the most likely one first, and then a neighbour.

        The sequences that decode at a time are the tokens a second, times the time of a token (Little's law).
        """
        low_per_s = self.curve(leader).low_per_s
        at_low = [point for point in self.points.get(leader, ()) if point.rate_per_s == low_per_s]
        if not at_low:
            return []
        figures = at_low[0].figures
        batch = figures.output_tokens_per_s * figures.tpot_p50_s / leader.decode
        guess = 2 ** math.ceil(math.log2(max(1.0, batch * _ROOM)))
        guess = min(guess, leader.max_num_seqs // 2)
        other = replace(leader, max_num_seqs=guess)
        kept = other not in self.points or self.curve(other).low_per_s >= low_per_s
        return [one for one in (guess, guess // 2 if kept else 2 * guess) if 0 < one < leader.max_num_seqs]

    def open_rate(self, challenger: Layout) -> float | None:
        """Return the rate that a challenger must be measured at next. None: its race is over.

        It must keep the leader's goodput, and where that stays open, it must keep a rate that the leader missed. One miss ends
        its race. A smaller batch need not be better, so it must only keep a rate that the leader kept. Infinite: the challenger
        must be settled like a leader.
        """
        curve, best, settings = self.curve(challenger), self.curve(self.leader), self.settings
        smaller = replace(challenger, max_num_seqs=self.leader.max_num_seqs) == self.leader
        goodput = best.goodput_per_s()
        limit = best.high_per_s if math.isfinite(best.high_per_s) else goodput
        first = (best.low_per_s if smaller else goodput) or limit
        if first == 0.0:
            return None  # the leader has no rate to be compared at
        done = curve.settled(settings.reachable_tolerance, settings.floor_per_s) or curve.points >= settings.max_points
        if done or curve.missed_at(first):
            return None
        for rate in (first, limit):
            if rate not in curve.rates and not curve.missed_at(rate):
                return rate
        return None if smaller else math.inf


def families(settings: SearchSettings, points: Sequence[Point]) -> list[TestFamily]:
    """Return the families that the settings name, the colocated one first: it is the baseline."""
    found = []
    for colocated in (True, False):
        prefills = tuple(prefill for prefill in settings.prefills if (prefill == 0) is colocated)
        by_layout: dict[Layout, list[Point]] = {}
        for point in points:
            if not point.refused and point.layout.disaggregated is not colocated:
                by_layout.setdefault(point.layout, []).append(point)
        if prefills:
            found.append(TestFamily(settings, prefills, by_layout))
    return found
