"""Reasons to trust a verdict less, found in its result. Pure.

Each doubt is a name with numbers; `words.DOUBTS` has the sentences. A serious doubt could change the answer.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from pdserve_bench.layout import Layout
from pdserve_bench.search.result import GoodputResult, Point
from pdserve_bench.verdict.data import CandidateData, DecisionData, Doubt, EstimateData, Fit, FlipData
from pdserve_bench.verdict.points import MARGIN, of_layout

WIDE: Final = 0.2
"""An interval of goodput wider than this share of its value is a doubt: the search is asked for 0.05 by default."""
FEW: Final = 100
"""A point with fewer requests is a doubt: the share of those that meet the targets is known to about 0.1 at best."""
CLOSE: Final = 1.3
"""A target within this factor of an idle cluster's time is met or missed by chance."""
NEIGHBOURS: Final = 0.5
"""The load of the machine before the run, for each core, from which other programs disturb it."""
TRUSTED_ERROR: Final = 1.5
NEAR_FLIP: Final = 1.2
"""An answer that a smaller change turns into another one holds for this workload and these targets only."""
MANY_LAYOUTS: Final = 4
TOO_FEW_POINTS: Final = 3
MIXED: Final = 0.05
"""Two pools of which a larger share of the requests was colocated are no longer measured alone."""


def doubts(
    result: GoodputResult,
    points: Sequence[Point],
    decision: DecisionData,
    sides: Sequence[CandidateData],
    rivals: int,
    fitted: Fit | None,
    flips: Sequence[FlipData],
    ratio: EstimateData | None,
) -> tuple[Doubt, ...]:
    """Return all doubts, the serious ones first. sides: the best layout of each kind, as far as it was measured."""
    facts = Facts(result.meta)
    found = [
        *_of_search(result, decision, sides, rivals),
        *_of_gain(decision, ratio),
        *_of_points(result, points),
        *_of_targets(result, points),
        *_of_machine(facts),
        *_of_model(fitted, flips),
    ]
    return tuple(sorted(found, key=lambda one: not one.serious))


def _of_search(result: GoodputResult, decision: DecisionData, sides: Sequence[CandidateData], rivals: int) -> Iterator[Doubt]:
    if not result.complete:
        yield Doubt("incomplete", True, {})
    if decision is DecisionData.ONE_SIDE:
        yield Doubt("one_side", True, {})
    for side in sides:
        value, low, high = side.goodput.value or 0.0, side.goodput.low, side.goodput.high
        if not side.settled:
            yield Doubt("unsettled", True, {}, side.name)
        if high is None:
            if low:
                yield Doubt("no_upper_end", True, {"low_per_s": low}, side.name)
        elif value and (high - low) / value > WIDE:
            yield Doubt("wide", False, {"share": (high - low) / value}, side.name)
        if sum(one.layout == side.layout for one in result.points) < TOO_FEW_POINTS:
            yield Doubt("few_points", True, {}, side.name)
    if rivals:
        yield Doubt("rivals", False, {"rivals": rivals})
    if len(result.layouts) >= MANY_LAYOUTS:
        yield Doubt("best_of_many", False, {"layouts": len(result.layouts)})


def _of_gain(decision: DecisionData, ratio: EstimateData | None) -> Iterator[Doubt]:
    if decision is DecisionData.DISAGGREGATE and ratio is not None and ratio.value is not None and ratio.value < MARGIN:
        yield Doubt("small_gain", False, {})


def _of_points(result: GoodputResult, points: Sequence[Point]) -> Iterator[Doubt]:
    refused = [one for one in result.points if one.refused]
    if refused:
        yield Doubt(
            "refused", len(refused) * 4 > len(result.points), {"refused": len(refused)}, clean(refused[0].refused) or ""
        )
    apart = [one.figures.disaggregated_share for one in points if one.layout.disaggregated]
    mixed = 1 - min((one for one in apart if one is not None), default=1.0)
    if mixed > MIXED:
        yield Doubt("mixed", True, {"share": mixed})
    open_points = sum(one.low < result.attainment < one.high for one in points)
    if open_points:
        yield Doubt("undecided_points", False, {"points": open_points})
    if points and min(one.requests for one in points) < FEW:
        yield Doubt("few_requests", False, {"requests": min(one.requests for one in points)})
    if pairs := _contradictions(points):
        yield Doubt("not_stationary", True, {"pairs": pairs})
    rising = sum(
        first.high < second.low
        for side in {one.layout: None for one in points}
        for first, second in pairwise(of_layout(points, side))
        if first.rate_per_s < second.rate_per_s
    )
    if rising:
        yield Doubt("rising", True, {"pairs": rising})


