"""Each field of a request is named once, in its dataclass. These tests fail when a part does not know a field."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import RouterConfig
from pdserve.core.errors import DeadlineExceeded, InvalidRequest
from pdserve.core.limits import IntRange, MaxBytes, MaxCount, RealRange, TextLengths, field_types, limits_of
from pdserve.core.request_spec import OPTIONS, RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.slo import BUILT_IN, DEFAULT_CLASS
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2, inference_pb2
from router.api.request import GenerateInput
from router.core.events import Submit
from router.kserve.request import parse_generate
from router.openai.request import parse_chat, parse_completion
from router.openai.responses.body import LOGPROBS
from router.openai.responses.request import parse_responses
from router.parsing.generate import generate_input
from router.service.admission import Admission

MODEL_LEN, VOCAB_SIZE = 256, 512
DEFAULTS: Final = RouterConfig(max_client_priority=100)
FIELDS: Final = {**field_types(SamplingParams), **{name: field_types(RequestSpec)[name] for name in OPTIONS}}
SPELLED: Final = {
    ("chat", "logprobs"): ("top_logprobs", {"logprobs": True}),
    ("responses", "logprobs"): ("top_logprobs", {"include": [LOGPROBS]}),
    ("responses", "max_tokens"): ("max_output_tokens", {}),
}
"""Fields that a front end takes under another name, and what has to stand beside them."""
NOT_TAKEN: Final = {("responses", "prompt_logprobs")}

U32 = st.integers(0, (1 << 32) - 1)


class Encoder:
    async def encode(self, prompt: object, client: object = (), **settings: bool) -> tuple[int, ...]:
        return (1, 2)


def admit(request: GenerateInput, config: RouterConfig = DEFAULTS, shared_block_size: int | None = None) -> Submit:
    limit = SimpleNamespace(max_model_len=MODEL_LEN, open_ended_room=lambda prompt_len, limit: limit - prompt_len)
    model = SimpleNamespace(name="m", card=SimpleNamespace(vocab_size=VOCAB_SIZE, fingerprint="model"))
    admission = Admission(
        config, *cast(Any, (model, limit, Encoder())), draw_seed=lambda: 7, shared_block_size=lambda: shared_block_size
    )
    return asyncio.run(admission.admit(request, arrived_s=0.0))


async def never(*_: object, **__: object) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("slow", ["encode", "grammar"])
def test_a_deadline_also_bounds_what_comes_before_the_queue(slow: str):
    """The prompt may wait for the threads that tokenise, and a constraint for the checks of others."""
    encoder = SimpleNamespace(encode=never) if slow == "encode" else Encoder()
    limit = SimpleNamespace(max_model_len=MODEL_LEN, open_ended_room=lambda prompt_len, limit: limit - prompt_len)
    model = SimpleNamespace(name="m", card=SimpleNamespace(vocab_size=VOCAB_SIZE, fingerprint="model"))
    admission = Admission(DEFAULTS, *cast(Any, (model, limit, encoder)), draw_seed=lambda: 7, check_grammar=never)
    request = GenerateInput(prompt="x", deadline_s=0.01, constraint=Constraint(ConstraintKind.REGEX, "a"))
    with pytest.raises(DeadlineExceeded, match=r"deadline_s of 0.01 s passed before"):
        asyncio.run(admission.admit(request, arrived_s=0.0))


HTTP: Final[dict[str, tuple[Callable[..., Any], dict[str, Any]]]] = {
    "completions": (parse_completion, {"prompt": "x"}),
    "chat": (parse_chat, {"messages": [{"role": "user", "content": "x"}]}),
    "responses": (parse_responses, {"input": "x"}),
}
FRONT_ENDS: Final = ("grpc", *HTTP)


def send(front: str, name: str, value: Any) -> Submit:
    """Send a request that sets one field. The front "core" is the router's interface itself."""
    if front == "core":
        return admit(GenerateInput("x", **{"options" if name in OPTIONS else "sampling": {name: value}}))
    if front == "grpc":
        request = inference_pb2.GenerateRequest(text="x")
        target: Any = request if name in OPTIONS else request.sampling
        if isinstance(value, tuple):
            getattr(target, name).extend(value)
        elif isinstance(value, dict):
            getattr(target, name).update(value)
        else:
            setattr(target, name, value)
        return admit(generate_input(request, call_remaining_s=None, max_deadline_s=600.0, max_prompt_tokens=MODEL_LEN - 1))
    parse, body = HTTP[front]
    written, beside = SPELLED.get((front, name), (name, {}))
    call = parse(json.dumps({**body, **beside, written: value}).encode(), None)
    return admit(getattr(call, "call", call).inputs[0])


