"""The whole service as clients see it: the public openai client, placements, stop strings, bad requests among good ones."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from real_service import APART, AUTO, BOUND_S, GREEDY, TOGETHER, tiny

from pdserve.config import RouterConfig
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pdserve_bench.load.generator import run_load
from pdserve_bench.load.grpc_target import GrpcTarget
from pdserve_bench.load.http_target import BaseUrl, HttpOptions, HttpTarget, ask_server
from pdserve_bench.load.schedule import RunLimits
from pdserve_bench.load.target import RequestOptions, Target
from pdserve_bench.row import BenchRow
from pdserve_bench.workload.request import AnswerOf, BenchRequest
from testkit.client import generate, generate_all, request
from testkit.processes import ProcessCluster

pytestmark = pytest.mark.cluster

MODEL = "tiny"
HELLO: list[Any] = [{"role": "user", "content": "Hello there, people of this world"}]
PARTS: list[Any] = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
KEEP_GOING: dict[str, Any] = {"ignore_eos": True, "not_a_field": [1]}  # ours, and one that nobody knows
LIMIT = 256


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    rules_only = RouterConfig(colocate_by_cost=False)  # measured costs differ from run to run
    with ProcessCluster(tiny(dtype="bfloat16", max_model_len=LIMIT), prefill=1, decode=2, router=rules_only) as running:
        yield running


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=BOUND_S) as opened:
        yield opened


def test_load_generator_measures_the_service_by_both_apis(cluster: ProcessCluster) -> None:
    """Each request of a conversation has one whole row by gRPC and by HTTP, and the router's report of it is in the row."""
    turns = [
        BenchRequest(0, ((1, 2, 3),), 4),
        BenchRequest(1, ((1, 2, 3), AnswerOf(0), (4, 5)), 4, after=(0,), session="s"),
        BenchRequest(2, ((9, 9),), 4, slo_class="chat"),
    ]

    async def measure() -> list[list[BenchRow]]:
        url = BaseUrl.parse(f"http://{cluster.http}")
        info = await ask_server(url)
        assert info.ours
        options = RequestOptions(model=info.model)
        http = HttpOptions(ours=True, continuous_usage=True)
        targets: list[Target] = [GrpcTarget(cluster.grpc, options), HttpTarget(url, options, http)]
        try:
            return [
                await run_load(iter(turns), target, RunLimits(request_timeout_s=BOUND_S), encode=lambda text: (7,) * 4)
                for target in targets
            ]
        finally:
            for target in targets:
                await target.close()

    for rows in asyncio.run(measure()):
        assert sorted((row.number, row.error, row.prompt_tokens, row.output_tokens) for row in rows) == [
            (0, "", 3, 4),
            (1, "", 9, 4),
            (2, "", 2, 4),
        ]
        for row in rows:
            assert sum(tokens for _, tokens in row.arrivals) == 4
            assert row.served.placement in ("disaggregated", "colocated")
            assert row.served.decode_worker
            assert row.served.attempts == 1


def text_of(stream: Any) -> tuple[str, Any]:
    """A completion stream's text and its usage."""
    text, usage = "", None
    for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_seed_gives_one_text_streamed_or_whole_in_either_placement(client):
    texts, usages = set(), set()
    for placement in ("disaggregated", "colocated", "auto"):
        body = {**KEEP_GOING, "placement": placement}
        fields: dict[str, Any] = {"model": MODEL, "prompt": "Once there was", "max_tokens": 20, "seed": 5, "temperature": 0.9}
        whole = client.completions.create(**fields, extra_body=body)
        text, usage = text_of(
            client.completions.create(**fields, extra_body=body, stream=True, stream_options={"include_usage": True})
        )
        assert whole.usage is not None
        texts |= {whole.choices[0].text, text}
        usages |= {(u.prompt_tokens, u.completion_tokens, u.total_tokens) for u in (whole.usage, usage)}
        assert whole.choices[0].finish_reason == "length"
        moved = whole.model_extra["pdserve"]["kv_bytes"]
        assert (moved == 0) == (placement == "colocated")
    assert len(texts) == 1
    ((prompt, completion, total),) = usages
    assert (completion, total) == (20, prompt + 20)
    other = client.completions.create(
        model=MODEL, prompt="Once there was", max_tokens=20, seed=6, temperature=0.9, extra_body=KEEP_GOING
    )
    assert other.choices[0].text not in texts


