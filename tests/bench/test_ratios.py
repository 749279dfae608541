"""What is said of interleaved runs: a ratio with its interval, and which steps have become slower."""

from __future__ import annotations

from bench.engine.against import report
from bench.engine.peers.cases import CASES
from bench.ratios import ratio


def test_an_interval_holds_the_median_and_passes_over_a_single_outlier():
    of = ratio([2.0] * 14 + [40.0], [1.0] * 15)
    assert (of.median, of.low, of.high) == (2.0, 2.0, 2.0)
    wide = ratio([1.0, 1.2, 0.8, 1.1, 0.9, 1.3, 0.7], [1.0] * 7)
    assert wide.low < wide.median == 1.0 < wide.high


def test_a_step_is_slower_only_when_its_whole_interval_says_so():
    surely, perhaps = CASES[:2]
    found = {surely: [[1.0] * 9, [1.1] * 9], perhaps: [[1.0] * 9, [1.1, 0.9, 1.0] * 3]}
    _, slower = report(found, "")
    assert slower == [surely.name]
