"""The actuator on a simulated cluster: it reaches the wanted sizes through faults, and acts on the present membership only."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_world import Worker, World

from pdserve.cluster.events import ActuatorReplaced, PoolsResized
from pdserve.cluster.member import MemberState
from pdserve.cluster.scaling.actuator import FIRST_S, LONGEST_S, Actuator
from pdserve.config import ClusterConfig, load
from pdserve.core.errors import ConfigError
from pdserve.core.worker import Role
from pdserve.planner.limits import PoolSizes
from pdserve.rpc.v1 import scaling_pb2

SETTLED_S = 200


def world(*overrides: str) -> World:
    return World(load(ClusterConfig, None, overrides))


def history(here: World) -> list[str]:
    state = here.mailbox.state(here.now_s)
    assert state is not None
    return [event.text for event in state.history]


def test_the_configured_sizes_call_for_nothing() -> None:
    here = world("prefill.replicas=2")
    here.step(30)
    assert (here.asked, here.sizes()) == ([], (2, 1))


def test_a_cluster_without_prefill_workers_is_kept_as_it_is() -> None:
    """`pdserve up --prefill 0` once failed, because a pool's limit had to be at least one worker."""
    here = world("prefill.replicas=0")
    here.step(30)
    assert (here.asked, here.sizes()) == ([], (0, 1))


def test_an_order_starts_workers_under_new_ids_and_drains_those_that_are_too_many() -> None:
    here = world("prefill.replicas=2")
    here.step()
    assert here.order(prefill=1, decode=3) == 1
    here.workers["prefill-0"].obstacle = here.workers["prefill-1"].obstacle = "engine settings differ"
    here.step(SETTLED_S)
    assert here.sizes() == (1, 3)
    assert sorted(here.asked) == [("drain", "prefill-1"), ("start", "decode-1"), ("start", "decode-2")]
    report = here.state().scaling.report
    assert (report.mode, report.order, report.prefill, report.decode, len(report.members)) == ("fixed", 1, 1, 3, 0)
    assert history(here) == ["prefill 2 -> 1, decode 1 -> 3: order 1 of an operator"]


def test_a_worker_changes_its_role_and_its_next_process_starts_in_it() -> None:
    here = world("prefill.replicas=2", "prefill.max_restarts_per_hour=0")
    here.step()
    here.order(prefill=1, decode=2)
    here.step(2)
    assert [member.phase for member in here.state().scaling.report.members] == ["changing its role"]
    here.step(SETTLED_S)
    assert (here.asked, here.sizes()) == ([("flip", "prefill-1")], (1, 2))
    here.die("prefill-1")
    here.step(SETTLED_S)
    assert (here.workers["prefill-1"].role, here.sizes()) == ("decode", (1, 2))


def test_a_flip_that_the_worker_refuses_by_name_becomes_a_drain_and_a_start() -> None:
    here = world("prefill.replicas=2")
    here.step()

    for worker in here.workers.values():
        worker.refuses = "it has no room for staging"
    here.order(prefill=1, decode=2)
    here.step(SETTLED_S)
    assert here.sizes() == (1, 2)
    assert sorted(here.asked) == [("drain", "prefill-1"), ("start", "decode-1")]
    assert any("no room for staging" in text for text in history(here))


def test_pools_of_different_degrees_exchange_no_worker_and_gangs_come_and_go_whole() -> None:
    here = world("prefill.replicas=2", "prefill.engine.tensor_parallel_size=2", "engine.device=cpu")
    here.step()
    here.order(prefill=1, decode=2)
    here.step(SETTLED_S)
    assert here.sizes() == (1, 2)
    assert sorted(here.asked) == [("drain", "prefill-1"), ("start", "decode-1")]
    here.order(prefill=2, decode=1)
    here.step(SETTLED_S)
    assert (here.sizes(), [what for what, _ in here.asked].count("flip")) == ((2, 1), 0)
    assert {member.worker_id: member.plan.ranks for member in here.members} == {
        "prefill-0": 2, "prefill-1": 2, "decode-0": 1,
    }  # fmt: skip


def test_an_order_counts_the_cpus_of_all_ranks_of_a_gang() -> None:
    gangs = ("decode.num_cpus=1", "decode.engine.tensor_parallel_size=2", "decode.max_replicas=3", "engine.device=cpu")
    here = world("autoscaling.max_cpus=5", "prefill.num_cpus=1", *gangs)
    here.step()
    here.order(decode=3)
    here.step(2)
    assert here.state().scaling.report.refused == "prefill 1 and decode 3 together are over autoscaling.max_cpus (5)"
    here.order(decode=2)
    here.step(SETTLED_S)
    assert here.sizes() == (1, 2)


