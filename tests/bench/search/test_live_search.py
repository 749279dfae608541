"""The production generator, judge and executor around a scripted server, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from pdserve_bench.layout import Layout, Slo
from pdserve_bench.load.target import LoadAnswer, LoadCall, RequestOptions
from pdserve_bench.search.goodput import GoodputSearch, RunAction
from pdserve_bench.search.live import LiveMeasure, carry_out
from pdserve_bench.search.reshape import CannotShape
from pdserve_bench.search.result import Busy, Counters, Point, busy_share, histogram
from pdserve_bench.search.settings import SearchSettings
from pdserve_bench.workload.request import Arrivals, BenchRequest
from pdserve_bench.workload.workload import load_workload
from sim.world.clock import SimLoop, Timeline

T = TypeVar("T")
ONE = Layout(0, 2, 512, 1)


@dataclass
class QueueTarget:
    """A server with two places: each request holds one for `service_s`, and its second token follows after `tpot_s`."""

    service_s: float = 0.2
    tpot_s: float = 0.01
    free_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    running: int = 0
    options: list[RequestOptions] = field(default_factory=list)
    calls: list[list[LoadCall]] = field(default_factory=list)
    """The calls of each run."""

    def with_options(self, options: RequestOptions) -> QueueTarget:
        self.options.append(options)
        self.calls.append([])
        return self

    async def send(self, call: LoadCall, answer: LoadAnswer) -> None:
        self.calls[-1].append(call)
        loop = asyncio.get_running_loop()
        place = self.free_s.index(min(self.free_s))
        first_s = max(loop.time(), self.free_s[place]) + self.service_s
        self.free_s[place] = first_s
        self.running += 1
        try:
            for time_s in (first_s, first_s + self.tpot_s):
                await asyncio.sleep(time_s - loop.time())
                answer.arrivals.append((loop.time(), 1))
            answer.ended_s = loop.time()
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


@dataclass
class SplitTarget(QueueTarget):
    """Two workers. Colocated ones compute a prompt in a step of 25 ms and the step of a decode with it: 66.7 requests a second.
    As 1P+1D, one computes all prompts, 40 a second, and the other one has time for all decodes."""

    tpot_s: float = 0.005

    def with_options(self, options: RequestOptions) -> SplitTarget:
        colocated = options.placement == "colocated"
        self.service_s = 0.03 if colocated else 0.025
        self.free_s = [0.0, 0.0] if colocated else [0.0]
        super().with_options(options)
        return self


@dataclass
class QueueCluster:
    """It is idle when the queue is, and its workers compute half of the time."""

    target: QueueTarget

    async def counters(self) -> Counters:
        now_s = asyncio.get_running_loop().time()
        return {("decode-0", 1): Busy(False, now_s / 2, now_s)}

    async def wait_idle(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, max(self.target.free_s) - loop.time()))
        assert self.target.running == 0


@dataclass
class Shapes:
    shaped: list[Layout] = field(default_factory=list)
    restored: int = 0
    changed: bool = False
    stuck: bool = False

    async def shape(self, layout: Layout) -> None:
        await asyncio.sleep(3.0)
        self.shaped.append(layout)

    async def check(self, layout: Layout) -> None:
        assert layout == self.shaped[-1]
        if self.changed:
            raise CannotShape("somebody else changed it")

    async def restore(self) -> None:
        self.restored += 1
        if self.stuck:
            raise CannotShape("no way back")


@dataclass
class Seen:
    kept: list[int] = field(default_factory=list)
    fail_at: int = 1000

    def begins(self, run: RunAction, points: object, left_s: float) -> None:
        if len(self.kept) >= self.fail_at:
            raise KeyboardInterrupt

    def ends(self, points: Any) -> None:
        self.kept.append(len(points))


def virtually(work: Coroutine[Any, Any, T], loop: SimLoop, timeline: Timeline) -> T:
    asyncio.events._set_running_loop(loop)
    try:
        task = loop.create_task(work, name="search")
    finally:
        asyncio.events._set_running_loop(None)
    assert timeline.run(task.done, until_s=1e6)
    assert not timeline.errors
    return task.result()


def settings_of(**changes: object) -> SearchSettings:
    values: dict[str, Any] = {
        "slo": Slo(0.7, 0.05), "ranks": 2, "prefills": (0,), "chunks": (512,), "chunk_tokens": 512, "max_num_seqs": 1,
        "first_rate_per_s": 2.0, "mean_output_tokens": 2.0, "max_point_s": 200.0,
    }  # fmt: skip
    return SearchSettings(**{**values, **changes})


class Parts:
    """A search of a scripted server, from the command's own parts."""

    def __init__(self, settings: SearchSettings, target: QueueTarget, arrivals: Arrivals) -> None:
        self.timeline = Timeline()
        self.loop = SimLoop(self.timeline, "search")
        self.settings, self.target = settings, target
        workload = load_workload("random:8/2", None, overrides=["vocab_size=100"])
        self.measure = LiveMeasure(
            settings, workload, arrivals, target, QueueCluster(target), 7, lambda rows: "", clock=self.loop.time, poll_s=0.0
        )
        self.shapes, self.seen = Shapes(), Seen()

    def search(self, points: list[Point] | None = None, budget_s: float = 1e6, **more: Any) -> Any:
        work = carry_out(
            GoodputSearch(self.settings), self.measure, self.shapes, self.seen,
            points=points or [], budget_s=budget_s, clock=self.loop.time, **more,
        )  # fmt: skip
        return virtually(work, self.loop, self.timeline)


