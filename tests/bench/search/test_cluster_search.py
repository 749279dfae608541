"""The search over layouts of the simulated cluster finds what a grid of all of them finds."""

from __future__ import annotations

import pytest

from pdserve_bench.search.goodput import GoodputSearch, RunAction
from pdserve_bench.search.result import Point
from pdserve_bench.search.settings import SearchSettings
from tests.bench.search.simulated_cluster import OUTPUT, SLO, SimulatedCluster

GRID = {
    (0, 256): 16.8, (0, 512): 20.0, (0, 1024): 20.0,
    (1, 256): 4.6, (1, 512): 6.8, (1, 1024): 8.1,
    (2, 256): 11.2, (2, 512): 15.2, (2, 1024): 17.6,
    (3, 256): 14.2, (3, 512): 14.5, (3, 1024): 14.7,
}  # fmt: skip
"""The goodput of (prefill workers of four, chunk), by bisection over whole runs: `simulated_cluster.attainment`."""


@pytest.mark.slow
def test_the_search_finds_the_optimum_of_the_grid():
    settings = SearchSettings(
        SLO, 4, (0, 2, 1, 3), (256, 512, 1024), 512, 64, first_rate_per_s=4.0, mean_output_tokens=OUTPUT, max_point_s=60.0
    )
    cluster, search = SimulatedCluster(settings), GoodputSearch(settings)
    points: list[Point] = []
    while isinstance(action := search.next(points), RunAction):
        points.append(cluster.measure(action, len(points)))
        one = points[-1]
        print(one.layout, f"{one.rate_per_s:.2f} {one.attainment:.3f} ({one.low:.3f} {one.high:.3f}) {one.measured_s:.0f} s")
    assert action.complete
    results = search.results(points)
    for one in results:
        print(one)
    for disaggregated in (False, True):
        best = next(one for one in results if one.layout.disaggregated is disaggregated)
        of_family = {key: rate for key, rate in GRID.items() if (key[0] > 0) is disaggregated}
        truth = GRID[best.layout.prefill, best.layout.chunk_tokens]
        assert best.settled
        assert truth >= 0.95 * max(of_family.values())
        assert best.goodput_per_s == pytest.approx(truth, rel=0.1)
    print(len(points), cluster.spent_s / 60)
    assert len(points) < 60
