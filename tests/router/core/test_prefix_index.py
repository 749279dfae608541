"""The index of held prefixes against a model of dicts and sets, and its answers to workers that are wrong."""

from __future__ import annotations

from functools import reduce
from operator import xor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.block_hash import PrefixDelta
from pdserve.core.errors import ReplicaLost
from pdserve.core.ids import Handle, RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.worker import Role
from router.core import events as ev
from router.core import prefix_index as index_module
from router.core.events import LinkId
from router.core.prefix_index import KEPT_BEATS, RESYNC_S, PrefixIndex
from tests.router.core_peers import Outcome, Stage, hello

PLENTY = 1 << 24
KEYS = st.integers(1, 12)  # few keys, so that workers share them
SOME_KEYS = st.sets(KEYS, max_size=8)
LINK = LinkId(1)


def digest(keys: set[int]) -> int:
    return reduce(xor, keys, 0)


class Model:
    """One worker, as it is and as an index without bits would know it."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.told: set[int] = set()
        self.number = 0
        self.agreed = True
        self.shares = False
        self.works: dict[int, tuple[int, ...]] = {}
        self.ending: dict[int, int] = {}

    @property
    def counted(self) -> set[int]:
        return self.told.union(*self.works.values())

    def end(self, handles: list[int]) -> None:
        for handle in handles:
            del self.ending[handle], self.works[handle]


class IndexMachine(RuleBasedStateMachine):
    """Any deltas, right and wrong, any work and any order."""

    max_bytes = PLENTY

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.max_bytes)
        self.models: dict[LinkId, Model] = {}
        self.links = self.handles = 0

    @rule(role=st.sampled_from(Role))
    def join(self, role: Role) -> None:
        if len(self.models) < 5:
            self.links += 1
            link = LinkId(self.links)
            self.index.join(link, hello(f"w{link}", role))
            self.models[link] = Model(role)

    def pick(self, data: st.DataObject) -> tuple[LinkId, Model]:
        link = data.draw(st.sampled_from(sorted(self.models)))
        return link, self.models[link]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        link, _ = self.pick(data)
        self.index.leave(link)
        del self.models[link]

    @precondition(lambda self: self.models)
    @rule(data=st.data(), now=SOME_KEYS)
    def tell_all(self, data: st.DataObject, now: set[int]) -> None:
        link, model = self.pick(data)
        model.number += 1
        assert not self.index.apply(link, PrefixDelta(model.number, tuple(now), (), digest(now), True), now_s=0.0)
        model.told, model.agreed, model.shares = now, True, True
        model.end(list(model.ending))

    @precondition(lambda self: self.models)
    @rule(data=st.data(), now=SOME_KEYS, fault=st.sampled_from(("none", "none", "none", "lost", "digest")))
    def tell_changes(self, data: st.DataObject, now: set[int], fault: str) -> None:
        link, model = self.pick(data)
        model.number += 1 + (fault == "lost")
        added, removed = tuple(now - model.told), tuple(model.told - now)
        told = PrefixDelta(model.number, added, removed, digest(now) ^ (fault == "digest"))
        self.index.apply(link, told, now_s=0.0)
        model.agreed = model.agreed and fault == "none"
        if model.agreed:
            model.told, model.shares = now, True
            model.end(list(model.ending))

    @precondition(lambda self: self.models)
    @rule(data=st.data(), keys=st.lists(KEYS, max_size=8, unique=True))
    def send_work(self, data: st.DataObject, keys: list[int]) -> None:
        link, model = self.pick(data)
        self.handles += 1
        self.index.expect(link, Handle(self.handles), tuple(keys))
        if keys and model.shares:
            model.works[self.handles] = tuple(keys)

    @precondition(lambda self: any(model.works for model in self.models.values()))
    @rule(data=st.data())
    def end_work(self, data: st.DataObject) -> None:
        link, model = self.pick(data)
        for handle in list(model.works)[:1]:
            self.index.ended(link, Handle(handle))
            model.ending.setdefault(handle, 0)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        link, model = self.pick(data)
        self.index.beat(link)
        model.ending = {handle: beats + 1 for handle, beats in model.ending.items()}
        model.end([handle for handle, beats in model.ending.items() if beats >= KEPT_BEATS])

    @precondition(lambda self: self.models)
    @rule(keys=st.lists(KEYS, max_size=10), role=st.sampled_from(Role))
    def walk(self, keys: list[int], role: Role) -> None:
        found = self.index.walk(keys, role)
        lengths = {}
        for link, model in self.models.items():
            length = next((i for i, key in enumerate(keys) if key not in model.counted), len(keys))
            lengths[link] = length if model.role is role else 0
        self.compare(found.blocks, lengths)
        longest = found.longest(3)
        assert [found.blocks(link) for link in longest] == sorted(map(found.blocks, self.models), reverse=True)[: len(longest)]
        assert all(map(found.blocks, longest))
        assert len(longest) == min(3, sum(bool(found.blocks(link)) for link in self.models)) == len(set(longest))

    def compare(self, blocks: object, lengths: dict[LinkId, int]) -> None:
        assert {link: blocks(link) for link in lengths} == lengths  # type: ignore[operator]

    @invariant()
    def books_agree(self) -> None:
        self.index.check_invariants()
        self.compare_told()

    def compare_told(self) -> None:
        assert {link: self.index.held(link) for link in self.models} == {link: m.told for link, m in self.models.items()}


class SmallIndexMachine(IndexMachine):
    """An index that is full all the time: it knows less than the model, and never anything else."""

    max_bytes = 1000

    def compare(self, blocks: object, lengths: dict[LinkId, int]) -> None:
        assert all(blocks(link) <= length for link, length in lengths.items())  # type: ignore[operator]

    def compare_told(self) -> None:
        assert self.index.bytes <= self.max_bytes
        assert all(self.index.held(link) <= model.told for link, model in self.models.items())


class SlowlySweptMachine(IndexMachine):
    """An index that removes the keys of workers that left one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(index_module, "SWEPT_KEYS", 1)

    def teardown(self) -> None:
        self.patch.undo()


