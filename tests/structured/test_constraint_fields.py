"""A constraint goes from either front end to the workers unchanged, or is refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2, inference_pb2
from router.openai.request import parse_chat, parse_completion
from router.parsing.generate import generate_input

K = ConstraintKind
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
EACH = [
    Constraint(K.JSON_OBJECT), Constraint(K.JSON_SCHEMA, json.dumps(SCHEMA)), Constraint(K.REGEX, "ä+"),
    Constraint(K.LARK, 'start: "x"'), Constraint(K.CHOICE, choices=("a", "b b")),
]  # fmt: skip


@pytest.mark.parametrize("constraint", EACH, ids=lambda one: one.kind.value)
def test_workers_get_the_constraint_of_the_client(constraint: Constraint) -> None:
    spec = RequestSpec((1, 2), SamplingParams(), constraint=constraint)
    wire = common_pb2.RequestSpec.FromString(codec.spec_to_wire(spec).SerializeToString())
    assert codec.spec_from_wire(wire) == spec
    asked = inference_pb2.GenerateRequest(text="x", structured_outputs=codec.constraint_to_fields(constraint))
    taken = generate_input(asked, call_remaining_s=None, max_deadline_s=9.0, max_prompt_tokens=9)
    assert taken.constraint == constraint


def test_a_request_without_a_constraint_has_none() -> None:
    spec = RequestSpec((1,), SamplingParams())
    assert codec.spec_from_wire(codec.spec_to_wire(spec)).constraint is None
    for fields in ({}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": None}):
        assert completion(**fields) is None


@pytest.mark.parametrize("wire", [common_pb2.StructuredOutputs(), common_pb2.StructuredOutputs(json_object=False)])
def test_a_kind_that_is_not_known_here_is_refused(wire: common_pb2.StructuredOutputs) -> None:
    """A newer side may send one. It must not be taken for no constraint."""
    message = codec.spec_to_wire(RequestSpec((1,), SamplingParams()))
    message.constraint.CopyFrom(wire)
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        codec.spec_from_wire(message)


def test_a_least_length_beside_a_constraint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        RequestSpec((1,), SamplingParams(min_tokens=1), constraint=EACH[0])


def completion(**fields: Any) -> Constraint | None:
    return parse_completion(json.dumps({"prompt": "p", **fields}).encode(), None).inputs[0].constraint


def chat(**fields: Any) -> Constraint | None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return parse_chat(json.dumps(body).encode(), None).inputs[0].constraint


@pytest.mark.parametrize("parse", [completion, chat])
def test_json_bodies_write_constraints_as_openai_and_vllm_do(parse: Any) -> None:
    schema = Constraint(K.JSON_SCHEMA, json.dumps(SCHEMA))
    assert parse(structured_outputs={"json": SCHEMA}) == schema
    assert parse(structured_outputs={"json": json.dumps(SCHEMA), "regex": None, "disable_any_whitespace": False}) == schema
    assert parse(structured_outputs={"json_object": True}) == EACH[0]
    assert parse(structured_outputs={"regex": "ä+"}) == EACH[2]
    assert parse(structured_outputs={"grammar": 'start: "x"'}) == EACH[3]
    assert parse(structured_outputs={"choice": ["a", "b b"]}) == EACH[4]
    assert parse(response_format={"type": "json_object"}) == EACH[0]
    named = {"name": "n", "schema": SCHEMA, "strict": True}
    assert parse(response_format={"type": "json_schema", "json_schema": named}) == schema
    assert parse(response_format={"type": "text"}, structured_outputs={"regex": "ä+"}) == EACH[2]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        ("structured_outputs", {"structured_outputs": {"json_object": False}}),
        ("structured_outputs.json_object", {"structured_outputs": {"json_object": 1}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}),
        ("structured_outputs.disable_any_whitespace", {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": 3}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": ""}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("structured_outputs.choice[1]", {"structured_outputs": {"choice": ["a", 1]}}),
        ("response_format", {"response_format": {}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.type", {"response_format": {"type": 1}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
        ("response_format", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}),
    ],
)
def test_a_constraint_that_is_not_understood_is_refused_by_field(field: str, fields: dict[str, Any]) -> None:
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest) as caught:
            parse(**fields)
        assert caught.value.field == field
