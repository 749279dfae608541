"""The transfer sweep: the figures of its tables, and a small sweep with real processes."""

from __future__ import annotations

import datetime
import json

import pytest
from rich.console import Console

from bench.transfer import sweep
from bench.transfer.sweep_report import Cell, Sweep, tables
from bench.transfer.ways import FLOOR, WAYS, Sample


def cell_of(count: int, walls_s: dict[str, list[float]]) -> Cell:
    samples = {way: [Sample(wall_s, 0.25 * wall_s, 0.5 * wall_s) for wall_s in walls_s[way]] for way in walls_s}
    return Cell(1_000_000, count, samples)


def test_rates_are_medians_and_shares_are_taken_round_by_round():
    cell = cell_of(1000, {FLOOR: [0.1, 0.2, 0.4], "nixl": [0.2, 0.4, 0.5]})
    assert cell.rate("nixl") == 1e9 / 0.4
    assert cell.of_floor("nixl") == 0.5
    assert cell.cpu_s_per_gb("nixl") == pytest.approx((1.1 * 0.25 / 3, 1.1 * 0.5 / 3))


def test_the_largest_read_of_each_size_is_drawn():
    cells = [Cell(size, count, {}) for size in (4096, 65536) for count in (16, 1, 256)]
    assert [(one.block_bytes, one.count) for one in Sweep(tuple(cells), {}, {}).largest] == [(4096, 256), (65536, 256)]


def test_no_read_of_the_grid_is_larger_than_the_limit():
    for quick in (False, True):
        grid = sweep.grid(quick)
        assert all(size * count <= sweep.MOST_BYTES for size, counts in grid for count in counts)
        assert sweep.HIDDEN in [(size, max(counts)) for size, counts in grid]


@pytest.mark.slow
def test_a_small_sweep_moves_every_byte_by_every_way(monkeypatch):
    monkeypatch.setattr(sweep, "grid", lambda quick: [(4096, [1, 8])])
    found = sweep.measure(2, True, Console(quiet=True))
    assert [set(cell.samples) for cell in found.cells] == [set(WAYS)] * 2
    assert all(cell.rate(way) > 0 for cell in found.cells for way in WAYS)
    assert {way: len(times_s) for way, times_s in found.latency_s.items()} == dict.fromkeys(WAYS, 200)
    assert len(list(tables(found))) == 3
    kept = json.loads(sweep.to_json(found, 2, datetime.datetime.now(datetime.UTC)))
    assert len(kept["cells"]) == 2
    assert kept["meta"]["rounds"] == 2
