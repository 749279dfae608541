"""The shell around the core: what operators see of it, and that books which disagree stop nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator
from typing import NoReturn

import pytest

from pdserve.config import RouterConfig
from pdserve.core.errors import InvalidRequest, Overloaded, PdserveError
from pdserve.core.ids import Incarnation, RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.slo import DEFAULT_CLASS
from pdserve.core.worker import Role
from pdserve.rpc.v1 import link_pb2
from router.api.request import GenerateInput
from router.core import events as ev
from router.core.queue_limits import RETRY_AFTER_UNKNOWN_S, QueueLimits
from router.grpc.cluster_state import cluster_state_to_wire
from router.service import service
from testkit.fake_worker import DECODE, PREFILL

from ..core_peers import hello
from ..local_cluster import local_cluster, right_ids, tiny_model


def test_books_that_disagree_are_logged_and_counted_and_stop_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "CHECK_TICKS", 1)

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            await cluster.generate((1, 2), 3)
            counts = "pdserve_router_invariant_failures_total"
            assert f"{counts} 0.0" in cluster.service.metrics().decode()
            cluster.service._core.ledger._charged[ev.LinkId(9)] = 1
            await cluster.decode.wait_for(lambda: f"{counts} 0.0" not in cluster.service.metrics().decode())
            assert (await cluster.generate((1, 2), 3)).ids == right_ids((1, 2), 3)

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert "books of the core disagree" in caplog.text


def test_the_state_names_who_drains_who_is_not_ready_and_which_pairs_rest() -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster((PREFILL, DECODE)) as cluster:
            core = cluster.service._core
            workers = {w.hello.worker_id: w for w in core.registry}
            prefill, decode = workers["prefill-0"].hello, workers["decode-0"].hello  # type: ignore[index]
            core.pairs.failed(prefill, decode, "no route", now_s=cluster.service._clock())
            core.pairs.never(prefill, hello("decode-1", Role.DECODE, incarnation=Incarnation(7)), "other layout")
            cluster.service.drain("decode-0", force=True)
            assert not cluster.service.ready
            state = cluster_state_to_wire(cluster.service.snapshot(), 16)
            assert [(w.hello.worker_id, w.ready, w.draining, w.not_ready_reason) for w in state.workers] == [
                ("prefill-0", True, False, ""),
                ("decode-0", False, True, "draining"),
            ]
            first, second = state.set_aside_pairs
            assert (first.prefill_worker, first.decode_worker, first.reason, first.failures) == (
                "prefill-0",
                "decode-0",
                "no route",
                1,
            )
            assert 0 < first.remaining_s <= 5
            assert math.isinf(second.remaining_s)
            text = cluster.service.metrics().decode()
            assert "pdserve_pairs_set_aside 2.0" in text
            assert 'pdserve_worker_draining{role="decode",worker="decode-0"} 1.0' in text

    asyncio.run(story())


def test_the_demand_is_told_with_refusals_of_the_service_and_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            await cluster.generate((1, 2), 3)
            await cluster.generate((1, 2, 3), 4)

            async def full(prompt: object, client: object, **_: bool) -> tuple[int, ...]:
                raise Overloaded("too many long prompts", retry_after_s=1.0)

            monkeypatch.setattr(cluster.service._encoder, "encode", full)
            with pytest.raises(Exception, match="too many long prompts"):
                await cluster.generate((1, 2), 3)
            demand = cluster_state_to_wire(cluster.service.snapshot(), 16).demand
            told = (demand.requests, demand.prompt_tokens, demand.output_tokens, demand.refused, demand.queued_prompt_tokens)
            assert told == (2, 5, 7, 1, 0)
            assert [(one.slo_class, one.refused) for one in demand.classes] == [("default", 1)], "it named no class"
            assert demand.uptime_s > 0

    asyncio.run(story())


@pytest.mark.parametrize("sampling", [{"temperature": 3.0}, {"top_p": 1.5}, {"max_tokens": 0}])
def test_a_value_beyond_its_limit_costs_no_tokenising(monkeypatch: pytest.MonkeyPatch, sampling: dict[str, float]) -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:

            async def never(prompt: object, client: object, **_: bool) -> tuple[int, ...]:
                raise AssertionError("the prompt was tokenised")

            monkeypatch.setattr(cluster.service._encoder, "encode", never)
            (name,) = sampling
            with pytest.raises(InvalidRequest, match=f"^{name}: "):
                await cluster.service.submit(GenerateInput(prompt="a long prompt " * 1000, sampling=sampling))

    asyncio.run(story())


def test_a_heartbeat_that_says_draining_takes_the_worker_out() -> None:
    """SIGTERM at the worker: the router hears of it by the heartbeat alone."""

    async def story() -> None:
        settings = {"heartbeat_interval_s": 0.05}
        async with asyncio.timeout(60), local_cluster((DECODE, DECODE), worker=lambda: settings) as cluster:
            leaving = cluster.workers[0]
            leaving.draining = True
            await leaving.wait_for(lambda: any(w.draining for w in cluster.service.snapshot().workers))
            answers = [await cluster.generate((1, n), 3) for n in range(4)]
            assert {a.report.decode_worker for a in answers} == {cluster.workers[1].worker_id}
            assert {a.report.attempts for a in answers} == {1}
            await cluster.assert_idle()

    asyncio.run(story())


def test_the_retry_hint_forgets_how_fast_things_went_long_ago() -> None:
    """64 requests over a slow day say nothing about a burst: the hint is then the default, not half a minute."""

    limits = QueueLimits(max_requests=0, max_tokens=1)
    for n in range(64):
        limits.saw_finish(n * 600.0)
    with pytest.raises(Overloaded) as caught:
        limits.make_room(DEFAULT_CLASS, 1, now_s=64 * 600.0)
    assert caught.value.retry_after_s == RETRY_AFTER_UNKNOWN_S


@pytest.mark.parametrize("turns", range(6))
def test_closing_is_not_lost_when_a_request_has_just_come(turns: int) -> None:
    """A cancelled ticker that had just been woken went on for ever, and closing waited for it."""

    async def story() -> None:
        made = service.RouterService(RouterConfig(), tiny_model())
        made.start()
        for _ in range(5):
            await asyncio.sleep(0)
        made._busy.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await made.close()

    asyncio.run(story())


class RecordedLinks:
    """Links that keep what was said, for a service without sockets."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, link_id: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        self.sent.append(message.WhichOneof("body") or "")

    def hang_up(self, link_id: ev.LinkId, error: PdserveError) -> None:
        self.sent.append("hang up")

    def take_alive(self) -> tuple[ev.LinkId, ...]:
        return ()


