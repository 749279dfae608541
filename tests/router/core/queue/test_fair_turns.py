"""Turns between clients are fair, whatever clients send: the bound of start-time fair queueing, over the production queue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.slo import BUILT_IN, DEFAULT_CLASS, SloClass
from router.core import events as ev
from router.core.live_request import LiveRequest
from router.core.turns import KEPT_IDLE, Flow, Flows
from router.core.waiting import Branch, Kind, WaitingRequests, size_of

BATCH = SloClass("batch", priority=-1)


def kind_of(request: LiveRequest) -> Kind:
    return Kind(64, 64, Placement.AUTO, False, size_of(len(request.spec.prompt_ids)))


class Queue:
    """The production queue and a worker with one slot, which takes whatever is first."""

    def __init__(self) -> None:
        self.waiting = WaitingRequests(kind_of)
        self.now_s = 0.0
        self.longer: dict[tuple[str, ...], int] = {}  # the tokens by which outputs of a client are longer than expected
        self._numbers = count()

    def come(
        self, *client: str, tokens: int = 1, priority: int = 0, slo: SloClass = DEFAULT_CLASS, arrived_s: float | None = None
    ) -> LiveRequest:
        number = next(self._numbers)
        spec = RequestSpec((0,) * tokens, SamplingParams(max_tokens=1), priority=priority + slo.priority)
        arrived_s = self.now_s if arrived_s is None else arrived_s
        submit = ev.Submit(RequestId(f"r{number}"), spec, arrived_s, arrived_s + 600, slo=slo, client=client)
        request = LiveRequest.of(submit, number)
        self.waiting.add(request)
        return request

    def serve(self) -> LiveRequest:
        """Serve the first request. Each takes a second."""
        first = self.waiting.walk(self.waiting.kinds()).next()
        assert first is not None, "somebody waits, and nobody is served"
        self.waiting.serve(first.request, len(first.request.spec.prompt_ids), self.now_s)
        self.waiting.remove(first.request)
        self.waiting.settle(first.request, len(first.request.spec.prompt_ids) + self.longer.get(first.request.client, 0))
        self.waiting.check_invariants()
        self.now_s += 1.0
        return first.request


CLIENTS = "abcd"
SENT = st.tuples(st.sampled_from(CLIENTS), st.integers(1, 40))
TURNS = st.lists(st.one_of(SENT, st.none()), min_size=1, max_size=120)
"""What comes, with its tokens. None: a slot is free."""


def most_unfair(turns: list[tuple[str, int] | None]) -> float:
    """Return by how many tokens the service of two clients differed most while both waited, divided by the bound."""
    queue = Queue()
    waiting = dict.fromkeys(CLIENTS, 0)
    served = dict.fromkeys(CLIENTS, 0)
    largest = max([one[1] for one in turns if one is not None], default=1)
    since: dict[tuple[str, str], tuple[int, int]] = {}  # what both had been served when both began to wait
    worst = 0.0
    for turn in turns:
        if turn is not None:
            client, tokens = turn
            queue.come(client, tokens=tokens)
            waiting[client] += 1
        elif any(waiting.values()):
            request = queue.serve()
            (client,) = request.client
            waiting[client] -= 1
            served[client] += len(request.spec.prompt_ids)
        pairs = [(a, b) for a in CLIENTS for b in CLIENTS if a < b and waiting[a] and waiting[b]]
        since = {pair: since.get(pair, (served[pair[0]], served[pair[1]])) for pair in pairs}
        for (a, b), (had_a, had_b) in since.items():
            worst = max(worst, abs((served[a] - had_a) - (served[b] - had_b)) / (2 * largest))
    return worst


@settings(max_examples=150, deadline=None)
@given(TURNS)
def test_two_clients_that_both_wait_are_served_equally_but_for_two_requests(turns: list[tuple[str, int] | None]) -> None:
    assert most_unfair(turns) <= 1.0


# Mutants that the property finds ---------------------------------------------------------------------------------------


def arrivals_alone(patch: pytest.MonkeyPatch) -> None:
    """All stand in one flow, in the order of their arrivals."""
    patch.setattr("router.core.waiting.path_of", lambda request, line: ("", "", ""))


def no_weights(patch: pytest.MonkeyPatch) -> None:
    real = Flows.serve
    patch.setattr(Flows, "serve", lambda self, path, tokens, now_s: real(self, path, 1, now_s))


def a_client_is_forgotten_while_it_waits(patch: pytest.MonkeyPatch) -> None:
    real = Flows.serve

    def serve(self: Flows, path: tuple[str, ...], tokens: float, now_s: float) -> None:
        real(self, path, tokens, now_s)
        self.root.below[path[0]].tag = self.root.virtual = 0.0

    patch.setattr(Flows, "serve", serve)


def virtual_time_goes_back(patch: pytest.MonkeyPatch) -> None:
    real = Flows.join

    def join(self: Flows, path: tuple[str, ...], request_id: RequestId) -> list[Flow]:
        self.root.virtual = 0.0
        return real(self, path, request_id)

    patch.setattr(Flows, "join", join)


def old_places_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Branch, "_first_below", lambda self: next(iter(self._below.values())))


FOUND_BY: dict[Callable[[pytest.MonkeyPatch], None], list[tuple[str, int] | None]] = {
    arrivals_alone: [*[("a", 10)] * 9, ("b", 10), *[None] * 8],
    no_weights: [*[("a", 40)] * 9, *[("b", 1)] * 9, *[None] * 12],
    a_client_is_forgotten_while_it_waits: [*[("a", 40)] * 9, *[("b", 1)] * 9, *[None] * 12],
    virtual_time_goes_back: [*[("a", 10)] * 19, *[None] * 9, *[("b", 10)] * 9, *[None] * 9],
    old_places_are_believed: [*[("a", 10)] * 9, *[("b", 10)] * 9, *[None] * 8],
}


@pytest.mark.parametrize("mutant", FOUND_BY)
def test_the_bound_finds(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_unfair(FOUND_BY[mutant]) <= 1.0
    mutant(monkeypatch)
    assert most_unfair(FOUND_BY[mutant]) > 1.0


# What follows for clients ----------------------------------------------------------------------------------------------


def served_until(queue: Queue, request: LiveRequest) -> int:
    """Return how many requests are served before one."""
    return next(n for n in count() if queue.serve() is request)


@pytest.mark.parametrize(
    ("burst", "light"),
    [
        (("a", "1", "1"), ("b", "2", "2")),
        (("a", "1", "1"), ("a", "2", "2")),
        (("a", "1", "1"), ("a", "1", "2")),
    ],
    ids=["client", "connection", "call"],
)
@pytest.mark.parametrize("warm", [0, 20])
def test_a_light_request_waits_for_one_request_of_a_burst(burst: tuple[str, ...], light: tuple[str, ...], warm: int) -> None:
    queue = Queue()
    for _ in range(250):
        queue.come(*burst, tokens=30)
    for _ in range(warm):
        queue.serve()
    assert served_until(queue, queue.come(*light, tokens=5)) <= 1


def test_neither_many_calls_nor_many_connections_of_one_client_get_more_than_another_client() -> None:
    queue = Queue()
    for i in range(250):
        queue.come("a", f"connection {i % 8}", f"call {i}", tokens=30)
    mine = [queue.come("b", "one", "call", tokens=30) for _ in range(20)]
    served = [queue.serve() for _ in range(40)]
    assert all(request in served for request in mine)


def test_a_burst_of_a_lower_class_does_not_age_as_a_whole() -> None:
    """Else 250 old requests of a class that may wait would all stand before a new one of another class."""
    queue = Queue()
    for _ in range(250):
        queue.come("a", slo=BATCH)
    queue.now_s = 60.0
    assert queue.serve().slo is BATCH
    assert served_until(queue, queue.come("b")) == 0


def test_a_class_that_clients_may_name_is_no_head_start_unless_a_setting_makes_it_urgent() -> None:
    for slo in (BUILT_IN["voice"], BUILT_IN["code"], BUILT_IN["chat"]):
        for urgent in (False, True):
            queue = Queue()
            first = queue.come("a")
            queue.now_s = 0.1
            queue.come("b", slo=dataclasses.replace(slo, urgent=urgent))
            assert (queue.serve() is first) is not urgent


def test_a_lower_class_is_served_in_the_end() -> None:
    queue = Queue()
    low = queue.come("a", slo=BATCH)
    served = []
    while low not in served:
        queue.come("b", arrived_s=queue.now_s)
        served.append(queue.serve())
    assert len(served) <= 5


def test_clients_that_come_once_each_do_not_keep_a_busy_one_from_its_turn() -> None:
    queue = Queue()
    mine = [queue.come("a", tokens=10) for _ in range(5)]
    served = []
    for i in range(60):
        queue.come(f"once {i}", tokens=10)
        queue.come(f"once again {i}", tokens=10) if i < 8 else None
        served.append(queue.serve())
    assert all(request in served for request in mine)


def test_a_lowered_priority_orders_the_own_call_alone() -> None:
    """A client with many priorities would otherwise stand in many lines, each with a share of its own."""
    queue = Queue()
    for level in range(100):
        queue.come("a", "1", "1", priority=-level)
    queue.now_s = 600.0
    assert served_until(queue, queue.come("b")) <= 1
    lowered, plain = queue.come("c", "1", "1", priority=-5), queue.come("c", "1", "1")
    served = [queue.serve() for _ in range(8)]
    assert served.index(plain) < served.index(lowered)


def test_outputs_that_are_longer_than_expected_are_paid_when_they_end() -> None:
    queue = Queue()
    queue.longer["a",] = 90
    for _ in range(40):
        queue.come("a", tokens=10)
        queue.come("b", tokens=10)
    served = [queue.serve().client[0] for _ in range(33)]
    assert 2 <= served.count("a") <= 5


def test_a_client_that_is_not_known_is_served_in_the_order_of_its_turns() -> None:
    queue = Queue()
    requests = [queue.come(priority=p, tokens=1 + 7 * p) for p in (0, 1, 0, 2)]
    assert [requests.index(queue.serve()) for _ in requests] == [3, 1, 0, 2]


@pytest.mark.parametrize("shape", ["clients", "connections", "calls", "calls of many connections"])
@pytest.mark.parametrize("served", [True, False])
def test_flows_that_do_not_wait_are_forgotten(shape: str, served: bool) -> None:
    """A name of a call never comes again, and a proxy has a thousand connections."""
    flows = Flows()
    for i in range(5 * KEPT_IDLE):
        path = {
            "clients": (f"client {i}", "", ""),
            "connections": ("a", f"connection {i}", f"call {i}"),
            "calls": ("a", "b", f"call {i}"),
            "calls of many connections": ("a", f"connection {i % 50}", f"call {i}"),
        }[shape]
        flows.join(path, RequestId(str(i)))
        flows.leave(path, RequestId(str(i)))
        if served:
            flows.serve(path, 1, 0.0)
        assert flows._known <= 2 * KEPT_IDLE + 3
    flows.check_invariants()
