"""How long a read may take, by how fast its peer has been."""

from __future__ import annotations

import pytest

from kvtransfer.thread import STRETCH_BYTES, Pace
from pdserve.config import LeaseConfig

CONFIG = LeaseConfig(transfer_deadline_floor_s=5.0, transfer_bandwidth_bytes_s=1e8)
MB = 10**6


def played(bytes_s: float, reads: int = 4, nbytes: int = MB) -> Pace:
    """One read after the other at that speed."""
    pace, now_s = Pace(), 100.0
    for _ in range(reads):
        pace.posted(nbytes, now_s=now_s)
        now_s += nbytes / bytes_s
        pace.ended(nbytes, arrived=True, now_s=now_s)
        now_s += 7.0  # idle: no part of any stretch
    return pace


def test_an_unknown_peer_is_taken_to_be_as_fast_as_configured():
    assert Pace().deadline_s(0, CONFIG) == 5.0
    assert Pace().deadline_s(10**9, CONFIG) == 45.0


def test_a_slow_link_is_given_the_time_it_takes():
    pace = played(0.5 * MB)
    assert pace.bytes_s == pytest.approx(0.5 * MB)
    assert pace.deadline_s(10 * MB, CONFIG) == pytest.approx(5.0 + 4 * 20.0)


def test_a_fast_link_shortens_nothing():
    assert played(5e9, reads=2000).deadline_s(10**9, CONFIG) == 45.0


def test_what_is_under_way_before_a_read_counts():
    pace = played(1.0 * MB)
    pace.posted(20 * MB, now_s=500.0)
    assert pace.deadline_s(5 * MB, CONFIG) == pytest.approx(5.0 + 4 * 25.0)


def test_reads_side_by_side_share_the_link():
    pace = Pace()
    for _ in range(2):
        pace.posted(MB, now_s=0.0)
    for _ in range(2):
        pace.ended(MB, arrived=True, now_s=10.0)
    assert pace.bytes_s == pytest.approx(0.1 * MB), "the second one ended in no time of its own"
    pace.posted(MB, now_s=10.0)
    pace.ended(MB, arrived=True, now_s=15.0)
    assert pace.bytes_s == pytest.approx(0.25 * MB), "and counts with the next stretch"


def test_small_reads_measure_nothing():
    assert played(1000.0, reads=3, nbytes=STRETCH_BYTES // 8).bytes_s is None


def test_a_link_that_gets_slow_is_believed_and_so_is_one_that_recovers():
    pace = played(50.0 * MB)
    for speed in (0.1 * MB, 0.1 * MB, 0.1 * MB):
        pace.posted(MB, now_s=0.0)
        pace.ended(MB, arrived=True, now_s=MB / speed)
    slow = pace.bytes_s
    assert slow is not None
    assert slow < 10 * MB
    for _ in range(30):  # each too short to be measured by itself
        pace.posted(MB, now_s=0.0)
        pace.ended(MB, arrived=True, now_s=0.02)
    assert pace.bytes_s is not None
    assert pace.bytes_s > 40 * MB


def test_a_failed_read_leaves_the_books_even():
    pace = Pace()
    pace.posted(MB, now_s=0.0)
    pace.ended(MB, arrived=False, now_s=3.0)
    assert (pace.in_flight_bytes, pace.bytes_s) == (0, None)
