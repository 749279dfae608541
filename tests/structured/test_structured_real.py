"""Structured output through real processes: both placements, lost workers, hostile grammars, both APIs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import openai
import pytest
from hostile import HOSTILE, LARGEST

from pdserve.config import MIB, EngineConfig, RouterConfig
from pdserve.core.structured.constraint import Constraint
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from testkit.client import Answer, generate, generate_all, request
from testkit.processes import ProcessCluster
from testkit.random_schemas import random_schema

pytestmark = pytest.mark.cluster
STOP = common_pb2.FINISH_REASON_STOP
APART, TOGETHER = common_pb2.PLACEMENT_DISAGGREGATED, common_pb2.PLACEMENT_COLOCATED
BOUND_S = 60.0
ENGINE = EngineConfig(
    model="tiny", batch_invariant=True, kv_cache_memory=16 * MIB, max_num_batched_tokens=64,
    max_model_len=512, threads=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    rules_only = RouterConfig(colocate_by_cost=False)
    with ProcessCluster(ENGINE, prefill=1, decode=2, router=rules_only) as running:
        yield running


def constrained(
    prompt: list[int], placement: common_pb2.Placement, outputs: common_pb2.StructuredOutputs, **sampling: Any
) -> inference_pb2.GenerateRequest:
    message = request(prompt, placement, **sampling)
    message.structured_outputs.CopyFrom(outputs)
    return message


def json_of(schema: Any) -> common_pb2.StructuredOutputs:
    return common_pb2.StructuredOutputs(json=json.dumps(schema))


@pytest.mark.quick("12")
@pytest.mark.parametrize("count", [12, 24])
def test_disaggregated_equals_colocated_and_what_stops_is_valid(cluster: ProcessCluster, count: int) -> None:
    """Token 0 is drawn by the prefill worker, and the others by the decode worker, which gets no state but the tokens."""
    rng = random.Random(29)
    schemas = [random_schema(rng) for _ in range(count)]
    runs: list[list[Answer]] = []
    for placement in (APART, TOGETHER):
        messages = [
            constrained(
                [i % 250, 7, 9] * (1 + i % 12), placement, json_of(schema), max_tokens=160, temperature=(i % 2) * 0.8, seed=i,
                **({"logprobs": 2, "frequency_penalty": 0.5} if i % 3 == 0 else {}),
            )
            for i, schema in enumerate(schemas)
        ]  # fmt: skip
        runs.append(generate_all(cluster.grpc, messages, concurrency=count))
    apart, together = runs
    for a, b, schema in zip(apart, together, schemas, strict=True):
        assert (a.ids, a.text, a.finish_reason, a.logprobs) == (b.ids, b.text, b.finish_reason, b.logprobs)
        assert a.report.prefill_worker
        assert not b.report.prefill_worker
        if a.finish_reason == STOP:
            jsonschema.validate(json.loads(a.text), schema)
    assert sum(a.finish_reason == STOP for a in apart) > len(schemas) // 2
    cluster.assert_empty()


def test_every_kind_is_enforced_and_one_token_may_be_all(cluster: ProcessCluster) -> None:
    choice = common_pb2.StructuredOutputs(choice={"texts": ["left", "right"]})
    cases = {
        "choice": (choice, ("left", "right")),
        "one": (common_pb2.StructuredOutputs(regex="[7]"), ("7",)),
        "lark": (common_pb2.StructuredOutputs(grammar='start: "a" b\nb: "b" "c"'), ("abc",)),
    }
    for placement in (APART, TOGETHER):
        for outputs, texts in cases.values():
            (answer,) = generate_all(cluster.grpc, [constrained([1, 2, 3], placement, outputs, max_tokens=20)])
            assert answer.text in texts
            assert answer.finish_reason == STOP
    anything = common_pb2.StructuredOutputs(json_object=True)
    (answer,) = generate_all(cluster.grpc, [constrained([1, 2], APART, anything, max_tokens=9)])
    assert answer.text.startswith("{")
    cluster.assert_empty()


@pytest.mark.slow
def test_a_killed_decode_worker_costs_a_constrained_stream_nothing(cluster: ProcessCluster) -> None:
    """The replay goes on in the middle of the text, on a worker that has never seen the grammar."""
    outputs = common_pb2.StructuredOutputs(regex="([a-z]{5}-[0-9]{3} ){80}")
    message = constrained([5, 6, 7], APART, outputs, max_tokens=480, temperature=0.7, seed=3)
    (expected,) = generate_all(cluster.grpc, [message])
    ids: list[int] = []
    killed = ""
    with grpc.insecure_channel(cluster.grpc) as channel:
        for part in inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=120):
            ids += part.ids
            if len(ids) >= 30 and not killed:
                killed = next(one.hello.worker_id for one in cluster.state().workers if is_decoding(one))
                cluster.processes[killed].kill()
    assert killed
    assert ids == expected.ids
    cluster.heal()


def is_decoding(worker: Any) -> bool:
    return bool(worker.hello.role == common_pb2.ROLE_DECODE and worker.requests_placed)


def refused(code: grpc.StatusCode, details: str, message: inference_pb2.GenerateRequest, cluster: ProcessCluster) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=60))
    assert caught.value.code() is code
    assert details in (caught.value.details() or "")


def test_what_cannot_be_enforced_is_refused_by_name_at_the_door(cluster: ProcessCluster) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    refused(invalid, "uniqueItems", constrained([1], APART, json_of({"uniqueItems": True})), cluster)
    refused(invalid, "min_tokens", constrained([1], APART, json_of({}), min_tokens=3, max_tokens=9), cluster)
    refused(invalid, "structured_outputs", constrained([1], APART, common_pb2.StructuredOutputs()), cluster)
    refused(invalid, "structured_outputs.regex", constrained([1], APART, common_pb2.StructuredOutputs(regex="(")), cluster)


@pytest.mark.slow
def test_hostile_grammars_end_with_typed_errors_while_others_are_served(cluster: ProcessCluster) -> None:
    """Each is refused as the client's mistake, by its field, or small enough after all. Requests without a constraint and with
    a known one end meanwhile, and one with a new grammar ends after them."""
    costly = {**HOSTILE, **LARGEST}
    known = constrained([2], APART, json_of({"type": "null"}), max_tokens=9)
    assert generate_all(cluster.grpc, [known])[0].text == "null"

    async def run() -> tuple[list[Any], list[Answer]]:
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            sent = [constrained([1], APART, wire(one), max_tokens=4) for one in costly.values()]
            bad = [asyncio.create_task(generate(stub, message)) for message in sent]
            good = [asyncio.create_task(generate(stub, request([i, 3], APART, max_tokens=20))) for i in range(20)]
            bound = [known, constrained([2], APART, json_of({"const": "new"}), max_tokens=30)]
            good += [asyncio.create_task(generate(stub, message)) for message in bound]
            answers = [await task for task in good]
            return await asyncio.gather(*bad, return_exceptions=True), answers

    bad, answers = asyncio.run(run())
    assert [answer.text for answer in answers[-2:]] == ["null", '"new"']
    codes = dict(zip(costly, (one.code() if isinstance(one, grpc.aio.AioRpcError) else None for one in bad), strict=True))
    assert set(codes.values()) == {None, grpc.StatusCode.INVALID_ARGUMENT}, codes
    for error in bad:
        assert not isinstance(error, grpc.aio.AioRpcError) or "structured_outputs" in (error.details() or "")
    cluster.assert_empty()


def wire(constraint: Constraint) -> common_pb2.StructuredOutputs:
    if constraint.choices:
        return common_pb2.StructuredOutputs(choice={"texts": constraint.choices})
    outputs = common_pb2.StructuredOutputs()
    setattr(outputs, constraint.kind.value, constraint.text)
    return outputs


def test_the_openai_client_gets_json_of_its_schema(cluster: ProcessCluster) -> None:
    schema = {
        "type": "object", "required": ["city", "size"], "additionalProperties": False,
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    }  # fmt: skip
    messages: list[Any] = [{"role": "user", "content": "where?"}]
    with openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=BOUND_S) as client:
        named: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
        chosen = client.chat.completions.create(model="tiny", messages=messages, max_tokens=200, seed=4, response_format=named)
        assert chosen.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(chosen.choices[0].message.content or ""), schema)
        plain = client.completions.create(
            model="tiny", prompt="x", max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert plain.choices[0].text in ("yes", "no")
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            client.completions.create(
                model="tiny", prompt="x", extra_body={"structured_outputs": {"json": {"uniqueItems": True}}}
            )
