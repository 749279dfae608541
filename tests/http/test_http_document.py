"""The OpenAPI document says what the front end does: its routes, its bodies with their limits, its answers."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from http_fakes import MODEL, FakeApi, app_of, served
from raw_http import exchange, head, post

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import check_limits
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams
from router.api.answer import CallDelta, Delta
from router.document.descriptions import FIELDS
from router.document.document import OPERATIONS, document
from router.document.schemas import BODIES
from router.http.document import html_of
from router.kserve.request import InferCall, parse_generate
from router.openai.body import WITHOUT_EFFECT, StreamOptions
from router.openai.chunks import Envelope, GatheredCall, add_ids, usage
from router.openai.json import hints, neutral_values
from router.openai.request import parse_chat, parse_completion
from router.openai.responses.body import MessageItem, ReasoningItem, ReasoningOptions, TextOptions
from router.openai.responses.request import parse_responses

DOCUMENT = document("1.0")
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
LEAST: dict[str, tuple[Any, dict[str, Any]]] = {
    "CompletionBody": (parse_completion, {"prompt": "p"}),
    "ChatBody": (parse_chat, {"messages": [{"role": "user", "content": "x"}]}),
    "ResponsesBody": (parse_responses, {"input": "x"}),
    "GenerateBody": (parse_generate, {"text_input": "x"}),
}


def validator(name: str) -> jsonschema.Draft202012Validator:
    """Of one schema of the document."""
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


def test_the_document_has_every_route_of_the_application() -> None:
    paths = {re.sub(r":[a-z]+}", "}", path) for path in app_of(FakeApi()).paths}
    assert paths == {*DOCUMENT["paths"]} == {*OPERATIONS}


def test_the_document_is_json_schema_and_every_reference_leads_somewhere() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert names <= {*SCHEMAS}
    assert {kind.__name__ for kind in BODIES} <= names
    assert DOCUMENT["openapi"].startswith("3.1.")
    for methods in DOCUMENT["paths"].values():
        assert all(one["summary"].endswith(".") and "200" in one["responses"] for one in methods.values())


def test_every_accepted_field_is_explained_and_every_other_one_marked() -> None:
    for body in BODIES:
        fields = SCHEMAS[body.__name__]["properties"]
        assert {*fields} == {*body.__struct_fields__}
        for name, neutral in neutral_values(body).items():
            if name in hints(body):
                assert "x-pdserve-ignored-fields" in fields[name]["description"]
            else:
                assert fields[name]["enum"] == [*neutral, None], name
        assert all("description" in field for field in fields.values())
    names = {name for schema in SCHEMAS.values() for name in schema.get("properties", {})}
    places = {f"{shape}.{name}" for shape, schema in SCHEMAS.items() for name in schema.get("properties", {})}
    assert {*FIELDS} - {*WITHOUT_EFFECT} - names - places == set()


def test_the_page_for_clients_names_every_field_that_is_refused_and_every_hint() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for shape in (*BODIES[:3], StreamOptions, TextOptions, ReasoningOptions, MessageItem, ReasoningItem):
        for name in neutral_values(shape):
            if name in hints(shape) or shape in BODIES:
                assert re.search(rf"`{name}(: false)?`", page), f"docs/api.md does not name {name} of {shape.__name__}"


def test_a_field_whose_meaning_depends_on_its_place_is_explained_at_its_place() -> None:
    """A function's description is shown to models, and a schema's is not."""
    function = SCHEMAS["FunctionFields"]["properties"]["description"]["description"]
    assert "to the model" in function
    assert "No model sees it" in SCHEMAS["JsonSchema"]["properties"]["description"]["description"]
    assert SCHEMAS["FunctionTool"]["properties"]["description"]["description"] == function
    assert "author" in SCHEMAS["Message"]["properties"]["name"]["description"]


@pytest.mark.parametrize("body", [*LEAST])
def test_limits_of_the_document_are_those_of_the_parser(body: str) -> None:
    """Values at and beyond each limit are judged alike by the document and by the code that serves requests."""
    parse, least = LEAST[body]
    judge = validator(body)
    limited = 0
    for name, field in SCHEMAS[body]["properties"].items():
        for value in edges(field):
            fields = {**least, name: value}
            if name in ("top_logprobs", "logprobs"):
                fields |= {"logprobs": True} if body == "ChatBody" and name == "top_logprobs" else {}
                fields |= {"include": ["message.output_text.logprobs"]} if body == "ResponsesBody" else {}
            limited += 1
            assert judge.is_valid(fields) == accepted(parse, fields), (name, str(value)[:80])
    assert limited > 35


def edges(field: dict[str, Any]) -> list[Any]:
    """Values at and just beyond the limits of a field, and neutral ones."""
    values: list[Any] = [*field.get("enum", []), *([{"no": "neutral"}] if "enum" in field else [])]
    for kind in field.get("anyOf", []):
        values += [None]
        for name, step in (("minimum", -1), ("maximum", 1)):
            if name in kind:
                values += [kind[name], kind[name] + step]
        if "maxLength" in kind:
            values += ["x" * kind["maxLength"], "x" * (kind["maxLength"] + 1)]
        if kind.get("maxItems", 1000) < 1000:
            one: Any = {"string": "x", "integer": 1}.get(kind["items"].get("type", ""))
            values += [[one] * kind["maxItems"]] if one else []
            values += [[one] * (kind["maxItems"] + 1)]
    return values


def accepted(parse: Any, fields: dict[str, Any]) -> bool:
    """Whether the parser, and after it the limits that both front ends share, take a body."""

    try:
        found = parse(json.dumps(fields).encode(), None)
        request = found.input if isinstance(found, InferCall) else getattr(found, "call", found).inputs[0]
        check_limits(RequestSpec, request.options)
        check_limits(SamplingParams, request.sampling)
    except InvalidRequest:
        return False
    return True


def test_the_fields_of_an_answer_with_calls_reasoning_and_ids_are_documented() -> None:
    gathered = GatheredCall()
    gathered.add(Delta(0, (1,), "", FinishReason.TOOL_CALLS, reasoning="r", calls=(CallDelta(0, "c", "f", "{}"),)))
    for kind, name in (("chat", "ChatCompletion"), ("text", "Completion")):
        call = parse_chat(b'{"messages":[{"role":"user","content":"x"}]}', None)
        call = call if kind == "chat" else parse_completion(b'{"prompt":"x"}', None)
        envelope = Envelope(call, MODEL)
        choice = envelope.choice(0, "", FinishReason.TOOL_CALLS, "")
        choice = gathered.into(choice) if call.chat else choice
        beside = add_ids([choice], [(1,)], [(2,)], chat=call.chat)
        choice |= {"logprobs": None, "prompt_logprobs": [None]}
        answer = envelope.wrap(envelope.whole_type, choices=[choice], usage=usage(1, 1), **beside)
        validator(name).validate(answer)
        shape = SCHEMAS[name]["properties"]
        assert {*answer} <= {*shape}
        assert {*choice} <= {*shape["choices"]["items"]["properties"]}
        if call.chat:
            message = shape["choices"]["items"]["properties"]["message"]["properties"]
            assert {*choice["message"]} == {*message}


def test_answers_have_the_schemas_of_the_document() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            for path, operation in OPERATIONS.items():
                real = path.replace("{model}", MODEL).replace("{version}", "1")
                request = post(real, operation.example) if operation.body else head("GET", real)
                answer = await exchange(base, request)
                assert answer.status == 200, path
                media, *_ = answer.headers["content-type"].split(";")
                assert media == operation.media_type
                if operation.answer:
                    validator(operation.answer).validate(answer.json)
                if operation.body:
                    validator(operation.body).validate(operation.example)
                    refused = await exchange(base, post(real, {**operation.example, "model": "other"}))
                    assert str(refused.status) in DOCUMENT["paths"][path]["post"]["responses"]
                    validator(operation.error).validate(refused.json)
            assert (await exchange(base, head("GET", "/openapi.json"))).json["paths"] == json.loads(
                json.dumps(DOCUMENT["paths"])
            )

    asyncio.run(run())


def test_a_model_tells_its_limits() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            card = (await exchange(base, head("GET", f"/v1/models/{MODEL}"))).json
            limits = card["limits"]
            assert (limits["max_prompt_tokens"], limits["max_body_bytes"], limits["max_deadline_s"]) == (4095, 1 << 20, 600)
            most = {
                "prompt": ["p"] * limits["max_prompts"],
                "stop": ["x"] * limits["max_stop"],
                "logprobs": limits["max_logprobs"],
            }
            assert (await exchange(base, post("/v1/completions", {**most, "max_tokens": 1}))).status == 200
            for name in most:
                value = [*most[name], "x"] if isinstance(most[name], list) else most[name] + 1
                answer = await exchange(base, post("/v1/completions", {**most, name: value}))
                assert (answer.status, answer.error["param"]) == (400, name)

    asyncio.run(run())


class Markup(HTMLParser):
    """Collects what a page links to and what it defines, and whether its tags are in balance."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = html_of(DOCUMENT)
    found = Markup()
    found.feed(text)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert {link.removeprefix("#") for link in found.links} <= {*found.ids, "openapi.json"}
    assert found.tags.isdisjoint({"script", "img", "link", "iframe"})
    assert "http:" not in text
    assert "https:" not in text
    for name in (*OPERATIONS, *SCHEMAS["ChatBody"]["properties"]):
        assert f"<code>{name}</code>" in text
    hostile = document("</title><script>")
    assert "<script>" not in html_of(hostile)
