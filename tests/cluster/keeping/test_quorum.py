"""The decision whether a start goes on: what never happens, for any workers, and the cases that were wrong once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.errors import ClusterError
from pdserve.cluster.quorum import JOIN_TIMEOUT_S, LEAST_PATIENCE_S, Starter, goes_on
from pdserve.core.errors import ConfigError, PdserveError

BROKEN = ClusterError("decode-0 cannot start")
STATES = st.sampled_from(["loads", "loaded", "ready", "failed"])


def starter(worker_id: str, state: str, *, loaded_s: float = 1.0) -> Starter:
    return Starter(
        worker_id,
        worker_id.partition("-")[0],
        BROKEN if state == "failed" else None,
        loaded_s if state in ("loaded", "ready") else None,
        state == "ready",
    )


def decided(workers: list[Starter], needed: tuple[str, ...], start_s: float, quorum_s: float | None) -> bool | PdserveError:
    try:
        return goes_on(workers, needed, since_start_s=start_s, since_quorum_s=quorum_s)
    except PdserveError as exc:
        return exc


@given(
    states=st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), STATES), max_size=6),
    needed=st.sampled_from([("decode",), ("prefill", "decode")]),
    start_s=st.floats(0, 1e4),
    quorum_s=st.one_of(st.none(), st.floats(0, 1e4)),
)
def test_it_goes_on_only_with_every_needed_role_and_ends_only_without_one(
    states: list[tuple[str, str]], needed: tuple[str, ...], start_s: float, quorum_s: float | None
) -> None:
    workers = [starter(f"{role}-{index}", state) for index, (role, state) in enumerate(states)]
    answer = decided(workers, needed, start_s, quorum_s)
    of = {role: [worker for worker in workers if worker.role == role] for role in needed}
    if answer is True:
        assert all(any(worker.ready for worker in of[role]) for role in needed)
    if isinstance(answer, PdserveError):
        assert any(of[role] and all(worker.failure for worker in of[role]) for role in needed)
    if all(any(worker.ready for worker in of[role]) for role in needed):
        assert not isinstance(answer, PdserveError)


def test_one_bad_worker_of_three_keeps_nobody_waiting() -> None:
    workers = [starter("decode-0", "ready"), starter("decode-1", "failed"), starter("decode-2", "ready")]
    assert goes_on(workers, ("decode",), since_start_s=1.0, since_quorum_s=0.0)


def test_a_slow_worker_is_waited_for_as_long_again_as_the_start_took() -> None:
    workers = [starter("decode-0", "ready"), starter("decode-1", "loads")]
    assert not goes_on(workers, ("decode",), since_start_s=100.0, since_quorum_s=49.0)
    assert goes_on(workers, ("decode",), since_start_s=100.0, since_quorum_s=50.0)
    short = LEAST_PATIENCE_S - 0.1
    assert not goes_on(workers, ("decode",), since_start_s=short, since_quorum_s=short)


def test_a_prefill_pool_that_is_not_needed_ends_nothing() -> None:
    workers = [starter("prefill-0", "failed"), starter("decode-0", "ready")]
    assert goes_on(workers, ("decode",), since_start_s=1.0, since_quorum_s=0.0)
    with pytest.raises(ClusterError, match="cannot start"):
        goes_on(workers, ("prefill", "decode"), since_start_s=1.0, since_quorum_s=None)


def test_a_wrong_setting_stays_a_wrong_setting() -> None:
    wrong = Starter("decode-0", "decode", ConfigError("model: nothing is called so"), None, ready=False)
    with pytest.raises(ConfigError, match="nothing is called so"):
        goes_on([wrong], ("decode",), since_start_s=1.0, since_quorum_s=None)


def test_workers_that_load_and_do_not_join_end_the_start() -> None:
    workers = [starter("decode-0", "loaded", loaded_s=JOIN_TIMEOUT_S + 1), starter("decode-1", "failed")]
    with pytest.raises(ClusterError, match="decode-0 did not join the router"):
        goes_on(workers, ("decode",), since_start_s=99.0, since_quorum_s=None)
    workers[1] = starter("decode-1", "loads")
    assert not goes_on(workers, ("decode",), since_start_s=99.0, since_quorum_s=None)