def test_a_worker_that_an_operator_drains_or_flips_is_not_undone() -> None:
    here = world("prefill.replicas=3")
    here.step()
    here.workers["prefill-0"].draining_s = 0
    here.workers["prefill-2"].draining_s, here.workers["prefill-2"].becomes = 0, "decode"
    here.step(SETTLED_S)
    assert (here.asked, here.sizes()) == ([], (1, 2))
    assert history(here) == [
        "prefill 3 -> 2: prefill-0 was drained",
        "prefill 2 -> 1, decode 1 -> 2: prefill-2 has become a decode worker",
    ] or history(here) == [
        "prefill 3 -> 2, decode 1 -> 2: prefill-2 has become a decode worker",
        "prefill 2 -> 1: prefill-0 was drained",
    ]


@pytest.mark.parametrize(
    ("becomes", "order", "sizes"),
    [
        ("", {"prefill": 2}, (2, 1)),
        ("", {"prefill": 3}, (3, 1)),
        ("", {"decode": 2}, (2, 2)),
        ("decode", {"prefill": 3, "decode": 1}, (3, 1)),
        ("decode", {"prefill": 2}, (2, 2)),
        ("decode", {"decode": 2}, (2, 2)),
    ],
)
def test_an_order_gives_sizes_without_the_workers_that_an_operator_drains_or_flips_already(
    becomes: str, order: dict[str, int], sizes: tuple[int, int]
) -> None:
    """A pool that the order names gets this size. The other one follows what the operator did before."""
    here = world("prefill.replicas=3")
    here.step()
    here.workers["prefill-0"].draining_s, here.workers["prefill-0"].becomes = 0, becomes
    here.step()
    here.order(**order)
    here.step(SETTLED_S)
    assert here.sizes() == sizes
    assert (here.actuator.wanted.sizes.prefill, here.actuator.wanted.sizes.decode) == sizes


def test_a_worker_that_serves_before_its_supervisor_has_heard_so_is_not_cancelled() -> None:
    """The end of a start is told to the router by the worker's link, and to the supervisor by Ray. Either may be first."""
    here = world()
    here.step()
    here.order(prefill=2)
    here.step(2)
    assert here.member("prefill-1").state is MemberState.LOADING
    here.workers["prefill-1"] = Worker("prefill", 99)
    here.order(prefill=1)
    here.actuator.tick(here.now_s + 1.0)
    assert here.asked == [("start", "prefill-1")]
    here.step(SETTLED_S)
    assert here.sizes() == (1, 1)


def test_a_worker_that_has_started_and_was_never_linked_is_cancelled() -> None:
    """Nobody could drain it, and it serves nobody."""
    here = world()
    here.step()
    here.order(prefill=2)
    here.step(2)
    here.member("prefill-1").loaded(MagicMock(), here.now_s)
    here.order(prefill=1)
    here.actuator.tick(here.now_s + 1.0)
    assert here.asked == [("start", "prefill-1"), ("cancel", "prefill-1")]


def test_a_flip_that_was_refused_is_tried_again_with_the_next_incarnation() -> None:
    here = world("prefill.replicas=2", "decode.replicas=2")
    here.step()
    here.workers["prefill-1"].refuses = "it has no room for staging"
    here.order(prefill=1, decode=3)
    here.before_step = lambda: here.order(prefill=2, decode=2)  # the operator takes it back
    here.step(5)
    assert (here.asked, here.sizes()) == ([], (2, 2))
    here.before_step = lambda: None
    here.die("prefill-1")
    here.step(SETTLED_S)
    here.order(prefill=1, decode=3)
    here.step(SETTLED_S)
    assert (here.asked, here.sizes()) == ([("flip", "prefill-1")], (1, 3))


def test_a_plan_is_never_applied_to_a_membership_that_has_changed() -> None:
    """(1) Two workers should drain. (2) The first one is started anew between the poll and the step: the step is refused, and
    so is the rest of the round. (3) The next poll plans anew for the workers that are there then."""
    here = world("prefill.replicas=3")
    here.step()
    here.order(prefill=1)
    asked: list[str] = []

    def started_anew() -> None:
        if not asked:
            here.workers["prefill-2"].incarnation = 1_000
        asked.append("once")

    here.before_step = started_anew
    here.step()
    assert (here.asked, asked) == ([], ["once"])
    here.step(SETTLED_S)
    assert here.sizes() == (1, 1)