def parts_of(**changes: object) -> Parts:
    return Parts(settings_of(**changes), QueueTarget(), Arrivals())


@pytest.mark.slow
def test_the_goodput_of_a_scripted_server_is_found():
    """Two places, 0.2 s each, a wait of at most 0.5 s for nine in ten: 8.05 requests a second, by a long run of the queue."""
    parts = parts_of()
    points, stop = parts.search()
    (result,) = GoodputSearch(parts.settings).results(points)
    assert stop.complete
    assert result.goodput_per_s == pytest.approx(8.05, rel=0.07)
    assert parts.shapes.shaped == [ONE]
    assert parts.shapes.restored == 1
    assert parts.seen.kept == list(range(1, len(points) + 1))
    assert max(point.measured_s for point in points) <= 210.0
    assert all(point.figures.decode_busy_share == pytest.approx(0.5) for point in points)
    good = next(point for point in points if point.rate_per_s == result.low_per_s)
    assert 0.2 <= good.figures.ttft_p50_s <= good.figures.ttft_p99_s
    assert good.figures.tpot_p50_s == pytest.approx(0.01)


def test_the_goodput_of_both_layouts_is_within_5_percent():
    """Requests arrive evenly, so none waits below the capacity, and all are late soon above it: goodput is the capacity."""
    settings = settings_of(prefills=(0, 1), slo=Slo(0.15, 0.1), first_rate_per_s=20.0, max_point_s=10.0)
    parts = Parts(settings, SplitTarget(), Arrivals(kind="constant"))
    points, stop = parts.search()
    results = {one.layout.prefill: one for one in GoodputSearch(settings).results(points)}
    assert stop.complete
    assert results[0].goodput_per_s == pytest.approx(2 / 0.03, rel=0.05)
    assert results[1].goodput_per_s == pytest.approx(1 / 0.025, rel=0.05)
    assert [one.prefill for one in parts.shapes.shaped] == [0, 1]


def test_a_layout_that_needs_another_cluster_ends_the_search_here_and_the_points_go_on_there():
    """(1) The baseline is settled. (2) The first layout with two pools does not fit. (3) Its cluster goes on to the end."""
    settings = settings_of(prefills=(0, 1), slo=Slo(0.15, 0.1), first_rate_per_s=20.0, max_point_s=10.0)
    parts = Parts(settings, SplitTarget(), Arrivals(kind="constant"))
    points, wanted = parts.search(fits=lambda layout: not layout.disaggregated, restore=False)
    assert (wanted, parts.shapes.restored) == (Layout(1, 1, 512, 1), 0)
    assert {point.layout.prefill for point in points} == {0}
    there = Parts(settings, SplitTarget(), Arrivals(kind="constant"))
    more, stop = there.search(points, fits=lambda layout: layout.disaggregated, restore=False)
    assert stop.complete
    assert {point.layout.prefill for point in more[len(points) :]} == {1}