def submit(name: str) -> ev.Submit:
    spec = RequestSpec((1, 2, 3), SamplingParams(max_tokens=3))
    return ev.Submit(RequestId(name), spec, arrived_s=0.0, deadline_s=math.inf)


def broken(*_: object, **__: object) -> NoReturn:
    raise ValueError("the bug")


@contextlib.contextmanager
def served() -> Iterator[tuple[service.RouterService, RecordedLinks]]:
    """A service with one decode worker on link 1."""
    links = RecordedLinks()
    made = service.RouterService(RouterConfig(probe_workers=False), tiny_model(), links=links)
    made.tell(ev.WorkerJoined(ev.LinkId(1), hello("d", Role.DECODE, model_fingerprint=tiny_model().card.fingerprint)))
    yield made, links
    made._core.check_invariants()
    assert made._core.num_requests == 0
    assert not made._live


def test_a_bug_on_a_workers_event_is_raised_after_its_effects_were_performed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails and is cancelled at its worker; then the link learns of the bug, and the next event of nothing."""
    with served() as (made, links):
        generation = made._start(submit("r"))
        handle = made._core.requests.get(RequestId("r")).decode.handle  # type: ignore[union-attr]
        monkeypatch.setattr(made._core.requests.demand, "placed", broken)
        with pytest.raises(ValueError, match="the bug"):
            made.tell(ev.Reserved(ev.LinkId(1), handle))
        assert links.sent == ["welcome", "bind", "cancel"]
        assert "the bug" in str(generation._error)
        made.tell(ev.Tick())
        assert links.sent == ["welcome", "bind", "cancel"]


@pytest.mark.parametrize("part", ["_placer.place", "bind", "admit"])
def test_a_bug_on_a_submit_is_raised_and_leaves_no_request(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    with served() as (made, links):
        owner = made._core._dispatcher
        *path, name = part.split(".")
        for attribute in path:
            owner = getattr(owner, attribute)
        monkeypatch.setattr(owner, name, broken)
        with pytest.raises(ValueError, match="the bug"):
            made._start(submit("r"))
        monkeypatch.undo()
        assert links.sent == ["welcome"]


def test_a_bug_on_a_tick_does_not_end_the_ticks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with served() as (made, _):
        monkeypatch.setattr(made._core._dispatcher, "pump", broken)
        made._tick()
        assert "failed on a tick" in caplog.text
        monkeypatch.undo()
        made._tick()