def test_an_actuator_that_another_one_replaced_changes_nothing_more() -> None:
    here = world()
    here.step()
    here.mailbox.actuate(scaling_pb2.ActuateRequest(actuator="another"), here.now_s)
    here.order(decode=3)
    here.step(SETTLED_S)
    assert here.asked == []
    (told,) = [event for event in here.events if isinstance(event, ActuatorReplaced)]
    assert "another has term" in told.detail
    assert not here.actuator.hopeless(Role.DECODE, here.now_s)
    while here.member("decode-0").state is not MemberState.GONE:
        here.die("decode-0")
        here.step()
    assert here.actuator.hopeless(Role.DECODE, here.now_s)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ({"prefill": 4}, "prefill: 4 is over prefill.max_replicas (3)"),
        ({"decode": 0}, "decode: 0 is under decode.min_replicas (1)"),
        ({"prefill": 3, "decode": 3}, "prefill 3 and decode 3 together are over autoscaling.max_workers (5)"),
        ({"automatic": True}, ""),
    ],
)
def test_an_order_over_a_limit_is_refused_by_name(order: dict[str, int], says: str) -> None:
    here = world("prefill.max_replicas=3", "autoscaling.max_workers=5")
    here.step()
    number = here.order(**order)  # type: ignore[arg-type]
    here.step(SETTLED_S)
    report = here.state().scaling.report
    assert (report.order, report.refused) == (number, says)
    assert here.asked == []
    assert report.mode == ("automatic" if order.get("automatic") else "fixed")


def test_the_planner_is_refused_where_nothing_limits_the_pools() -> None:
    here = world()
    here.step()
    here.order(automatic=True)
    here.step(2)
    assert "set prefill.max_replicas or autoscaling.max_workers" in here.state().scaling.report.refused


@pytest.mark.quick("True")
@pytest.mark.parametrize("automatic", [False, True])
def test_workers_that_cannot_start_are_tried_again_later_each_time_and_at_once_by_an_order(automatic: bool) -> None:
    """(1) No decode worker can start any more: each tries for a while, and each next one is held back for longer, but never for
    more than an hour. (2) The report says so, and the wanted size stays. (3) An operator's order tries at once."""
    here = world(f"autoscaling.enabled={automatic}", "autoscaling.max_workers=4", "decode.max_restarts_per_hour=2")
    here.step()
    here.cannot_start.add("decode")
    here.die("decode-0")
    starts: list[float] = []
    while len(starts) < 9:
        here.asked.clear()
        here.step()
        if ("start", "decode-0") in here.asked:
            starts.append(here.now_s)
        assert here.now_s < 86_400
    waits = [after - before for before, after in pairwise(starts)]
    assert waits == sorted(waits)
    assert waits[0] >= 2 * FIRST_S
    assert LONGEST_S <= waits[-1] < LONGEST_S + 60
    here.step(60)
    assert here.actuator.hopeless(Role.DECODE, here.now_s)
    assert "No decode worker is started for" in here.state().scaling.report.reasons[0]
    assert here.actuator.wanted.sizes.decode >= 1
    here.cannot_start.clear()
    here.order(prefill=1, decode=2)
    here.step(SETTLED_S)
    assert here.sizes() == (1, 2)
    assert not here.actuator.hopeless(Role.DECODE, here.now_s)


def test_a_worker_that_died_too_often_comes_back_by_itself() -> None:
    here = world("prefill.max_restarts_per_hour=1")
    here.step()
    here.cannot_start.add("prefill")
    here.order(prefill=2)
    here.step(30)
    assert here.sizes() == (1, 1)
    assert history(here)[-1] == "prefill-1 is dead: given up"
    assert any(isinstance(event, PoolsResized) and "prefill-1 is dead" in event.text for event in here.events)
    here.cannot_start.clear()
    here.step(SETTLED_S)
    assert here.sizes() == (2, 1)


def test_workers_that_die_together_are_held_back_as_one() -> None:
    here = world("prefill.replicas=5", "prefill.max_restarts_per_hour=0")
    here.step()
    for n in range(5):
        here.die(f"prefill-{n}")
    here.step(int(FIRST_S) + 10)
    assert here.sizes() == (5, 1)


