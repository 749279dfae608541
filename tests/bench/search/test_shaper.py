"""A cluster reaches every layout from every other one and comes back, and each disturbance is an error that says what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.ids import Incarnation
from pdserve.core.worker import Role
from pdserve_bench.layout import Layout
from pdserve_bench.search.reshape import CannotShape, home_of, homes_of, pids_of
from pdserve_bench.search.shaper import AGAIN_S, Shaper
from tests.bench.search.shaped_cluster import ShapedCluster, failed, worker


def shaper(cluster: ShapedCluster, timeout_s: float = 60.0) -> Shaper:
    return Shaper(cluster, timeout_s=timeout_s, clock=cluster.clock, sleep=cluster.sleep)


def layouts(workers: int) -> st.SearchStrategy[Layout]:
    return st.builds(
        lambda prefill, chunk, seqs: Layout(prefill, workers - prefill, chunk, seqs),
        st.integers(0, workers - 1),
        st.sampled_from([79, 128, 512]),
        st.sampled_from([1, 8, 64]),
    )


def assert_shaped(cluster: ShapedCluster, layout: Layout) -> None:
    assert (cluster.count(Role.PREFILL), cluster.count(Role.DECODE)) == (layout.prefill, layout.decode)
    for one in cluster.workers.values():
        prefills = one.hello.role is Role.PREFILL
        assert one.max_num_batched_tokens == (layout.chunk_tokens if prefills or not layout.prefill else 512)
        assert one.max_num_seqs == (64 if prefills else layout.max_num_seqs)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), prefill=st.integers(0, 3), decode=st.integers(1, 3), automatic=st.booleans())
def test_any_layout_is_reached_from_any_other_one_and_the_first_one_comes_back(
    data: st.DataObject, prefill: int, decode: int, automatic: bool
) -> None:
    async def story() -> None:
        cluster = ShapedCluster(prefill, decode, automatic=automatic)
        one, homes = shaper(cluster), homes_of(await cluster.look())
        before = prefill
        for layout in data.draw(st.lists(layouts(prefill + decode), max_size=4)):
            flips = sum(call.startswith("flip") for call in cluster.calls)
            await one.shape(layout)
            assert_shaped(cluster, layout)
            assert sum(call.startswith("flip") for call in cluster.calls) - flips == abs(layout.prefill - before)
            before = layout.prefill
        await one.restore()
        assert homes_of(await cluster.look()) == homes
        assert cluster.fewest_decode >= 1
        assert cluster.automatic == automatic
        calls = len(cluster.calls)
        await one.restore()
        assert len(cluster.calls) == calls, "the second one does nothing"

    asyncio.run(story())


@pytest.mark.parametrize("changes", [{"max_num_seqs": 4}, {"max_num_batched_tokens": 79}, {"draining": True}])
def test_a_run_beside_another_operator_does_not_count(changes: dict[str, Any]) -> None:
    async def story() -> None:
        cluster = ShapedCluster(1, 1)
        one = shaper(cluster)
        await one.shape(Layout(0, 2, 128, 8))
        await one.check(Layout(0, 2, 128, 8))
        cluster.change("p0", **changes)
        with pytest.raises(CannotShape, match="somebody else changed the workers while 2 colocated was measured"):
            await one.check(Layout(0, 2, 128, 8))

    asyncio.run(story())


@pytest.mark.parametrize("shaped", [True, False])
@pytest.mark.parametrize("automatic", [True, False])
def test_a_layout_that_a_killed_search_left_is_followed_by_the_first_one(shaped: bool, automatic: bool) -> None:
    async def story() -> None:
        cluster = ShapedCluster(1, 1, automatic=automatic)
        home = home_of(await cluster.look())
        await shaper(cluster).shape(Layout(0, 2, 128, 8))  # and then it is killed
        now = await cluster.look()
        assert pids_of(now) == home.pids
        one = Shaper(cluster, timeout_s=60.0, clock=cluster.clock, sleep=cluster.sleep, owed=home)
        if shaped:
            await one.shape(Layout(1, 1, 512, 64))
        assert not one.restored
        await one.restore()
        assert one.restored
        assert homes_of(await cluster.look()) == home.workers
        assert cluster.automatic == automatic

    asyncio.run(story())


def test_nothing_is_done_where_nothing_is_to_do() -> None:
    async def story() -> None:
        cluster = ShapedCluster(1, 2)
        await shaper(cluster).shape(Layout(1, 2, 512, 64))
        assert set(cluster.calls) == {"look"}

    asyncio.run(story())


def test_a_layout_is_ready_only_when_nothing_runs() -> None:
    async def story() -> None:
        cluster = ShapedCluster(1, 1)
        cluster.requests = 1

        def ends(call: str) -> None:
            if cluster.now_s > 5:
                cluster.requests = 0

        cluster.before = ends
        await shaper(cluster).shape(Layout(0, 2, 512, 64))
        assert cluster.now_s > 5
        cluster.change("p0", work=3)
        with pytest.raises(CannotShape, match="after 60 s the cluster still waits for requests"):
            await shaper(cluster).shape(Layout(0, 2, 512, 64))
        one = shaper(cluster)
        with pytest.raises(CannotShape):
            await one.shape(Layout(1, 1, 128, 8))
        await one.restore()  # others may use the cluster again

    asyncio.run(story())


def test_lost_limits_are_set_again() -> None:
    async def story() -> None:
        cluster = ShapedCluster(1, 1)

        def lose(call: str) -> None:
            if cluster.now_s < AGAIN_S:
                cluster.coming.clear()

        cluster.before = lose
        await shaper(cluster).shape(Layout(1, 1, 128, 8))
        assert sum(call.startswith("budget") for call in cluster.calls) == 4  # two workers, twice

    asyncio.run(story())


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(2, 2, 512, 64), "has 4 workers and the cluster has 3"),
        (Layout(3, 0, 512, 64), "at least one of them for decode"),
        (Layout(1, 2, 513, 64), "layout 1P.2D: max_num_batched_tokens: 513 is out of range; worker 'p0' takes from 79 to 512"),
        (Layout(1, 2, 512, 65), "layout 1P.2D: max_num_seqs: 65 is out of range; worker 'd0' takes from 1 to 64"),
        (Layout(2, 1, 512, 64), "needs worker 'd0' as a prefill worker, but it cannot change its role: too small"),
    ],
)
def test_a_layout_that_cannot_be_changes_nothing(layout: Layout, said: str) -> None:
    async def story() -> None:
        cluster = ShapedCluster(1, 2)
        for name in ("d0", "d1"):
            cluster.change(name, flip_obstacle="too small")
        one = shaper(cluster)
        with pytest.raises(CannotShape, match=said):
            await one.shape(layout)
        await one.restore()
        assert set(cluster.calls) == {"look"}

    asyncio.run(story())


def test_a_cluster_without_a_decode_worker_is_refused() -> None:
    cluster = ShapedCluster(2, 0)
    with pytest.raises(CannotShape, match="the cluster has no decode worker: start one, or flip one"):
        asyncio.run(shaper(cluster).shape(Layout(1, 1, 128, 8)))


def test_workers_that_cannot_flip_are_left_out() -> None:
    async def story() -> None:
        cluster = ShapedCluster(2, 2)
        for name in ("p0", "d0"):
            cluster.change(name, flip_obstacle="too small")
        one = shaper(cluster)
        await one.shape(Layout(3, 1, 512, 64))
        await one.shape(Layout(1, 3, 512, 64))
        assert cluster.workers["p0"].hello.role is Role.PREFILL
        assert cluster.workers["d0"].hello.role is Role.DECODE

    asyncio.run(story())


def once(cluster: ShapedCluster, when: str, do: object) -> None:
    """Call `do` before the first look after a call that begins with `when`."""
    armed = [False, False]

    def before(call: str) -> None:
        armed[0] = armed[0] or call.startswith(when)
        if armed[0] and not armed[1] and call == "look":
            armed[1] = True
            do()  # type: ignore[operator]

    cluster.before = before


def test_each_disturbance_is_told_and_the_first_layout_comes_back() -> None:
    async def story(layout: Layout, disturb: object, said: str) -> None:
        cluster = ShapedCluster(2, 2)
        homes = homes_of(await cluster.look())
        once(cluster, "flip", lambda: disturb(cluster))  # type: ignore[operator]
        one = shaper(cluster)
        with pytest.raises(CannotShape, match=said):
            await one.shape(layout)
        await one.restore()
        assert homes_of(await cluster.look()).items() >= homes.items()

    colocated = Layout(0, 4, 128, 8)
    back = {"role": Role.PREFILL, "incarnation": Incarnation(9)}

    def unreachable(cluster: ShapedCluster) -> None:
        raise failed("no router answers")

    for disturb, said in (
        (lambda cluster: setattr(cluster, "router", 2), "the router was started anew.*--resume"),
        (lambda cluster: cluster.change("d0", pid=4711), "worker 'd0' was started anew"),
        (lambda cluster: cluster.change("p0", **back), "somebody else changes roles.*stop the other operator"),
        (
            lambda cluster: cluster.workers.update(x=worker("x", Role.DECODE)),
            "worker 'x' has joined.*keep the number of workers",
        ),
        (unreachable, "the cluster cannot be looked at: no router answers"),
    ):
        asyncio.run(story(colocated, disturb, said))


def test_a_flip_that_the_router_refuses_is_told() -> None:
    async def story() -> None:
        cluster = ShapedCluster(1, 1, needs_prefill=True)
        one = shaper(cluster)
        with pytest.raises(CannotShape, match="worker 'p0' did not become a decode worker: the last prefill worker"):
            await one.shape(Layout(0, 2, 128, 8))
        await one.restore()
        assert cluster.count(Role.PREFILL) == 1

    asyncio.run(story())


def test_a_lost_worker_is_waited_for_and_the_others_come_back_without_it() -> None:
    async def story() -> None:
        cluster = ShapedCluster(2, 2)
        one = shaper(cluster)
        once(cluster, "flip", lambda: cluster.workers.pop("d1"))
        with pytest.raises(CannotShape, match="after 60 s the cluster still waits for d1 to be linked"):
            await one.shape(Layout(0, 4, 128, 8))
        with pytest.raises(CannotShape, match="d1 did not come back, and all others are as they were"):
            await one.restore()
        assert [cluster.workers[name].hello.role for name in ("p0", "p1", "d0")] == [Role.PREFILL, Role.PREFILL, Role.DECODE]

    asyncio.run(story())


def test_the_way_back_survives_calls_that_fail() -> None:
    async def story() -> None:
        cluster = ShapedCluster(2, 2)
        one, homes = shaper(cluster), homes_of(await cluster.look())
        await one.shape(Layout(0, 4, 128, 8))
        begin_s = cluster.now_s

        def away(call: str) -> None:
            if cluster.now_s < begin_s + 20:
                raise failed("no router answers")

        cluster.before = away
        await one.restore()
        assert homes_of(await cluster.look()) == homes
        cluster.before = lambda call: None
        await one.shape(Layout(0, 4, 128, 8))
        cluster.before = lambda call: (_ for _ in ()).throw(failed("no router answers"))
        with pytest.raises(CannotShape, match=r"no router answers: look at `pdserve status`"):
            await one.restore()
        cluster.before = lambda call: None
        await one.restore()
        assert homes_of(await cluster.look()) == homes

    asyncio.run(story())


def test_an_actuator_that_refuses_or_is_overruled_is_told_and_gets_the_sizes_back() -> None:
    async def story(said: str, **changes: object) -> None:
        cluster = ShapedCluster(1, 1, automatic=True)

        def change(call: str) -> None:
            if call == "look" and cluster.orders == 1:
                for name, value in changes.items():
                    setattr(cluster, name, value)

        cluster.before = change
        one = shaper(cluster)
        with pytest.raises(CannotShape, match=said):
            await one.shape(Layout(0, 2, 128, 8))
        await one.restore()
        assert cluster.automatic
        assert not any(call.startswith("flip") for call in cluster.calls)

    asyncio.run(story("refuses to keep the sizes: too few", refused="too few"))
    asyncio.run(story("another order about the sizes came", orders=7))


def test_a_cancelled_reshaping_comes_back() -> None:
    async def story() -> None:
        cluster = ShapedCluster(2, 2)
        one, homes = shaper(cluster), homes_of(await cluster.look())

        def interrupt(call: str) -> None:
            if call.startswith("budget"):
                raise asyncio.CancelledError

        cluster.before = interrupt
        with pytest.raises(asyncio.CancelledError):
            await one.shape(Layout(0, 4, 128, 8))
        cluster.before = lambda call: None
        await one.restore()
        assert homes_of(await cluster.look()) == homes

    asyncio.run(story())