def _contradictions(points: Sequence[Point]) -> int:
    """Return the pairs of points in which the same layout had clearly different attainments at the same rate."""
    lows: dict[tuple[Layout, float], list[float]] = {}
    for one in points:
        insort(lows.setdefault((one.layout, one.rate_per_s), []), one.low)
    groups = ((one, lows[one.layout, one.rate_per_s]) for one in points)
    return sum(len(group) - bisect_right(group, one.high) for one, group in groups)


def _of_targets(result: GoodputResult, points: Sequence[Point]) -> Iterator[Doubt]:
    if not points:
        return
    floors = (
        ("ttft_close", result.slo.ttft_s, min(one.figures.ttft_p50_s for one in points)),
        ("tpot_close", result.slo.tpot_s, min(one.figures.tpot_p50_s for one in points)),
    )
    for name, target_s, floor_s in floors:
        if target_s is not None and floor_s and target_s < CLOSE * floor_s:
            yield Doubt(name, True, {"target_s": target_s, "floor_s": floor_s})


def _of_machine(facts: Facts) -> Iterator[Doubt]:
    load, cores = facts.load_average, facts.cores
    if load is not None and cores and load > NEIGHBOURS * cores:
        yield Doubt("busy", True, {"load": load, "cores": cores})
    if facts.gpu is None:
        yield Doubt("no_gpu", False, {})
    if facts.one_host:
        yield Doubt("one_host", False, {})


def _of_model(fitted: Fit | None, flips: Sequence[FlipData]) -> Iterator[Doubt]:
    if fitted is None:
        return
    errors = [one for one in (fitted.apart_error, fitted.together_error) if one is not None]
    worst = max((max(one, 1 / one) for one in errors), default=1.0)
    if worst > TRUSTED_ERROR:
        yield Doubt("model_error", False, {"factor": worst})
    if flips and 1 / NEAR_FLIP < flips[0].factor < NEAR_FLIP:
        yield Doubt("near_flip", True, {"factor": flips[0].factor}, flips[0].lever)
    yield Doubt("extrapolated", False, {})


# Facts about the machine and the run, from the `meta` of a result. Whatever is missing or of another type is unknown.


MOST_CHARS: Final = 200
"""The longest text that is taken over."""


class Facts:
    """The known keys of `meta`, which is text of a file that nobody has checked."""

    def __init__(self, meta: Mapping[str, object]) -> None:
        self.meta = meta

    @property
    def load_average(self) -> float | None:
        """The load of the machine when the run began, over one minute."""
        found = self._at("hardware", "load_average")
        return _number(found[0] if isinstance(found, list | tuple) and found else found)

    @property
    def cores(self) -> float | None:
        """The cores of the machine."""
        return _number(self._at("hardware", "cores"))

    @property
    def gpu(self) -> str | None:
        """The GPU of the workers. None: they compute on CPUs, or it is not known."""
        return clean(self._at("hardware", "gpu"))

    @property
    def one_host(self) -> bool:
        """All workers are known to share one machine."""
        hosts = self._at("cluster", "hosts")
        return isinstance(hosts, int) and hosts == 1

    @property
    def prompt_tokens(self) -> float | None:
        """The mean tokens of a prompt."""
        return _number(self.meta.get("mean_prompt_tokens"))

    def conditions(self) -> dict[str, str]:
        """Return the facts that a reader wants to see, by their names."""
        places = {
            "model": ("cluster", "model", "name"),
            "weights": ("cluster", "model", "dtype"),
            "KV": ("cluster", "model", "kv_cache_dtype"),
            "CPU": ("hardware", "cpu"),
            "cores": ("hardware", "cores"),
            "load before": ("hardware", "load_average"),
            "GPU": ("hardware", "gpu"),
            "pdserve": ("pdserve",),
            "commit": ("commit", "id"),
            "seed": ("seed",),
            "began": ("started",),
        }
        found = {name: text for name, path in places.items() if (text := clean(self._at(*path)))}
        if self._at("commit", "dirty") is True and "commit" in found:
            found["commit"] += ", with changes"
        return found

    def _at(self, *path: str) -> object:
        found: object = self.meta
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _number(value: object) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if usable else None  # type: ignore[arg-type]


def clean(value: object) -> str | None:
    """Return a text of a file in one line, without characters that command a terminal, and not too long. None: it is none."""
    if isinstance(value, bool | None) or not isinstance(value, str | int | float):
        return None
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return (text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 3]}...") or None


def prompt_tokens(workload: Mapping[str, object]) -> float | None:
    """Return the tokens of a prompt where the workload gives them as one number."""
    source = workload.get("source")
    return _number(source.get("prompt")) if isinstance(source, Mapping) else None


def describe(workload: Mapping[str, object]) -> str:
    """Return a workload as one line of `name value` pairs. The name of a nested value is that of its own key."""
    return clean(", ".join(_pairs(workload))) or "not said"


def _pairs(values: Mapping[str, object]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _pairs(value)
        elif value not in (None, "", (), [], False):
            yield f"{name} {value}"
