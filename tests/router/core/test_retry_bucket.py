"""The cluster's bucket of retries."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.core.errors import Overloaded, PdserveError, ReplicaLost, TransferFailed
from router.core.recovery import REMEMBERED_REQUESTS, RetryBucket, after_attempts


def takes(bucket: RetryBucket) -> int:
    count = 0
    while bucket.take():
        count += 1
    return count


def test_a_burst_at_the_start_and_a_share_of_those_admitted() -> None:
    bucket = RetryBucket(share=0.1, burst=10)
    assert takes(bucket) == 10
    for _ in range(100):
        bucket.admitted()
    assert takes(bucket) == 10
    for _ in range(9):
        bucket.admitted()
    assert takes(bucket) == 0
    bucket.admitted()
    assert takes(bucket) == 1


def test_a_long_quiet_time_does_not_save_up_for_a_storm() -> None:
    bucket = RetryBucket(share=0.1, burst=10)
    for _ in range(20 * REMEMBERED_REQUESTS):
        bucket.admitted()
    assert takes(bucket) == 10 + REMEMBERED_REQUESTS // 10


def test_nothing_is_allowed_when_nothing_is_configured() -> None:
    bucket = RetryBucket(share=0.0, burst=0)
    bucket.admitted()
    assert takes(bucket) == 0


@given(st.floats(0, 2), st.integers(0, 5), st.lists(st.booleans(), max_size=200))
def test_never_more_than_the_share_and_the_burst(share: float, burst: int, admissions: list[bool]) -> None:
    bucket = RetryBucket(share=share, burst=burst)
    admitted = taken = 0
    for is_admission in admissions:
        if is_admission:
            bucket.admitted()
            admitted += 1
        else:
            taken += bucket.take()
        bucket.check_invariants()
        assert taken <= burst + share * admitted + 1e-6


@pytest.mark.parametrize("error", [ReplicaLost("x"), TransferFailed("x"), Overloaded("x", retry_after_s=3.0)])
def test_the_last_loss_keeps_its_type_and_says_what_was_tried(error: PdserveError) -> None:
    told = after_attempts(error, 4, "no more")
    assert type(told) is type(error)
    assert told.message == "after 4 attempts (no more): x"
    assert not isinstance(error, Overloaded) or (isinstance(told, Overloaded) and told.retry_after_s == 3.0)
    assert after_attempts(error, 1, "no more").message.startswith("after 1 attempt (")