def ordinary(name: str) -> Any:
    """Return a value that differs from the default and is within all limits."""
    samples: dict[Any, Any] = {bool: True, int: 3, int | None: 3, float: 0.5, str: "s"}
    samples |= {tuple[str, ...]: ("s",), tuple[int, ...]: (5,), tuple[tuple[int, float], ...]: {5: 1.5}}
    return samples[FIELDS[name]]


def beyond(name: str) -> list[tuple[Any, str]]:
    """Return values beyond each limit of a field, and a part of the error that names the limit."""
    found: list[tuple[Any, str]] = []
    owner = RequestSpec if name in OPTIONS else SamplingParams
    for limit in limits_of(owner).get(name, ()):
        match limit:
            case IntRange(low, high):
                found += [(value, str(high)) for value in (low - 1, high + 1)]
            case RealRange(low, high):
                found += [(value, f"{high:g}") for value in (math.nextafter(low, -1e9), math.nextafter(high, 1e9))]
            case MaxBytes(count):
                found.append(("é" * (count // 2 + 1), str(count)))
            case MaxCount(count) if name == "logit_bias":
                found.append((dict.fromkeys(range(count + 1), 1.0), str(count)))
            case MaxCount(count):
                found.append((("s" if FIELDS[name] == tuple[str, ...] else 5,) * (count + 1), str(count)))
            case TextLengths(low, high):
                found += [(("s" * length,), str(high)) for length in (low - 1, high + 1)]
            case _:
                assert name == "logit_bias"
                found.append(({5: 100.5}, "100"))
    return found


TAKEN: Final[dict[Any, tuple[type[Any], ...]]] = {
    bool: (bool,), int: (int,), int | None: (int,), float: (int, float), str: (str,),
    tuple[str, ...]: (str, list), tuple[int, ...]: (list,), tuple[tuple[int, float], ...]: (dict,),
}  # fmt: skip
"""The types of JSON that a field takes. Nothing is coerced: 1.0 is no integer, true is no 1, "1" is no number."""


def of_a_wrong_type(front: str, name: str) -> list[Any]:
    kind = FIELDS[name]
    taken = (tuple,) if front == "core" and kind in (tuple[str, ...], tuple[int, ...]) else TAKEN[kind]
    return [value for value in (True, 1, 1.5, 1.0, "s", "1", [], {}) if type(value) not in taken]


@pytest.mark.parametrize("front", [*FRONT_ENDS, "core"])
@pytest.mark.parametrize("name", FIELDS)
def test_each_field_reaches_the_core_or_is_refused_by_its_name(name: str, front: str) -> None:
    """(1) A good value arrives. (2) One beyond a limit is refused by field and limit, (3) and one of a wrong type by field."""
    if (front, name) in NOT_TAKEN:
        with pytest.raises(InvalidRequest, match=f"^{name}: .* is not supported"):
            send(front, name, ordinary(name))
        return
    spec = send(front, name, ordinary(name)).spec
    got = getattr(spec if name in OPTIONS else spec.sampling, name)
    sent = -ordinary(name) if name == "priority" and front in HTTP else ordinary(name)  # a lower one goes first over HTTP
    assert (dict(got) if name == "logit_bias" else got) == sent

    written, _ = SPELLED.get((front, name), (name, {}))
    refused = [] if front == "grpc" else [(value, written) for value in of_a_wrong_type(front, name)]
    for value, words in (*beyond(name), *refused):
        if front in HTTP and (name, value) in (("top_k", -1), ("seed", -1)):
            continue  # vLLM's clients write -1 for off; OpenAI's seed is signed
        try:
            with pytest.raises(InvalidRequest) as caught:
                send(front, name, value)
        except ValueError:
            assert front == "grpc", "protobuf itself refuses what its field cannot hold"
            continue
        assert caught.value.field == written, value
        assert caught.value.message.startswith(f"{written}: ")
        assert words in caught.value.message
        assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("logit_bias", value) for value in (((1, 2.0),), {"1": 2.0}, {1: True}, {-1: 1.0})), ("magic", 1)],
)
def test_what_only_a_caller_of_the_core_can_get_wrong(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}") as caught:
        send("core", name, value)
    assert caught.value.field == name


