"""The mailbox between operators and the actuator: one actuator at a time, and nothing grows without a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.client import AdminClient, CallFailed
from pdserve.core.errors import InvalidRequest, StaleOrder, Unavailable
from pdserve.rpc.v1 import common_pb2, scaling_pb2
from router.grpc.admin import AdminServer
from router.grpc.scaling import ACTUATOR_LOST_S, HISTORY, MOST_EVENTS, ScalingMailbox

from .local_cluster import TOKEN, local_cluster

FIRST = 40


def poll(term: int = 0, actuator: str = "up", **report: object) -> scaling_pb2.ActuateRequest:
    return scaling_pb2.ActuateRequest(actuator=actuator, term=term, report=scaling_pb2.ScalingReport(mode="fixed", **report))  # type: ignore[arg-type]


def event(text: str = "prefill 1 -> 2", age_s: float = 0.0) -> scaling_pb2.ScalingEvent:
    return scaling_pb2.ScalingEvent(text=text, age_s=age_s, prefill=2, decode=1)


def test_a_newer_actuator_ends_the_term_of_the_older_one() -> None:
    mailbox = ScalingMailbox(FIRST)
    first = mailbox.actuate(poll(actuator="old"), 0.0).term
    assert mailbox.actuate(poll(first, actuator="old"), 1.0).term == first
    second = mailbox.actuate(poll(actuator="new"), 2.0).term
    assert second != first
    for ask in (lambda: mailbox.actuate(poll(first, actuator="old"), 3.0), lambda: mailbox.check_term(first)):
        with pytest.raises(StaleOrder, match=f"term {first} is not the present one: new has term {second}"):
            ask()
    mailbox.check_term(second)
    mailbox.check_term(0)  # an operator has no term
    state = mailbox.state(3.0)
    assert state is not None
    assert (state.actuator, state.age_s) == ("new", 1.0)


def test_a_term_of_another_router_is_refused_before_one_has_begun_here() -> None:
    with pytest.raises(StaleOrder, match="no term has begun here"):
        ScalingMailbox(FIRST).actuate(poll(7), 0.0)


def test_an_order_reaches_the_actuator_until_a_newer_one_replaces_it() -> None:
    mailbox = ScalingMailbox(FIRST)
    term = mailbox.actuate(poll(), 0.0).term
    assert not mailbox.actuate(poll(term), 1.0).HasField("order")
    assert mailbox.scale(scaling_pb2.ScaleRequest(prefill=3), 1.0) == 1
    assert mailbox.scale(scaling_pb2.ScaleRequest(automatic=True), 1.0) == 2
    for _ in range(2):
        order = mailbox.actuate(poll(term), 2.0).order
        assert (order.number, order.sizes.automatic) == (2, True)


def test_the_next_actuator_gets_only_an_order_that_the_one_before_has_not_taken() -> None:
    """(1) An order is left, and its actuator ends: the next one gets it. (2) That one took it: none after it gets it again."""
    mailbox = ScalingMailbox(FIRST)
    mailbox.actuate(poll(), 0.0)
    mailbox.scale(scaling_pb2.ScaleRequest(decode=3), 1.0)
    answer = mailbox.actuate(poll(), 2.0)
    assert answer.order.number == 1
    mailbox.actuate(poll(answer.term, order=1), 3.0)
    for at_s in (4.0, 5.0):
        third = mailbox.actuate(poll(), at_s)
        assert not third.HasField("order")
    assert mailbox.scale(scaling_pb2.ScaleRequest(decode=2), 6.0) == 2
    assert mailbox.actuate(poll(third.term), 7.0).order.number == 2


def test_an_order_without_an_actuator_is_refused_rather_than_kept_in_silence() -> None:
    mailbox, order = ScalingMailbox(FIRST), scaling_pb2.ScaleRequest(decode=2)
    with pytest.raises(Unavailable, match="no actuator has polled this router since its start"):
        mailbox.scale(order, 0.0)
    mailbox.actuate(poll(), 0.0)
    assert mailbox.scale(order, ACTUATOR_LOST_S) == 1
    with pytest.raises(Unavailable, match="no actuator has polled this router for 11 s"):
        mailbox.scale(order, ACTUATOR_LOST_S + 1)


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (scaling_pb2.ScaleRequest(), "prefill"),
        (scaling_pb2.ScaleRequest(automatic=True, decode=1), "automatic"),
        (scaling_pb2.ScaleRequest(decode=4_000_000_000), "decode"),
    ],
)
def test_an_order_that_means_nothing_is_refused_by_field(order: scaling_pb2.ScaleRequest, field: str) -> None:
    mailbox = ScalingMailbox(FIRST)
    mailbox.actuate(poll(), 0.0)
    with pytest.raises(InvalidRequest) as caught:
        mailbox.scale(order, 0.0)
    assert caught.value.field == field


def need(**numbers: float) -> scaling_pb2.ScalingPlan:
    return scaling_pb2.ScalingPlan(pools=[scaling_pb2.PoolNeed(role=common_pb2.ROLE_DECODE, **numbers)])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (poll(actuator="x" * 201), "actuator"),
        (poll(actuator="\x1b[2J"), "actuator"),
        (scaling_pb2.ActuateRequest(report=scaling_pb2.ScalingReport(mode="other")), "report.mode"),
        (poll(prefill=2_000_000), "report.prefill"),
        (poll(events=[event()] * (MOST_EVENTS + 1)), "report.events"),
        (poll(events=[event(age_s=float("nan"))]), "report.events.age_s"),
        (poll(events=[event(age_s=-1.0)]), "report.events.age_s"),
        (poll(events=[event(age_s=1e300)]), "report.events.age_s"),
        (poll(events=[event("x" * 1001)]), "report.events.text"),
        (poll(members=[scaling_pb2.ScalingMember()] * 1025), "report.members"),
        (poll(members=[scaling_pb2.ScalingMember(detail="x" * 1001)]), "report.members.detail"),
        (poll(members=[scaling_pb2.ScalingMember(role=77)]), "report.members.role"),  # type: ignore[arg-type]
        (poll(plan=scaling_pb2.ScalingPlan(pools=[scaling_pb2.PoolNeed(role=77)])), "report.plan.pools.role"),  # type: ignore[arg-type]
        (poll(reasons=["x"] * 33), "report.reasons"),
        (poll(refused="x" * 1001), "report.refused"),
        (poll(plan=need(raw_workers=float("inf"))), "report.plan.pools.raw_workers"),
    ],
)
def test_a_hostile_report_changes_nothing(request_: scaling_pb2.ActuateRequest, field: str) -> None:
    mailbox = ScalingMailbox(FIRST)
    with pytest.raises(InvalidRequest) as caught:
        mailbox.actuate(request_, 0.0)
    assert caught.value.field == field
    assert mailbox.state(0.0) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, MOST_EVENTS), max_size=20))
def test_the_history_is_bounded_and_keeps_the_newest(counts: list[int]) -> None:
    mailbox, told = ScalingMailbox(FIRST), 0
    term = mailbox.actuate(poll(), 0.0).term
    for at_s, count in enumerate(counts):
        mailbox.actuate(poll(term, events=[event(str(told + index)) for index in range(count)]), float(at_s))
        told += count
    state = mailbox.state(100.0)
    assert state is not None
    assert [each.text for each in state.history] == [str(index) for index in range(max(0, told - HISTORY), told)]
    assert not state.report.events
    assert all(each.age_s >= 80.0 for each in state.history)


def test_a_drain_of_an_ended_term_or_of_an_earlier_incarnation_is_refused() -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            server = AdminServer(cluster.service, TOKEN, 32)
            await server.start("127.0.0.1", 0)
            try:
                await asyncio.to_thread(_fence, f"127.0.0.1:{server.port}")
                assert not any(worker.draining for worker in cluster.service.snapshot().workers)
            finally:
                await server.close()

    asyncio.run(story())


def _fence(address: str) -> None:
    with AdminClient(address) as client:
        old, new = (client.actuate(scaling_pb2.ActuateRequest(actuator=name)).term for name in ("old", "new"))
        asks: list[Callable[[], object]] = [
            lambda: next(iter(client.drain("decode-0", term=old))),
            lambda: next(iter(client.drain("decode-0", term=new, incarnation=12_345))),
            lambda: client.actuate(scaling_pb2.ActuateRequest(actuator="old", term=old)),
        ]
        for ask in asks:
            with pytest.raises(CallFailed) as caught:
                ask()
            assert (caught.value.status, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "stale_order")
        assert client.scale(scaling_pb2.ScaleRequest(decode=2)) == 1
        assert client.cluster_state().scaling.actuator == "new"