def test_logprobs_are_one_answer_streamed_or_whole_in_either_placement(client):
    """Of the drawn token it is that of its place among the likeliest, and these lie in order."""
    told = []
    for placement in ("disaggregated", "colocated"):
        fields: dict[str, Any] = {
            "model": MODEL, "messages": HELLO, "max_tokens": 8, "seed": 4, "temperature": 0.8, "logprobs": True,
            "top_logprobs": 4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"70": 1.5},
            "extra_body": {**KEEP_GOING, "placement": placement, "repetition_penalty": 1.2},
        }  # fmt: skip
        whole = client.chat.completions.create(**fields).choices[0].logprobs
        chunks = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**fields, stream=True)]
        assert whole is not None
        told += [whole.content, [one for part in chunks if part for one in part.content]]
    assert all(one == told[0] for one in told)
    assert len(told[0]) == 8
    for one in told[0]:
        values = [top.logprob for top in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 4
        assert sum(math.exp(value) for value in values) <= 1 + 1e-5
        assert one.logprob <= values[0]
        assert all(one.logprob == top.logprob for top in one.top_logprobs if top.bytes == one.bytes)


def test_biases_rule_a_token_in_and_out(client):
    fields: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 5, "temperature": 0, "logprobs": 0}
    forced = client.completions.create(**fields, logit_bias={"72": 100})
    assert forced.choices[0].logprobs.tokens == ["f"] * 5 == list(forced.choices[0].text)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**fields, logit_bias={"512": 1})
    assert caught.value.param == "logit_bias"


def test_chat_streamed_whole_and_in_parts_is_one_answer(client):
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_completion_tokens": 12, "extra_body": KEEP_GOING}
    whole = client.chat.completions.create(messages=HELLO, **fields)
    parts = client.chat.completions.create(messages=PARTS, **fields)
    chunks = list(client.chat.completions.create(messages=HELLO, stream=True, **fields))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content == parts.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


def test_a_response_is_the_answer_of_a_chat_token_for_token(client):
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0.9, "extra_body": {"seed": 11, "ignore_eos": True}}
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be brief"}, *HELLO], max_completion_tokens=16, logprobs=True, **fields
    )
    own: dict[str, Any] = {
        "instructions": "Be brief", "input": HELLO, "max_output_tokens": 16,
        "include": ["message.output_text.logprobs"], **fields,
    }  # fmt: skip
    whole = client.responses.create(**own)
    with client.responses.stream(**own) as stream:
        events = list(stream)
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    final = events[-1].response
    tokens = [(one.token, one.logprob) for one in chat.choices[0].logprobs.content]
    assert len(tokens) == 16
    assert [(one.token, one.logprob) for one in whole.output[0].content[0].logprobs] == tokens
    assert [(one.token, one.logprob) for one in streamed] == tokens
    assert whole.output_text == final.output_text == chat.choices[0].message.content
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 16)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_token_ids_and_several_prompts(client):
    one = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4, temperature=0)
    both = client.completions.create(model=MODEL, prompt=[[1, 2, 3], [4, 5]], max_tokens=4, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == one.choices[0].text
    assert both.usage is not None
    assert both.usage.prompt_tokens == 5


def boundary(begin: str, text: str) -> str | None:
    """A stop string of the last character of `begin` and the next of `text`, where it first occurs just there."""
    if not begin or not text.startswith(begin) or len(text) == len(begin):
        return None
    stop = text[len(begin) - 1 : len(begin) + 1]
    return stop if "\ufffd" not in stop and text.find(stop) == len(begin) - 1 else None


@pytest.mark.parametrize("tokens", [1, 4], ids=["over the handoff", "within decode"])
def test_stop_strings_that_span_tokens_cut_the_same_text_in_both_placements(cluster, client, tokens):
    """Over the handoff: the first character comes from the prefill worker's token, the second from the decode worker's.

    The texts of so many tokens and of all are asked for apart: a message of a stream holds as many tokens as were there.
    """
    found = 0
    for n in range(40):
        prompt = f"{n} people of this world"
        lengths = [request(prompt, APART, max_tokens=length, **GREEDY) for length in (tokens, 16)]
        begin, text = (answer.text for answer in generate_all(cluster.grpc, lengths))
        stop = boundary(begin, text)
        if stop is None:
            continue
        found += 1
        expected = text.partition(stop)[0]
        for placement in (APART, TOGETHER):
            (answer,) = generate_all(cluster.grpc, [request(prompt, placement, max_tokens=16, stop=[stop], **GREEDY)])
            assert answer.text == expected
            assert answer.finish_reason == common_pb2.FINISH_REASON_STOP
        made = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stop=[stop, "never there"], extra_body=KEEP_GOING
        )
        assert (made.choices[0].text, made.choices[0].finish_reason) == (expected, "stop")
        if found == 3:
            return
    raise AssertionError(f"only {found} of 40 prompts have such a stop string")