@pytest.mark.parametrize("router_first", [False, True])
def test_deaths_that_the_router_puts_down_to_one_request_count_once(router_first: bool) -> None:
    """The router may tell of a death before or after the worker's keeper does."""
    here = world("decode.max_restarts_per_hour=2")
    for pid in range(100, 106):
        here.step(8)
        worker = here.member("decode-0")
        assert worker.report is not None, "it was given up"
        worker.report.pid = pid
        tell = [("decode-0", pid)] if pid > 100 else []
        here.poisoned += tell if router_first else []
        here.step(2)
        here.die("decode-0")
        here.poisoned += [] if router_first else tell
    assert here.asked == [("forgive", "decode-0")] * 4 or here.asked == [("forgive", "decode-0")] * 5


def test_a_wrong_setting_of_the_planner_is_named() -> None:
    for setting in ("{downscale_delay: 1}", "{tolerance: much}", "{tolerance: -1}", "{start_s: .inf}"):
        with pytest.raises(ConfigError, match=r"autoscaling\.planner\.\w+"):
            world(f"autoscaling.planner={setting}")


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["die", "router", "lose request", "lose answer", "order", "drain", "flip", "link"]),
        st.integers(0, 9),
        st.integers(1, 6),
    ),
    max_size=12,
)


@settings(max_examples=20, deadline=None)
@given(FAULTS, st.integers(1, 4), st.integers(1, 4))
def test_the_sizes_are_reached_whatever_was_lost_meanwhile(
    faults: list[tuple[str, int, int]], prefill: int, decode: int
) -> None:
    """Faults hit workers, the router and messages; then an order comes: its sizes are reached, and nothing is left over."""
    here = world("prefill.replicas=2", "decode.replicas=2", "decode.max_restarts_per_hour=100")
    here.step()
    for fault, which, seconds in faults:
        _hit(here, fault, which)
        here.step(seconds)
    here.router_up = True
    for worker in here.workers.values():
        worker.linked = True
    here.step(3)
    here.order(prefill=prefill, decode=decode)
    here.step(SETTLED_S)
    assert here.sizes() == (prefill, decode)
    assert all(member.state is MemberState.RUNNING for member in here.members)
    assert {member.worker_id: member.plan.role for member in here.members} == {
        name: worker.role for name, worker in here.workers.items()
    }
    done = list(here.asked)
    here.step(30)
    assert here.asked == done


