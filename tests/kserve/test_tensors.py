"""Tensors of the Open Inference Protocol on the wire: what is read, what is written, and what is refused by name."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import FinishReason
from pdserve.rpc.v1 import open_inference_pb2 as pb
from router.api.answer import Delta
from router.kserve.answer import Output, generate_json, infer_body, raw_element
from router.kserve.request import InferCall, parse_generate, parse_infer
from router.parsing.infer import infer_call
from router.parsing.unparsed import leading_text

TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
STREAM = {"name": "stream", "datatype": "BOOL", "shape": [1]}


def raw_text(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def read(body: dict[str, Any], binary: bytes = b"", json_bytes: int | None = None) -> InferCall:
    head = json.dumps(body).encode()
    return parse_infer(head + binary, len(head) if binary and json_bytes is None else json_bytes, None)


def behind(tensor: dict[str, Any], size: Any) -> dict[str, Any]:
    """The tensor, whose data follow the JSON."""
    return {**{name: value for name, value in tensor.items() if name != "data"}, "parameters": {"binary_data_size": size}}


@given(st.text(min_size=1), st.booleans(), st.booleans())
def test_a_request_is_the_same_on_all_wires(text: str, stream: bool, binary: bool) -> None:
    """As one object, as tensors in JSON and in binary, and as a message."""
    flat = parse_generate(json.dumps({"text_input": text, "stream": stream, "seed": 3}).encode(), None)
    tensors = [{**TEXT, "data": [text]}, {**STREAM, "data": [stream]}]
    encoded = text.encode()
    if binary:
        tensors = [behind(TEXT, 4 + len(encoded)), behind(STREAM, 1)]
    bytes_behind = raw_text(encoded) + bytes([stream]) if binary else b""
    over_http = read({"inputs": tensors, "parameters": {"seed": 3}}, bytes_behind)
    message = pb.ModelInferRequest()
    for one in (TEXT, STREAM):
        message.inputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
    if binary:
        message.raw_input_contents.extend([raw_text(encoded), bytes([stream])])
    else:
        message.inputs[0].contents.bytes_contents.append(encoded)
        message.inputs[1].contents.bool_contents.append(stream)
    message.parameters["seed"].int64_param = 3
    over_grpc = infer_call(message, call_remaining_s=None, max_deadline_s=60.0)
    for call in (flat, over_http, over_grpc):
        assert (call.input.prompt, call.stream, call.input.sampling["seed"]) == (text, stream, 3)
        assert call.prefix == ("" if stream else text)


BAD: list[tuple[dict[str, Any], bytes, str]] = [
    ({}, b"", "inputs"),
    ({"inputs": []}, b"", "inputs"),
    ({"inputs": [TEXT] * 8}, b"", "inputs"),
    ({"inputs": [{**TEXT, "nothing": 1}]}, b"", "inputs"),
    ({"inputs": [TEXT], "nothing": 1}, b"", "nothing"),
    ({"inputs": [TEXT], "id": 3}, b"", "id"),
    ({"inputs": [TEXT], "outputs": [{"name": "text_output"}] * 2}, b"", "outputs"),
    ({"inputs": [TEXT], "outputs": [{"name": "text_output", "parameters": {"binary_data": 1}}]}, b"", "text_output.parameters"),
    ({"inputs": [TEXT], "parameters": {"binary_data_output": "yes"}}, b"", "binary_data_output"),
    ({"inputs": [TEXT], "parameters": {"stream": True}}, b"", "stream"),
    ({"inputs": [{**TEXT, "data": []}]}, b"", "text_input"),
    ({"inputs": [{**TEXT, "data": ["a", "b"]}]}, b"", "text_input"),
    ({"inputs": [{**TEXT, "data": [["a"]]}]}, b"", "text_input"),
    ({"inputs": [{**TEXT, "data": [3]}]}, b"", "text_input"),
    ({"inputs": [{**TEXT, "data": "a"}]}, b"", "text_input"),
    ({"inputs": [behind(TEXT, 5) | {"data": None}]}, b"", "text_input"),
    ({"inputs": [{**TEXT, "shape": []}]}, b"", "text_input"),
    ({"inputs": [{**TEXT, "shape": [-1]}]}, b"", "text_input"),
    ({"inputs": [{**TEXT, "parameters": {"shared_memory_region": "r"}}]}, b"", "text_input.parameters.shared_memory_region"),
    ({"inputs": [{**TEXT, "parameters": {"binary_data_size": 5}}]}, raw_text(b"a"), "text_input.parameters.binary_data_size"),
    ({"inputs": [behind(TEXT, -1)]}, raw_text(b"a"), "text_input.parameters.binary_data_size"),
    ({"inputs": [behind(TEXT, "5")]}, raw_text(b"a"), "text_input.parameters.binary_data_size"),
    ({"inputs": [behind(TEXT, 4)]}, raw_text(b"a"), "text_input"),
    ({"inputs": [behind(TEXT, 6)]}, raw_text(b"a"), "inputs"),
    ({"inputs": [behind(TEXT, 5)]}, raw_text(b"a") + b"x", "inputs"),
    ({"inputs": [behind(TEXT, 5)]}, raw_text(b"\xff"), "text_input"),
    ({"inputs": [TEXT, behind(STREAM, 1)]}, b"\x02", "stream"),
    ({"inputs": [TEXT, behind(STREAM, 2)]}, b"\x01\x00", "stream"),
]


def test_bad_tensors_are_refused_by_name() -> None:
    for body, binary, field in BAD:
        with pytest.raises(InvalidRequest) as caught:
            read(body, binary)
        assert caught.value.field.startswith(field), (body, caught.value.message)
    with pytest.raises(InvalidRequest, match="inference-header-content-length: is 4096"):
        read({"inputs": [TEXT]}, json_bytes=4096)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"inputs": [TEXT], "images": 1}, "images"),
        ({"inputs": [{**TEXT, "dtype": "BYTES"}]}, "inputs[0].dtype"),
        ({"inputs": [TEXT], "outputs": [{"name": "text_output", "class": 1}]}, "outputs[0].class"),
        ({"inputs": [TEXT], "a - at `$.b": 1}, "a - at `$.b"),
        ({"inputs": [TEXT], "\n" * 300: 1}, "\\n"),
    ],
)
def test_a_field_that_is_unknown_is_the_one_that_is_named(body: dict[str, Any], field: str) -> None:
    """The error named the object that has the field."""
    with pytest.raises(InvalidRequest, match="is an unknown field of this object") as caught:
        read(body)
    assert caught.value.field.startswith(field)
    assert len(caught.value.message) < 200
    assert caught.value.message.isascii()


def message_of(**fields: Any) -> pb.ModelInferRequest:
    """A good request as a message, with further fields."""
    message = pb.ModelInferRequest()
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    message.MergeFrom(pb.ModelInferRequest(**fields))
    return message


NAN = pb.InferParameter(double_param=float("nan"))
BAD_MESSAGES: list[tuple[pb.ModelInferRequest, str]] = [
    (pb.ModelInferRequest(), "text_input"),
    (message_of(raw_input_contents=[raw_text(b"a")]), "text_input"),
    (message_of(raw_input_contents=[b"", b""]), "raw_input_contents"),
    (message_of(parameters={"temperature": NAN}), "temperature"),
    (message_of(parameters={"seed": pb.InferParameter()}), "seed"),
    (message_of(parameters={"\n" * 300: pb.InferParameter(int64_param=1)}), "\\n"),
    (message_of(inputs=[{"name": "stream", "datatype": "BOOL", "shape": [1]}]), "stream"),
    (message_of(inputs=[{"name": "stream", "datatype": "BOOL", "shape": [1], "contents": {"int_contents": [1]}}]), "stream"),
    (
        message_of(inputs=[{"name": "stream", "datatype": "BOOL", "shape": [1], "contents": {"bool_contents": [1, 0]}}]),
        "stream",
    ),
    (message_of(inputs=[{"name": "a", "datatype": "BOOL", "shape": [1]}] * 8), "inputs"),
    (message_of(outputs=[{"name": "text_output", "parameters": {"classification": pb.InferParameter()}}]), "text_output"),
]


def test_bad_messages_are_refused_by_name() -> None:
    for message, field in BAD_MESSAGES:
        with pytest.raises(InvalidRequest) as caught:
            infer_call(message, call_remaining_s=None, max_deadline_s=60.0)
        assert caught.value.field.startswith(field), (message, caught.value.message)
        assert caught.value.message.isascii()


def test_the_earlier_deadline_of_call_and_request_counts() -> None:
    message = message_of(parameters={"timeout": pb.InferParameter(int64_param=2_000_000)})
    for remaining_s, expected_s in ((None, 2.0), (5.0, 2.0), (0.5, 0.5)):
        assert infer_call(message, call_remaining_s=remaining_s, max_deadline_s=60.0).input.deadline_s == expected_s
    assert infer_call(message_of(), call_remaining_s=500.0, max_deadline_s=60.0).input.deadline_s == 60.0


@given(st.text(), st.integers(0, (1 << 32) - 1), st.sets(st.sampled_from(["text_output", "num_output_tokens"])))
def test_an_answer_says_where_its_binary_tensors_are(text: str, count: int, binary: set[str]) -> None:
    outputs = [{"name": name, "parameters": {"binary_data": name in binary}} for name in ("text_output", "num_output_tokens")]
    call = read({"inputs": [TEXT], "outputs": outputs, "id": "mine"})
    body, length = infer_body("m", call, {"text_output": text, "num_output_tokens": count})
    assert (length is None) == (not binary)
    told = json.loads(body[:length])
    place = len(body) if length is None else length
    assert (told["model_name"], told["model_version"], told["id"]) == ("m", "1", "mine")
    for one, value in zip(told["outputs"], (text, count), strict=True):
        size = one.get("parameters", {}).get("binary_data_size")
        assert (size is not None) == (one["name"] in binary)
        if size is None:
            assert one["data"] == [value]
        else:
            assert body[place : place + size] == raw_element(value)
            place += size
    assert place == len(body)


def test_an_output_is_taken_in_pieces_or_whole() -> None:
    call = parse_generate(b'{"text_input":"p","return_finish_reason":true,"return_num_output_tokens":true}', None)
    output = Output(call, 1)
    output.add(Delta(0, (1, 2), "a", None))
    assert output.values() == {"text_output": "pa", "finish_reason": "None", "num_output_tokens": 2}
    output.add(Delta(2, (3,), "b", FinishReason.STOP))
    last = output.values()
    assert last == {"text_output": "b", "finish_reason": "stop", "num_output_tokens": 1}
    assert json.loads(generate_json("m", last)) == {"model_name": "m", "model_version": "1", **last}


@given(name=st.text(max_size=8), version=st.text(max_size=8), own_id=st.text("ab", max_size=128), rest=st.binary(max_size=8))
def test_the_id_of_a_large_message_is_found_in_front(name: str, version: str, own_id: str, rest: bytes) -> None:
    """Encoders write fields in the order of their numbers. Other bytes give some text or none, and no error."""
    message = message_of(model_name=name, model_version=version, id=own_id)
    data = message.SerializeToString()
    assert leading_text(data, pb.ModelInferRequest.ID_FIELD_NUMBER) == own_id
    for cut in range(len(data)):
        assert len(leading_text(data[:cut] + rest, pb.ModelInferRequest.ID_FIELD_NUMBER)) <= 128
