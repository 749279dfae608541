"""What clients may ask for is bounded by settings, and what counts as one client follows them. Errors name field and limit."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import RouterConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import Placement
from router.api.identity import ClientNames
from router.api.request import GenerateInput
from router.openai.request import parse_chat, parse_completion
from router.openai.responses.request import parse_responses

from .test_request_fields import MODEL_LEN, admit

RESERVED: dict[str, dict[str, Any]] = {"voice": {"client": False}, "slow": {"max_deadline_s": 7.0}}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            {"options": {"priority": 1}},
            "^priority: asks for a head start of 1 levels; at most 0 are .*router.max_client_priority",
        ),
        (
            {"slo_class": "voice"},
            "^slo_class: 'voice' is not a class here that clients may name .*; default, code, chat, batch",
        ),
        ({"slo_class": "slow", "deadline_s": 8.0}, "^deadline_s: must be at most 7 for class 'slow', got 8"),
        ({"deadline_s": 4000.0}, "^deadline_s: must be at most 3600, got 4000"),
        ({"placement": Placement.COLOCATED}, "^placement: colocated is allowed for prompts of at most 1 tokens .* has 2"),
    ],
)
def test_what_a_client_asks_for_is_bounded_by_default(asked: dict[str, object], says: str) -> None:
    config = RouterConfig(slo_classes=RESERVED, max_client_colocated_tokens=1)
    with pytest.raises(InvalidRequest, match=says):
        admit(GenerateInput("x", **asked), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({"options": {"priority": -100}}, {}),
        ({"options": {"priority": 5}}, {"max_client_priority": 5}),
        ({}, {"default_class": "voice"}),
        ({"slo_class": "slow", "deadline_s": 7.0}, {}),
        ({"slo_class": "slow"}, {}),
        ({"placement": Placement.COLOCATED}, {}),
        ({"placement": Placement.COLOCATED}, {"max_client_colocated_tokens": 2}),
        ({"placement": Placement.COLOCATED}, {"max_client_colocated_tokens": None}),
        ({"placement": Placement.COLOCATED}, {"max_client_colocated_tokens": 0, "placement": "colocated"}),
        ({"placement": Placement.DISAGGREGATED}, {"max_client_colocated_tokens": 0}),
    ],
)
def test_what_the_settings_grant_is_allowed(asked: dict[str, object], settings: dict[str, object]) -> None:
    admitted = admit(GenerateInput("x", **asked), RouterConfig(slo_classes=RESERVED, **settings))  # type: ignore[arg-type]
    assert admitted.deadline_s <= (7.0 if admitted.slo.name == "slow" else 600.0)


def test_the_default_limit_of_colocated_prompts_is_that_of_the_setting() -> None:
    assert RouterConfig().max_client_colocated_tokens > MODEL_LEN  # type: ignore[operator]


# Names ----------------------------------------------------------------------------------------------------------------


def named(key: str, *peers: tuple[str, str, str | None]) -> list[tuple[str, str, str]]:
    names = ClientNames(key, bytes(32))
    return [names.of(*peer) for peer in peers]


def test_calls_have_names_of_their_own() -> None:
    first, second = named("address", ("10.0.0.1", "a", None), ("10.0.0.1", "a", None))
    assert first[:2] == second[:2]
    assert first[2] != second[2]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_an_address_is_one_client_and_of_ipv6_a_network_is(one: str, other: str, same: bool) -> None:
    first, second = named("address", (one, "a", "key"), (other, "b", "other key"))
    assert (first[0] == second[0]) is same
    assert first[1] != second[1]


@pytest.mark.parametrize("key", ["api_key", "header:X-Tenant"])
def test_a_header_tells_clients_apart_and_who_sends_none_is_told_by_the_address(key: str) -> None:
    mine, again, other, none, empty = named(
        key, ("h", "a", "k"), ("i", "b", "k"), ("h", "a", "l"), ("h", "a", None), ("h", "b", "")
    )
    assert mine[:2] == again[:2]
    assert len({mine[0], other[0], none[0]}) == 3
    assert none[0] == empty[0]
    assert none[1] != empty[1]


@pytest.mark.parametrize("shown", ["bearer k", "BEARER k", "Bearer  k", " Bearer k "])
def test_an_api_key_is_one_client_however_it_is_written(shown: str) -> None:
    first, second, other = named("api_key", ("h", "a", "Bearer k"), ("h", "a", shown), ("h", "a", "Bearer K"))
    assert first[0] == second[0] != other[0]


def test_a_connection_may_be_one_client() -> None:
    first, second = named("connection", ("h", "a", "k"), ("h", "b", "k"))
    assert first[0] != second[0]


def test_names_tell_neither_addresses_nor_keys() -> None:
    for name in [
        *named("api_key", ("10.0.0.1", "10.0.0.1 77", "Bearer secret"))[0],
        *ClientNames("address", b"k").of("h", "c", None),
    ]:
        assert name == "" or set(name) <= set("0123456789abcdef")
    assert ClientNames("address", b"k").of("h", "c", None)[0] != ClientNames("address", b"l").of("h", "c", None)[0]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:77", "10.0.0.1"),
        ("ipv6:[2001:db8::1]:77", "2001:db8::1"),
        ("ipv6:%5B2001:db8::1%5D:77", "2001:db8::1"),
        ("unix:/run/router.sock", "unix:/run/router.sock"),
    ],
)
def test_a_client_is_the_same_over_grpc_and_http(peer: str, address: str) -> None:
    names = ClientNames("address", b"k")
    assert names.of_peer(peer, None)[0] == names.of(address, "c", None)[0]


@pytest.mark.parametrize("endpoint", ["completions", "chat", "responses"])
def test_all_requests_of_a_call_have_its_client(endpoint: str) -> None:
    bodies = {
        "completions": (parse_completion, b'{"prompt": ["a", "b"], "max_tokens": 1}'),
        "chat": (parse_chat, b'{"messages": [{"role": "user", "content": "x"}]}'),
        "responses": (parse_responses, b'{"input": "x"}'),
    }
    parse, body = bodies[endpoint]
    call = parse(body, None).of_client(("a", "b", "c"))  # type: ignore[operator]
    inputs = (call.call if endpoint == "responses" else call).inputs
    assert {one.client for one in inputs} == {("a", "b", "c")}