TestIndex = IndexMachine.TestCase
TestSlowlySweptIndex = SlowlySweptMachine.TestCase
TestSmallIndex = SmallIndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlowlySweptIndex.settings = TestSmallIndex.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def index_of(*, max_bytes: int = PLENTY, **keys_of: tuple[int, ...]) -> PrefixIndex:
    index = PrefixIndex(max_bytes)
    for number, (name, keys) in enumerate(keys_of.items(), 1):
        index.join(LinkId(number), hello(name, Role.PREFILL))
        assert not index.apply(LinkId(number), PrefixDelta(1, keys, (), digest(set(keys)), True), now_s=0.0)
    return index


def test_a_gap_or_another_digest_asks_for_all_keys_now_and_then() -> None:
    index = index_of(p0=(1, 2))
    wrong = PrefixDelta(3, (3,), (), digest({1, 2, 3}))
    assert index.apply(LINK, wrong, now_s=10.0), "number 2 was lost"
    assert not index.apply(LINK, wrong, now_s=10.0 + RESYNC_S / 2), "it was asked just now"
    assert index.apply(LINK, wrong, now_s=10.1 + RESYNC_S)
    assert index.held(LINK) == {1, 2}, "what it told before may still be so"
    assert index.apply(LINK, PrefixDelta(4, (3, 4), (), 1, True), now_s=20.0), "not even the whole list agrees with itself"
    assert index.held(LINK) == frozenset()
    assert not index.apply(LINK, PrefixDelta(5, (3, 4), (), digest({3, 4}), True), now_s=20.1)
    assert index.held(LINK) == {3, 4}
    assert index.apply(LINK, PrefixDelta(6, (5,), (), 0), now_s=20.2), "the pause is between two questions about one fault"
    assert index.resyncs == 4


@pytest.mark.parametrize("full", [False, True])
def test_a_worker_that_names_more_keys_than_it_has_blocks_is_lost(full: bool) -> None:
    index = index_of(p0=())
    keys = tuple(range(17))
    with pytest.raises(ReplicaLost, match="p0 shares 17 blocks by its own deltas; its num_blocks is 16"):
        index.apply(LINK, PrefixDelta(2, keys, (), digest(set(keys)), full), now_s=0.0)


def test_a_worker_that_removes_what_it_never_had_is_lost_before_it_fills_the_index() -> None:
    index = PrefixIndex(PLENTY)
    index.join(LINK, hello("d", Role.DECODE))  # 16 blocks
    index.apply(LINK, PrefixDelta(1, tuple(range(1, 17)), (), digest(set(range(1, 17))), full=True), now_s=0.0)
    others, invented = tuple(range(101, 117)), tuple(range(201, 217))
    lie = PrefixDelta(2, others, invented, digest({*range(1, 17), *others, *invented}))
    with pytest.raises(ReplicaLost, match="decode worker d has removed keys that it had not added"):
        index.apply(LINK, lie, now_s=1.0)
    index.leave(LINK)
    assert index.keys == 0
    index.check_invariants()


