"""Messages of Generate: each field counts, is refused by its name, or is listed; whatever a message holds, errors are typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import openengine_pb2
from pdserve.worker.openengine.request import MOST_OUTPUT, Asked, read_generate

MODEL, LONGEST = "tiny", 64
Request = openengine_pb2.GenerateRequest


def read(request: Request, *, lends: bool = False, metadata: tuple[tuple[str, str], ...] = ()) -> Asked:
    return read_generate(request, metadata, model=MODEL, max_model_len=LONGEST, lends=lends)


def base() -> Request:
    return Request(request_id="r", model=MODEL, token_ids=openengine_pb2.TokenIds(ids=[1, 2, 3]))


def leaves(kind: Descriptor, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field that is no message, and of each message without fields."""
    for field in kind.fields:
        path = (*place, field.name)
        inner = field.message_type
        if (
            inner is None
            or not inner.fields
            or inner.full_name.startswith("google.")
            or inner.name in ("KvSessionRef", "MediaItem")
        ):
            yield path
        else:
            yield from leaves(inner, path)


_SCALARS: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_INT32: 7,
    FieldDescriptor.CPPTYPE_UINT32: 7,
    FieldDescriptor.CPPTYPE_UINT64: 7,
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_STRING: "x",
}


def fill(request: Any, path: tuple[str, ...]) -> None:
    """Set the field at a path to something that is not its default."""
    message = request
    for name in path[:-1]:
        inner = getattr(message, name)
        message = inner.add() if hasattr(inner, "add") else inner
    field = message.DESCRIPTOR.fields_by_name[path[-1]]
    if field.message_type is not None:
        if field.message_type.name == "Struct":
            getattr(message, path[-1])["knob"] = 1
        elif field.is_repeated:
            getattr(message, path[-1]).add()
        else:
            getattr(message, path[-1]).SetInParent()
    elif field.is_repeated:
        getattr(message, path[-1]).append(_SCALARS[field.cpp_type])
    else:
        setattr(message, path[-1], _SCALARS[field.cpp_type])


PATHS = [path for path in leaves(Request.DESCRIPTOR) if path not in (("model",), ("request_id",))]


def error_of(call: Callable[[], object]) -> InvalidRequest | None:
    """Return the typed error of a call. None: it has none."""
    try:
        call()
    except InvalidRequest as exc:
        return exc
    return None


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_no_field_is_taken_and_ignored(path: tuple[str, ...]) -> None:
    """Each field alone, and those that need their switch with it."""
    request = base()
    if "candidates" in ".".join(path):
        request.response.return_prompt_logprobs = request.response.return_output_logprobs = True
    before = read(request)
    fill(request, path)
    error = error_of(lambda: read(request))
    if error is None:
        assert read(request) != before
    else:
        assert path[0] in error.field


def test_the_refused_backend_is_any_but_ours() -> None:
    request = base()
    request.guided.regex = "a"
    request.guided.backend = "llguidance"
    assert "constraint" in read(request).options
    request.guided.backend = "outlines"
    with pytest.raises(InvalidRequest, match=r"^guided\.backend: "):
        read(request)


@st.composite
def messages(draw: st.DrawFn) -> Request:
    """A message with any fields, each with a value that it can hold."""
    request = base() if draw(st.booleans()) else Request()
    doubles = st.floats() | st.sampled_from([0.0, 0.5, 1.0])
    sampling, stopping = request.sampling, request.stopping
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if draw(st.booleans()):
            setattr(sampling, name, draw(doubles))
    if draw(st.booleans()):
        sampling.top_k = draw(st.integers(-(1 << 31), (1 << 31) - 1))
        sampling.seed = draw(st.integers(0, (1 << 64) - 1))
    for name in ("max_tokens", "min_tokens"):
        if draw(st.booleans()):
            setattr(stopping, name, draw(st.integers(0, (1 << 32) - 1) | st.integers(0, 70)))
    for _ in range(draw(st.integers(0, 3))):
        stopping.conditions.add(**draw(st.sampled_from([{"stop_text": ""}, {"stop_text": "a"}, {"stop_token_id": 3}, {}])))
    if draw(st.booleans()):
        request.response.return_output_logprobs = draw(st.booleans())
        request.response.output_candidates.top_n = draw(st.integers(0, 30))
    if draw(st.booleans()):
        request.guided.regex = draw(st.text(max_size=5))
    request.kv.cache_salt = draw(st.text(max_size=200))
    request.request_id = draw(st.text(max_size=300))
    if draw(st.booleans()):
        request.prompt = draw(st.text(max_size=20))
    return request


def whole(request: Request, *, lends: bool) -> None:
    """Read a message to the end. What is served is within the limits of the model."""
    asked = read(request, lends=lends)
    spec = asked.spec((1, 2, 3), LONGEST, lends=lends)
    assert spec.sampling.max_tokens == MOST_OUTPUT if lends else spec.sampling.max_tokens <= LONGEST - 3
    assert all(one.isascii() and one.isprintable() and "," not in one for one in asked.ignored)


@given(messages(), st.booleans())
def test_any_message_is_served_or_refused_by_a_field_of_the_protocol(request: Request, lends: bool) -> None:
    known = {".".join(path[:i]) for path in leaves(Request.DESCRIPTOR) for i in range(1, len(path) + 1)} | {"input"}
    error = error_of(lambda: whole(request, lends=lends))
    if error is not None:
        assert error.field in known, error.message
        assert error.message.startswith(error.field) or "maximum context length" in error.message


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_no_message_or_end_in_a_typed_error(data: bytes, lends: bool) -> None:
    try:
        request = Request.FromString(data)
    except DecodeError:
        return
    error_of(lambda: whole(request, lends=lends))


@given(st.dictionaries(st.sampled_from(["priority", "target-dp-rank", "routing-key", "else"]), st.text(max_size=12)))
def test_any_metadata_are_read_or_refused_by_name(given_values: dict[str, str]) -> None:
    metadata = tuple((f"openengine-{name}", value) for name, value in given_values.items())
    error = error_of(lambda: read(base(), metadata=metadata))
    if error is not None:
        assert error.field in dict(metadata)
    else:
        asked = read(base(), metadata=metadata)
        assert ("openengine-else" in asked.ignored) == ("else" in given_values)
        assert asked.options.get("priority", 0) == int(given_values.get("priority", 0))


def test_what_is_unset_is_the_default_of_our_own_api() -> None:
    """Except that the phase of a lender draws as many tokens as the other one asks for."""
    alone, lent = (read(base()).spec((1, 2, 3), LONGEST, lends=lends).sampling for lends in (False, True))
    for params, max_tokens in ((alone, LONGEST - 3), (lent, MOST_OUTPUT)):
        assert params == SamplingParams(max_tokens=max_tokens, seed=params.seed)
    request = base()
    request.sampling.top_k = -1
    request.stopping.max_tokens = 1
    assert read(request).spec((1,), LONGEST, lends=False).sampling.top_k == 0
    assert read(request, lends=True).spec((1,), LONGEST, lends=True).sampling.max_tokens == MOST_OUTPUT


def test_names_of_a_caller_cannot_leave_their_header() -> None:
    request = base()
    json_format.ParseDict({"a\r\nb, c": 1, "ü" * 200: 2}, request.extra)
    assert sorted(read(request).ignored) == ["extra." + "?" * 58, "extra.a??b??c"]
