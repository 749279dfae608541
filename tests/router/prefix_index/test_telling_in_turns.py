"""Workers with large pools tell the router their keys a few at a time, in turns, and all of them come to theirs."""

from __future__ import annotations

import random
from functools import reduce
from operator import xor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.block_hash import KeyChanges, PrefixDelta
from pdserve.core.ids import Handle
from pdserve.core.worker import Role
from pdserve.worker import prefix_log
from pdserve.worker.prefix_log import PrefixCursor, PrefixLog
from router.core import events as ev
from router.core import prefix_index as index_module
from router.core.events import LinkId
from router.core.policy import splitmix64
from router.core.prefix_index import TELL_S, PrefixIndex
from tests.router.core_peers import Stage, hello

AT_ONCE, PART, TELLING = 2, 4, 3
BLOCKS = 16  # of a worker of `hello`


@pytest.fixture(autouse=True, scope="module")
def few() -> object:
    """Let pools be large that have 16 blocks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (prefix_log, index_module):
            patch.setattr(module, "TOLD_AT_ONCE", AT_ONCE)
            patch.setattr(module, "MAX_TOLD", PART)
        patch.setattr(index_module, "MAX_TELLING", TELLING)
        yield


class Told:
    """A worker with its pool, which tells its keys with each beat, and answers when it is asked."""

    def __init__(self, link: int, keys: int, index: PrefixIndex, *, old: bool = False, hangs: bool = False) -> None:
        self.link, self.hangs = LinkId(link), hangs
        self.names = [splitmix64(link << 8 | key) for key in range(40)]  # small numbers may have an exclusive or of 0
        self.held = set(self.names[:keys])
        self.log = PrefixLog()
        self.log.note(KeyChanges(tuple(self.held), (), reduce(xor, self.held, 0)))
        self.cursor = PrefixCursor(self.log)
        if old:
            self.cursor.ask_full()  # one of an earlier release does not wait until it is asked
        index.join(self.link, hello(f"w{link}", Role.PREFILL))

    def change(self, draws: random.Random) -> None:
        now = set(draws.sample(self.names, draws.randrange(BLOCKS + 1)))
        self.log.note(KeyChanges(tuple(now - self.held), tuple(self.held - now), reduce(xor, now, 0)))
        self.held = now


def beat_all(index: PrefixIndex, workers: dict[LinkId, Told], now_s: float) -> int:
    """Let each worker beat once. Return how many keys became new to the index."""
    taken = 0
    for worker in workers.values():
        index.beat(worker.link)
        asked = [index.turn(now_s)]
        delta = None if worker.hangs else worker.cursor.next(now_s=now_s)
        if delta is not None:
            before = index.held(worker.link)
            asked.append(index.apply(worker.link, delta, now_s=now_s))
            taken += len(index.held(worker.link) - before)
        for link in asked:
            if link is not None:
                workers[link].cursor.ask_full()
    index.check_invariants()
    return taken


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, BLOCKS), st.booleans(), st.booleans()), min_size=1, max_size=10),
    st.integers(0, 1 << 32),
)
def test_every_worker_that_answers_is_heard(pools: list[tuple[int, bool, bool]], seed: int) -> None:
    """Some are of an earlier release, some fall silent once they are asked, one leaves, and pools change meanwhile."""
    draws, index = random.Random(seed), PrefixIndex(1 << 24)
    workers = {LinkId(n): Told(n, keys, index, old=old) for n, (keys, old, _) in enumerate(pools, 1)}
    for at in range(20):
        if at == 2:
            for number, (_, _, hangs) in enumerate(pools, 1):
                workers[LinkId(number)].hangs = hangs
            index.leave(LinkId(1))
            del workers[LinkId(1)]
        for worker in workers.values():
            if draws.random() < 0.2:
                worker.change(draws)
        beat_all(index, workers, float(at))
    for at in range(20, 20 + (int(TELL_S) + BLOCKS // PART + 4) * len(pools)):
        beat_all(index, workers, float(at))
    for link, worker in workers.items():
        assert worker.hangs or index.held(link) == worker.held


@pytest.mark.parametrize("old", [False, True])
def test_a_beat_of_many_workers_that_begin_anew_brings_as_many_keys_as_one_of_a_few(old: bool) -> None:
    index = PrefixIndex(1 << 24)
    workers = {LinkId(n): Told(n, BLOCKS, index, old=old) for n in range(1, 31)}
    taken = [beat_all(index, workers, float(at)) for at in range(100)]
    assert max(taken) <= 2 * TELLING * PART, "a place that is free is given on, at most once in a beat"
    assert index.keys == 30 * BLOCKS
    assert taken.index(0, 4) <= 30 * (BLOCKS // PART + 2) // TELLING + 4, "places are used"


def test_a_worker_that_waits_for_its_turn_has_credit_for_its_work() -> None:
    index = PrefixIndex(1 << 24)
    workers = {LinkId(n): Told(n, BLOCKS, index) for n in range(1, 9)}
    beat_all(index, workers, 0.0)
    last = LinkId(8)
    assert index.held(last) == frozenset()
    index.expect(last, Handle(1), (1, 2, 3))
    assert index.walk((1, 2, 3), Role.PREFILL).blocks(last) == 3


def test_a_worker_that_falls_silent_gives_its_place_to_the_next() -> None:
    index = PrefixIndex(1 << 24)
    workers = {LinkId(n): Told(n, BLOCKS, index) for n in range(1, 5)}
    beat_all(index, workers, 0.0)
    for link in (1, 2, 3):
        workers[LinkId(link)].hangs = True
    for at in range(1, 2 + int(TELL_S)):
        beat_all(index, workers, float(at))
    for at in range(2 + int(TELL_S), 10 + int(TELL_S)):
        beat_all(index, workers, float(at))
    assert index.held(LinkId(4)) == workers[LinkId(4)].held


def test_the_core_asks_the_next_one_when_somebody_beats() -> None:
    stage = Stage()
    peers = [stage.join(f"p{number}", Role.PREFILL) for number in range(TELLING + 1)]
    said = [stage.tell(ev.PrefixSeen(peer.link, PrefixDelta(1, (), (), 7, full=True))) for peer in peers]
    assert said == [[ev.SendPrefixResync(peer.link)] for peer in peers[:-1]] + [[]]
    keys = (1, 2)
    told = stage.tell(ev.PrefixSeen(peers[0].link, PrefixDelta(2, keys, (), 3, full=True)))
    assert told == [ev.SendPrefixResync(peers[-1].link)], "the last part makes room"
    stage.join("d0", Role.DECODE)
    stage.run()
    stage.assert_empty()