def test_placement_is_chosen_by_the_request(cluster):
    by_placement = {APART: ("prefill-0", "requested"), TOGETHER: ("", "requested"), AUTO: ("prefill-0", "default")}
    for placement, (worker, reason) in by_placement.items():
        (answer,) = generate_all(cluster.grpc, [request("hello", placement, max_tokens=2)])
        assert (answer.report.prefill_worker, answer.report.placement_reason) == (worker, reason)


GRPC_BAD: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({"prompt": []}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ({"prompt": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ({"prompt": [512]}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ({"prompt": [1] * LIMIT}, grpc.StatusCode.INVALID_ARGUMENT, str(LIMIT)),
    ({"prompt": "a", "max_tokens": LIMIT}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    ({"prompt": "a", "temperature": math.nan}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    ({"prompt": "a", "model": "other"}, grpc.StatusCode.NOT_FOUND, "model"),
    ({"prompt": "a", "deadline_s": -1.0}, grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_s"),
]
HTTP_BAD: list[tuple[bytes, int, str]] = [
    (b"{", 400, "JSON"),
    (b'{"prompt": 3}', 400, "prompt"),
    (b'{"prompt": "a", "max_tokens": "5"}', 400, "max_tokens"),
    (b'{"prompt": "a", "max_tokens": -5}', 400, "max_tokens"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "body"),
    (b'{"prompt": "a", "model": "other"}', 404, "model"),
    (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', 413, "8388608"),
]


def bad_message(fields: dict[str, Any]) -> inference_pb2.GenerateRequest:
    own = {name: fields[name] for name in ("model", "deadline_s") if name in fields}
    sampling = {name: value for name, value in fields.items() if name not in (*own, "prompt")}
    message = request(fields["prompt"], **sampling)
    message.MergeFrom(inference_pb2.GenerateRequest(**own))
    return message


def post(address: str, body: bytes) -> tuple[int, str]:
    wanted = urllib.request.Request(f"http://{address}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(wanted, timeout=BOUND_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.loads(exc.read())["error"]["message"]


def test_bad_requests_leave_the_good_ones_alone(cluster):
    """Each is refused with its code and a message that names the field; the good ones get what they get alone."""
    placements = (APART, TOGETHER)
    good = [request(f"number {n} of these", placements[n % 2], max_tokens=24, **GREEDY) for n in range(16)]
    alone = [answer.ids for answer in generate_all(cluster.grpc, good, concurrency=1)]

    async def refused(stub: inference_pb2_grpc.InferenceStub, case: tuple[dict[str, Any], grpc.StatusCode, str]) -> None:
        fields, code, says = case
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, bad_message(fields))
        assert caught.value.code() is code, fields
        assert says in (caught.value.details() or ""), fields

    async def refused_http(case: tuple[bytes, int, str]) -> None:
        body, status, says = case
        got, message = await asyncio.to_thread(post, cluster.http, body)
        assert got == status, body[:60]
        assert says in message, body[:60]

    async def run() -> list[list[int]]:
        async with grpc.aio.insecure_channel(cluster.grpc) as channel, asyncio.TaskGroup() as group:
            stub = inference_pb2_grpc.InferenceStub(channel)
            tasks = []
            for n, message in enumerate(good):
                tasks.append(group.create_task(generate(stub, message)))
                group.create_task(refused(stub, GRPC_BAD[n % len(GRPC_BAD)]))
                group.create_task(refused_http(HTTP_BAD[n % len(HTTP_BAD)]))
        return [task.result().ids for task in tasks]

    assert asyncio.run(run()) == alone
    cluster.assert_empty()