def _hit(here: World, fault: str, which: int) -> None:
    names = sorted(here.workers)
    worker = here.workers[names[which % len(names)]] if names else None
    if fault == "router":
        here.router_up = not here.router_up
        if not here.router_up:
            here.new_router()
    elif fault.startswith("lose"):
        here.lose = fault.removeprefix("lose ")
    elif fault == "order" and here.mailbox.state(here.now_s) is not None and here.router_up:
        here.order(prefill=1 + which % 3, decode=1 + which // 3)
    elif worker is not None and fault == "die":
        here.die(names[which % len(names)])
    elif worker is not None and fault == "link":
        worker.linked = not worker.linked or worker.draining_s is not None
    elif worker is not None and fault in ("drain", "flip") and worker.draining_s is None and here.sizes()[1] > 1:
        worker.draining_s = 0
        worker.becomes = ("decode" if worker.role == "prefill" else "prefill") if fault == "flip" else ""


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_a_step_whose_answer_was_lost_is_taken_once(lose: str) -> None:
    """The worker that drained by our order is not taken for one that an operator drained, which would shrink the pool again."""
    here = world("prefill.replicas=3")
    here.step()
    here.order(prefill=2)
    here.lose = lose
    here.step(SETTLED_S)
    assert (here.sizes(), len(here.asked)) == ((2, 1), 1)
    assert history(here) == ["prefill 3 -> 2: order 1 of an operator"]


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_a_lost_answer_ends_the_round(lose: str) -> None:
    """What became of the first drain is not known, so the second one waits for the next membership."""
    here = world("prefill.replicas=3")
    here.step()
    here.order(prefill=1)
    here.lose, told = lose, []
    here.before_step = lambda: told.append(here.now_s)
    here.step()
    assert len(told) == 1
    here.step(SETTLED_S)
    assert (here.sizes(), len(here.asked)) == ((1, 1), 2)


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_a_flip_whose_answer_was_lost_is_taken_once(lose: str) -> None:
    here = world("prefill.replicas=2")
    here.step()
    here.order(prefill=1, decode=2)
    here.lose = lose
    here.step(SETTLED_S)
    assert (here.sizes(), here.asked) == ((1, 2), [("flip", "prefill-1")])
    assert history(here) == ["prefill 2 -> 1, decode 1 -> 2: order 1 of an operator"]


def test_a_router_that_restarts_gives_a_new_term_and_counts_orders_anew() -> None:
    here = world()
    here.step()
    assert here.order(prefill=2) == 1
    here.step(SETTLED_S)
    here.new_router()
    here.step(2)
    assert here.order(prefill=1) == 1  # the number that was taken already, of another router
    here.step(SETTLED_S)
    assert here.sizes() == (1, 1)


def test_with_the_planner_a_worker_that_an_operator_drained_is_replaced_and_a_stranger_counts() -> None:
    here = world("prefill.replicas=2", "autoscaling.enabled=true", "autoscaling.max_workers=3")
    here.step()
    here.workers["prefill-0"].draining_s = 0
    here.step(SETTLED_S)
    assert here.sizes() == (2, 1)
    here.workers["stranger"] = Worker("prefill", 9_999)
    here.die("prefill-1")
    here.members.remove(here.member("prefill-1"))
    here.step(SETTLED_S)
    assert (here.asked, here.sizes()) == ([("start", "prefill-0")], (2, 1))


def test_the_planner_begins_with_the_sizes_that_an_operator_ordered_within_one_interval() -> None:
    """(1) The planner decides. (2) An operator orders sizes, and lets it decide again before its next turn. (3) Nothing calls
    for other sizes, so those of the order stay."""
    here = world("prefill.replicas=2", "autoscaling.enabled=true", "autoscaling.max_workers=3")
    here.step(21)
    here.order(prefill=1, decode=2)
    here.step(5)
    here.order(automatic=True)
    here.step(60)
    assert (here.sizes(), here.asked) == ((1, 2), [("flip", "prefill-1")])
    assert history(here)[-1] == "order 2: the planner decides the sizes"


def test_a_worker_whose_link_breaks_for_a_while_is_not_replaced() -> None:
    here = world()
    here.step()
    here.workers["prefill-0"].linked = False
    here.step(SETTLED_S)
    here.workers["prefill-0"].linked = True
    here.step(SETTLED_S)
    assert (here.asked, here.sizes()) == ([], (1, 1))


def test_what_was_asked_of_an_incarnation_says_nothing_of_the_next_one() -> None:
    """(1) A worker drains by an order, and dies meanwhile. (2) It is wanted again, and comes back. (3) An operator drains it:
    the pool becomes smaller, as it would without the earlier order."""
    here = world("prefill.replicas=2")
    here.step()
    here.order(prefill=1)
    here.step()
    assert here.asked == [("drain", "prefill-1")]
    here.die("prefill-1")
    here.order(prefill=2)
    here.step(SETTLED_S)
    here.workers["prefill-1"].draining_s = 0
    here.step(SETTLED_S)
    assert (here.asked, here.sizes()) == ([("drain", "prefill-1")], (1, 1))
    assert history(here)[-1] == "prefill 2 -> 1: prefill-1 was drained"


def test_the_next_actuator_keeps_what_operators_left_and_follows_no_order_twice() -> None:
    """(1) An operator orders three decode workers and drains one; another dies for good, which nobody wanted. (2) The next
    actuator of the same router begins with what was ordered: it starts the dead one again, and no more."""
    here = world("prefill.max_restarts_per_hour=0", "prefill.replicas=2")
    assert here.actuator.wanted.ordered is None
    here.step()
    here.order(decode=3)
    here.step(SETTLED_S)
    here.workers["decode-2"].draining_s = 0
    here.step(SETTLED_S)
    here.die("prefill-1")
    here.step()
    assert here.actuator.wanted.ordered == PoolSizes(2, 2)
    ordered, here.asked, here.term = here.actuator.wanted.ordered, [], 0
    here.actuator = Actuator(here.blueprint, here, here, here._listen)
    assert ordered is not None
    here.actuator.wanted.keep(ordered)
    here.step(SETTLED_S)
    assert (here.asked, here.sizes()) == ([("start", "prefill-1")], (2, 2))
    assert here.state().scaling.report.reasons == ["An operator ordered the sizes before this `pdserve up` came."]
    here.order(automatic=True)
    here.step()
    assert here.actuator.wanted.ordered == PoolSizes(2, 2), "refused, since nothing limits the pools"
