"""Limits that follow the workers, and what is said when they bind."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import MIB, RouterConfig
from pdserve.core.errors import Overloaded
from pdserve.core.slo import SloClass
from pdserve.core.worker import Role, WorkerHello
from router.core.queue_limits import (
    MAX_INDEX_BYTES,
    MAX_QUEUED_REQUESTS,
    MAX_QUEUED_TOKENS,
    MIN_INDEX_BYTES,
    MIN_QUEUED_REQUESTS,
    MIN_QUEUED_TOKENS,
    MIN_STREAMS,
    DerivedLimits,
    PresentLimits,
    QueueLimits,
)
from router.service.bound_limits import WARN_S, BoundLimits
from router.service.descriptors import (
    ADMIN_DESCRIPTORS,
    MIN_CONNECTIONS,
    MOST_CONNECTIONS,
    OWN,
    share_of_admins,
    share_of_clients,
    share_of_links,
)
from tests.router.core_peers import hello

WORKERS = st.lists(
    st.tuples(st.sampled_from(Role), st.integers(1, 200_000), st.integers(1, 1024), st.integers(2, 1 << 20)), max_size=12
)


def worker(role: Role, num_blocks: int, max_num_seqs: int, max_model_len: int, name: str = "w") -> WorkerHello:
    return hello(name, role, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len)


def limits_of(workers: list[WorkerHello], **settings: Any) -> PresentLimits:
    derived = DerivedLimits(RouterConfig(**settings))
    for one in workers:
        derived.join(one)
    return derived.now()


@given(WORKERS)
def test_the_limits_are_those_of_the_workers_that_are_left_but_the_index_never_shrinks(found: list[Any]) -> None:
    workers = [worker(*one) for one in found]
    derived = DerivedLimits(RouterConfig())
    for one in workers:
        derived.join(one)
    before = derived.now()
    assert before == limits_of(workers)
    assert MIN_QUEUED_REQUESTS <= before.queued_requests <= MAX_QUEUED_REQUESTS
    assert MIN_QUEUED_TOKENS <= before.queued_tokens <= MAX_QUEUED_TOKENS
    assert MIN_INDEX_BYTES <= before.index_bytes <= MAX_INDEX_BYTES
    left = workers[: len(workers) // 2]
    for one in workers[len(workers) // 2 :]:
        derived.leave(one)
    after, alone = derived.now(), limits_of(left)
    assert (after.queued_requests, after.queued_tokens, after.streams) == (
        alone.queued_requests,
        alone.queued_tokens,
        alone.streams,
    )
    assert after.index_bytes == before.index_bytes


def test_forty_workers_get_more_than_four_and_prompts_of_any_length_may_wait() -> None:
    four = limits_of([worker(Role.DECODE, 49_152, 256, 131_072)] * 4)
    forty = limits_of([worker(Role.DECODE, 49_152, 256, 131_072)] * 40)
    assert (four.queued_requests, four.streams) == (4096, 5120)
    assert (forty.queued_requests, forty.streams) == (40_960, 51_200)
    assert four.queued_tokens >= 32 * 131_072, "a million tokens were eight such prompts"
    assert four.index_bytes == MIN_INDEX_BYTES < forty.index_bytes
    assert limits_of([]) == PresentLimits(MIN_QUEUED_REQUESTS, MIN_QUEUED_TOKENS, MIN_INDEX_BYTES, MIN_STREAMS)


def test_a_number_in_the_settings_is_the_limit() -> None:
    fixed = {"max_queued_requests": 7, "max_queued_tokens": 70, "prefix_index_bytes": 3 * MIB}
    limits = limits_of([worker(Role.DECODE, 49_152, 256, 131_072)] * 40, **fixed)
    assert (limits.queued_requests, limits.queued_tokens, limits.index_bytes) == (7, 70, 3 * MIB)
    assert limits_of([worker(Role.DECODE, 49_152, 256, 131_072)] * 40, prefix_index_bytes=0).index_bytes == 0


def test_a_queue_that_grows_takes_more_and_counts_what_it_refused() -> None:
    limits = QueueLimits(max_requests=0, max_tokens=100)
    with pytest.raises(Overloaded):
        limits.make_room(SloClass("default"), 5, now_s=0.0)
    assert limits.bound == 1
    limits.resize(max_requests=1, max_tokens=100)
    assert limits.make_room(SloClass("default"), 5, now_s=0.0) == []
    assert limits.bound == 1


def test_a_limit_that_binds_is_told_once_a_minute_with_what_would_raise_it(caplog: pytest.LogCaptureFixture) -> None:
    bound = BoundLimits()
    with caplog.at_level(logging.WARNING):
        bound.warn(0.0)
        bound.note("connections", 3)
        bound.warn(1.0)
        bound.note("connections", 4)
        bound.warn(2.0)
        assert [record.message for record in caplog.records] == [
            "3 connections of clients were refused: raise `ulimit -n` or router.max_connections"
        ]
        bound.warn(1.0 + WARN_S)
        bound.warn(1.0 + 3 * WARN_S)
    assert [record.message[:1] for record in caplog.records] == ["3", "4"]
    assert bound.counts["connections"] == 7


@given(st.integers(1024, 1 << 21))
def test_the_ports_together_stay_within_the_descriptors_and_leave_some_for_workers(limit: int) -> None:
    clients, admins = share_of_clients(limit, None), share_of_admins(limit)
    links = share_of_links(limit, clients)
    assert MIN_CONNECTIONS <= clients <= MOST_CONNECTIONS
    assert admins >= 32
    assert links >= 256
    assert 2 * clients + clients // 2 + ADMIN_DESCRIPTORS * admins + links + OWN <= limit
