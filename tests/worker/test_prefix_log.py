"""The log of a worker's keys: each link hears of every change once, or gets all keys."""

from __future__ import annotations

from functools import reduce
from operator import xor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.block_hash import KeyChanges, PrefixDelta
from pdserve.core.worker import Role
from pdserve.rpc.codec import prefix_delta_from_wire, prefix_delta_to_wire
from pdserve.worker.prefix_log import FULL_S, PrefixCursor, PrefixLog
from router.core.events import LinkId
from router.core.prefix_index import PrefixIndex
from tests.router.core_peers import hello

LINK = LinkId(1)


def changes(before: set[int], now: set[int]) -> KeyChanges:
    return KeyChanges(tuple(now - before), tuple(before - now), reduce(xor, now, 0))


def log_of(*states: set[int], max_logged: int = 99) -> PrefixLog:
    log = PrefixLog(max_logged)
    for before, now in zip((set[int](), *states), states, strict=False):
        log.note(changes(before, now))
    return log


def test_a_new_link_gets_all_keys_and_then_what_changes() -> None:
    log = log_of({1, 2}, {2, 3})
    cursor = PrefixCursor(log)
    assert cursor.next(now_s=0.0) == PrefixDelta(1, (2, 3), (), 1, full=True)
    assert cursor.next(now_s=1.0) is None
    log.note(changes({2, 3}, {3, 4}))
    log.note(changes({3, 4}, {3, 5}))
    assert cursor.next(now_s=2.0) == PrefixDelta(2, (5,), (2,), 6), "4 came and went"
    log.note(changes({3, 5}, {3}))
    log.note(changes({3}, {3, 5}))
    assert cursor.next(now_s=3.0) is None, "5 went and came back"
    assert PrefixCursor(log).next(now_s=3.0) == PrefixDelta(1, (3, 5), (), 6, full=True)


def test_an_empty_pool_says_so_once() -> None:
    cursor = PrefixCursor(PrefixLog())
    assert cursor.next(now_s=0.0) == PrefixDelta(1, (), (), 0, full=True)
    assert cursor.next(now_s=9.0) is None


def test_all_keys_come_at_most_once_in_a_while() -> None:
    log = log_of({1})
    cursor = PrefixCursor(log)
    cursor.next(now_s=0.0)
    cursor.ask_full()
    assert cursor.next(now_s=FULL_S / 2) is None
    log.note(changes({1}, {1, 2}))
    assert cursor.next(now_s=FULL_S / 2) is None, "all keys are on their way, and changes before them would mean nothing"
    assert cursor.next(now_s=FULL_S) == PrefixDelta(2, (1, 2), (), 3, full=True)


def test_a_link_that_has_fallen_off_gets_all_keys() -> None:
    log = log_of({1}, max_logged=3)
    cursor = PrefixCursor(log)
    cursor.next(now_s=0.0)
    for key in range(1, 5):
        log.note(changes({key}, {key + 1}))
    assert cursor.next(now_s=9.0) == PrefixDelta(2, (5,), (), 5, full=True)


def test_all_keys_of_a_large_pool_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.worker.prefix_log.MAX_TOLD", 2)
    log = log_of({1, 2, 3, 4, 5})
    cursor = PrefixCursor(log)
    assert cursor.next(now_s=0.0) == PrefixDelta(1, (1, 2), (), 3, full=True)
    log.note(changes({1, 2, 3, 4, 5}, {2, 3, 4, 5, 6}))
    assert cursor.next(now_s=1.0) == PrefixDelta(2, (3, 4), (), 4)
    assert cursor.next(now_s=2.0) == PrefixDelta(3, (5,), (), 1)
    assert cursor.next(now_s=3.0) == PrefixDelta(4, (6,), (1,), 6), "changes since the beginning come last"
    cursor.ask_full()
    assert cursor.next(now_s=4.0) == PrefixDelta(5, (2, 3), (), 1, full=True)
    cursor.ask_full()
    assert cursor.next(now_s=6.0) == PrefixDelta(6, (2, 3), (), 1, full=True), "it begins anew"


@given(st.lists(st.tuples(st.sets(st.integers(1, 9)), st.sampled_from(("", "", "beat", "resync", "new link")))))
def test_a_router_that_hears_everything_knows_what_the_pool_holds(steps: list[tuple[set[int], str]]) -> None:
    log, index = PrefixLog(8), PrefixIndex(1 << 20)
    index.join(LINK, hello("p0", Role.PREFILL))
    cursor, held = PrefixCursor(log), set[int]()
    for at_s, (now, act) in enumerate(steps):
        if now != held:
            log.note(changes(held, now))
            held = now
        if act == "resync":
            cursor.ask_full()
        elif act == "new link":
            index.leave(LINK)
            index.join(LINK, hello("p0", Role.PREFILL))
            cursor = PrefixCursor(log)
        if act:
            delta = cursor.next(now_s=FULL_S * at_s)
            if delta is not None:
                delta = prefix_delta_from_wire(prefix_delta_to_wire(delta))
                assert not index.apply(LINK, delta, now_s=0.0)
            assert index.held(LINK) == held