def test_the_reason_of_the_end_is_not_hidden_by_a_layout_that_stays():
    parts = parts_of()
    parts.shapes.changed = True
    parts.shapes.stuck = True
    with pytest.raises(CannotShape, match=r"^somebody else.*And then the first layout did not come back: no way back$"):
        parts.search()


def test_the_first_layout_comes_back_when_a_search_is_ended():
    parts = parts_of()
    parts.seen.fail_at = 2
    with pytest.raises(KeyboardInterrupt):
        parts.search()
    assert parts.shapes.restored == 1
    assert parts.seen.kept == [1, 2]


def test_the_budget_holds_with_reshaping_and_drains():
    parts = parts_of()
    _, stop = parts.search(budget_s=120.0)
    assert not stop.complete
    assert parts.loop.time() <= 120.0


def test_the_probe_says_what_the_server_can_do():
    parts = parts_of()
    rate = virtually(parts.measure.probe(4, 20.0), parts.loop, parts.timeline)
    assert rate == pytest.approx(10.0, rel=0.05)


def test_layouts_get_the_same_requests_and_no_prompt_comes_twice():
    """The nth points of two layouts have the same lengths. A cache that is warm from an earlier run has none of the prompts."""
    parts = parts_of()
    parts.measure.workload = load_workload(
        "random:4/2", None, overrides=["vocab_size=100000", "source.prompt={kind: uniform, mean: 20, range_ratio: 0.8}"]
    )
    virtually(parts.measure.probe(2, 5.0), parts.loop, parts.timeline)
    apart = Layout(1, 1, 512, 1)
    for number, (layout, repeat) in enumerate([(ONE, 0), (ONE, 1), (apart, 0)]):
        virtually(parts.measure.measure(RunAction(layout, 4.0, 5.0, 10.0), number, repeat), parts.loop, parts.timeline)
    lengths = [[len(call.prompt) for call in calls][:20] for calls in parts.target.calls]
    assert lengths[1] == lengths[3] != lengths[2]
    prompts = [call.prompt for calls in parts.target.calls for call in calls]
    assert len(set(prompts)) == len(prompts)
    assert [one.placement for one in parts.target.options] == ["auto", "colocated", "colocated", "disaggregated"]
    assert len({one.cache_salt for one in parts.target.options}) == 4
    assert "" not in {one.cache_salt for one in parts.target.options}


def test_a_much_too_high_rate_is_cut_off_after_seconds():
    parts = parts_of()
    run = RunAction(ONE, 40.0, 30.0, 200.0)
    point = virtually(parts.measure.measure(run, 0, 0), parts.loop, parts.timeline)
    assert point.high < 0.9 or point.overloaded
    assert point.measured_s < 20.0


def test_later_turns_of_a_session_are_judged_when_they_end():
    class Sessions:
        def requests(self, arrivals: Arrivals, seed: int, run: int) -> Iterator[BenchRequest]:
            for number in range(2000):
                first = number % 2 == 0
                at_s = number / 4.0 if first else None
                yield BenchRequest(number, ((1, 2),), 2, at_s, () if first else (number - 1,), session=f"s{number // 2}")

    parts = parts_of()
    parts.measure.workload = Sessions()  # type: ignore[assignment]
    point = virtually(parts.measure.measure(RunAction(ONE, 4.0, 10.0, 60.0), 0, 0), parts.loop, parts.timeline)
    assert point.requests > 60
    assert point.low > 0.9


def test_busy_shares_are_of_workers_that_lived_through_the_run():
    before = {("a", 1): Busy(True, 1.0, 10.0), ("b", 1): Busy(False, 0.0, 10.0)}
    after = {("a", 1): Busy(True, 6.0, 20.0), ("b", 2): Busy(False, 1.0, 2.0)}
    assert busy_share(before, after, prefill=True) == 0.5
    assert busy_share(before, after, prefill=False) is None


def test_the_histogram_counts_every_gap_once():
    import numpy as np

    gaps_s = np.array([0.0005, 0.001, 0.0011, 0.5, 40.0])
    counts = histogram(gaps_s)
    assert sum(count for _, count in counts) == 5
    assert counts[0] == (0.001, 2)
    assert counts[-1] == (40.0, 1)