def test_an_eviction_leaves_digests_and_counts_as_they_were() -> None:
    index = index_of(max_bytes=1000, p0=tuple(range(1, 11)))
    assert index.evicted > 0
    kept = index.held(LINK)
    assert kept < set(range(1, 11))
    assert not index.apply(LINK, PrefixDelta(2, (20,), (1,), digest({*range(2, 11), 20})), now_s=0.0)
    assert 20 in index.held(LINK), "an older key went"
    assert index.resyncs == 0


def test_there_is_no_time_between_the_end_of_work_and_the_delta_that_covers_it() -> None:
    index = index_of(p0=())
    index.expect(LINK, Handle(1), (1, 2, 3))
    assert index.walk((1, 2, 3), Role.PREFILL).blocks(LINK) == 3
    index.ended(LINK, Handle(1))
    index.beat(LINK)
    assert index.walk((1, 2, 3), Role.PREFILL).blocks(LINK) == 3
    index.apply(LINK, PrefixDelta(2, (1, 2), (), digest({1, 2})), now_s=0.0)
    assert index.walk((1, 2, 3), Role.PREFILL).blocks(LINK) == 2, "the delta says what came of it"


def test_a_worker_that_tells_nothing_gets_no_credit() -> None:
    """It does not share blocks, so what it computes is lost with the request."""
    index = PrefixIndex(PLENTY)
    index.join(LINK, hello("p0", Role.PREFILL))
    index.expect(LINK, Handle(1), (1, 2))
    assert not index.walk((1, 2), Role.PREFILL)


def test_a_new_link_of_a_worker_starts_empty() -> None:
    index = index_of(p0=(1, 2), p1=(1,))
    index.leave(LINK)
    index.join(LinkId(3), hello("p0", Role.PREFILL))
    assert index.walk((1, 2), Role.PREFILL).longest(9) == [LinkId(2)]
    index.leave(LinkId(2))
    assert index.keys == 0


def test_an_index_of_no_bytes_is_off() -> None:
    index = index_of(max_bytes=0, p0=(1, 2))
    index.expect(LINK, Handle(1), (1,))
    assert not index.apply(LINK, PrefixDelta(9, (), (), 7), now_s=0.0)
    assert not index.walk((1, 2), Role.PREFILL)
    assert index.block_size is None
    assert index.bytes == 0


def test_the_core_asks_for_all_keys_and_loses_a_worker_that_names_too_many() -> None:
    stage = Stage()
    stage.join("d0", Role.DECODE)
    peer = stage.join("p0", Role.PREFILL)
    index = stage.core.prefix_index
    assert stage.tell(ev.PrefixSeen(peer.link, PrefixDelta(1, (1, 2), (), 3, True))) == []
    assert stage.tell(ev.PrefixSeen(peer.link, PrefixDelta(3, (4,), (), 7))) == [ev.SendPrefixResync(peer.link)]
    assert index.walk((1, 2), Role.PREFILL).blocks(peer.link) == 2
    outcome = stage.submit("r")
    seen = ev.PrefixSeen(peer.link, PrefixDelta(4, tuple(range(17)), (), 0, True))
    closed = next(effect for effect in stage.tell(seen) if isinstance(effect, ev.CloseLink))
    assert isinstance(closed.error, ReplicaLost)
    assert index.keys == 0, "its blocks are no longer anybody's"
    assert stage.tell(seen) == [], "the link has gone"
    stage.join("p1", Role.PREFILL)
    stage.run()
    assert outcome.ended
    stage.assert_empty()


def test_work_on_the_way_counts_only_what_its_worker_must_compute() -> None:
    """Counted whole, the second request with a prompt that a worker holds seemed to wait longer there than to be computed."""
    stage = Stage()
    stage.join("d0", Role.DECODE)
    holder, _ = (stage.join(name, Role.PREFILL) for name in ("p0", "p1"))
    stage.tell(ev.PrefixSeen(holder.link, PrefixDelta(1, (1, 2), (), 3, True)))
    for name in ("a", "b", "c"):
        stage.outcomes[RequestId(name)] = Outcome()
        spec = RequestSpec(tuple(range(9)), SamplingParams(max_tokens=2))
        stage.tell(ev.Submit(RequestId(name), spec, 0.0, 100.0, Placement.DISAGGREGATED, prefix_keys=(1, 2)))
    for peer in list(stage.peers.values()):
        stage.deliver(peer, len(peer.upward))
    assert len(holder.jobs) == 3
    stage.run()
    stage.assert_empty()