def test_limits_are_tried_beyond_their_ends() -> None:
    assert [value for value, _ in beyond("priority")] == [-101, 101]
    assert [value for value, _ in beyond("cache_salt")] == ["é" * 65]
    assert len([name for name in FIELDS if beyond(name)]) == len(
        [kind for name, kind in FIELDS.items() if kind is not bool and name != "min_tokens"]  # which depends on another field
    )


def test_every_field_is_in_the_messages_of_clients_and_of_workers() -> None:
    assert set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == set(field_types(SamplingParams))
    assert set(common_pb2.RequestSpec.DESCRIPTOR.fields_by_name) == set(field_types(RequestSpec))
    assert set(OPTIONS) <= set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_a_class_and_a_session_reach_the_core_over_each_front_end(front: str) -> None:
    def send(**fields: Any) -> Submit:
        if front == "grpc":
            wire = inference_pb2.GenerateRequest(text="x", **fields)
            return admit(generate_input(wire, call_remaining_s=None, max_deadline_s=600.0, max_prompt_tokens=MODEL_LEN - 1))
        body = json.dumps({"prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
        return admit((parse_chat if front == "chat" else parse_completion)(body, None).inputs[0])

    assert (send().slo, send().session_id, send().spec.tpot_s) == (DEFAULT_CLASS, "", 0.0)
    sent = send(slo_class="chat", session_id="s" * 128)
    assert (sent.slo, sent.session_id, sent.spec.tpot_s) == (BUILT_IN["chat"], "s" * 128, 0.05)
    for fields, names in (
        ({"slo_class": "chatt"}, "voice, code, chat, batch are"),
        ({"session_id": "s" * 129}, "128"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{next(iter(fields))}: .*{names}"):
            send(**fields)


DRAFTING: Final[tuple[tuple[dict[str, Any], int | None], ...]] = (
    ({}, None),
    ({"speculation": "auto"}, None),
    ({"speculation": "off"}, 0),
    ({"speculation": "off", "num_speculative_tokens": 0}, 0),
    ({"num_speculative_tokens": 0}, 0),
    ({"num_speculative_tokens": 64}, 64),
    ({"speculation": "auto", "num_speculative_tokens": 3}, 3),
)
"""What a client asks for, and the limit of drafts that its request has without a class."""
DRAFTING_WRONG: Final[tuple[tuple[dict[str, Any], str], ...]] = (
    ({"speculation": "on"}, "speculation: must be one of auto, off, got 'on'"),
    ({"num_speculative_tokens": 65}, "num_speculative_tokens: must be from 0 to 64, got 65"),
    ({"speculation": "off", "num_speculative_tokens": 65}, "num_speculative_tokens: must be from 0 to 64, got 65"),
    ({"speculation": "off", "num_speculative_tokens": 2}, "num_speculative_tokens: must be 0 beside speculation off, got 2"),
)


def drafting(front: str, fields: dict[str, Any], config: RouterConfig = DEFAULTS) -> int | None:
    """Return the limit of drafts of a request with these fields."""
    if front == "grpc":
        wire = inference_pb2.GenerateRequest(text="x", **fields)
        made = generate_input(wire, call_remaining_s=None, max_deadline_s=600.0, max_prompt_tokens=MODEL_LEN - 1)
    elif front == "kserve":
        made = parse_generate(json.dumps({"text_input": "x", **fields}).encode(), None).input
    else:
        parse, body = HTTP[front]
        call = parse(json.dumps({**body, **fields}).encode(), None)
        made = getattr(call, "call", call).inputs[0]
    return admit(made, config).spec.draft_limit


@pytest.mark.parametrize("front", [*FRONT_ENDS, "kserve"])
def test_a_client_limits_the_drafts_of_its_request_over_each_front_end(front: str) -> None:
    """A request that names no limit has that of its class; one that asks for "auto" names none."""
    config = RouterConfig(slo_classes={"mine": {"num_speculative_tokens": 5}}, default_class="mine")
    for fields, limit in DRAFTING:
        assert drafting(front, fields) == limit
        assert drafting(front, fields, config) == (5 if limit is None else limit)
    for fields, message in DRAFTING_WRONG:
        with pytest.raises(InvalidRequest) as caught:
            drafting(front, fields)
        assert str(caught.value) == message
    if front != "grpc":
        with pytest.raises(InvalidRequest, match=r"^num_speculative_tokens: must be from 0 to 64, got -1"):
            drafting(front, {"num_speculative_tokens": -1})


def test_the_core_takes_no_limit_of_drafts_that_workers_would_not() -> None:
    for value, said in ((65, "must be from 0 to 64"), (True, "must be an integer")):
        with pytest.raises(InvalidRequest, match=f"^draft_limit: {said}"):
            admit(GenerateInput("x", options={"draft_limit": value}))


@pytest.mark.parametrize(("asked", "got"), [(0, 30), (5, 35), (-100, -70), (80, 100)])
def test_the_priority_of_a_class_is_added_within_the_limits(asked: int, got: int) -> None:
    config = RouterConfig(slo_classes={"mine": {"priority": 30}}, default_class="mine", max_client_priority=100)
    assert admit(GenerateInput("x", options={"priority": asked}), config).spec.priority == got
    assert admit(GenerateInput("x", slo_class="chat", options={"priority": asked}), config).spec.priority == asked


def values_of(name: str, kind: type[Any]) -> st.SearchStrategy[Any]:
    """Return values of a field between its limits, so that a new field needs no line here."""
    for limit in limits_of(kind).get(name, ()):
        if isinstance(limit, IntRange):
            values: st.SearchStrategy[Any] = st.integers(limit.low, min(limit.high, (1 << 64) - 1))
            return values if field_types(kind)[name] is int else values | st.none()
        if isinstance(limit, RealRange):
            return st.floats(limit.low, limit.high)
    text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
    by_type: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.just(0),
        str: text,
        tuple[str, ...]: st.lists(text, max_size=4).map(tuple),
        tuple[int, ...]: st.lists(U32).map(tuple),
        tuple[tuple[int, float], ...]: st.dictionaries(U32, st.floats(-100, 100)).map(lambda d: tuple(sorted(d.items()))),
    }
    return by_type[field_types(kind)[name]]


SAMPLING: Final = st.builds(SamplingParams, **{n: values_of(n, SamplingParams) for n in field_types(SamplingParams)})
SPECS: Final = st.builds(
    RequestSpec, st.lists(U32).map(tuple), SAMPLING, **{name: values_of(name, RequestSpec) for name in OPTIONS}
)


@given(SPECS)
def test_a_request_comes_back_equal_from_the_wire(spec: RequestSpec) -> None:
    wire = common_pb2.RequestSpec.FromString(codec.spec_to_wire(spec).SerializeToString())
    assert codec.spec_from_wire(wire) == spec


def test_a_prompt_is_named_by_keys_once_a_worker_shares_blocks() -> None:
    request = GenerateInput(prompt="x")
    assert admit(request).prefix_keys == ()
    keys = admit(request, shared_block_size=1).prefix_keys
    assert len(keys) == 2
    salted = GenerateInput(prompt="x", options={"cache_salt": "mine"})
    assert not {*keys} & {*admit(salted, shared_block_size=1).prefix_keys}
