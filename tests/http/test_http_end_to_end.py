"""HTTP through the real router to scripted workers: what a client sends and how it leaves reaches the workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from raw_http import connect, exchange, head, post

from router.http import serve_http
from testkit.fake_worker import DECODE
from tests.router.local_cluster import LocalCluster, local_cluster, right_ids, right_text

TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await story

    asyncio.run(bounded())


@asynccontextmanager
async def http_cluster(**config: Any) -> AsyncIterator[tuple[LocalCluster, str]]:
    async with local_cluster(**config) as cluster:
        server = await serve_http(cluster.service, cluster.parser, "127.0.0.1", 0)
        try:
            yield cluster, f"http://127.0.0.1:{server.port}"
        finally:
            await server.close()


def client(base: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=60)


async def first_chunk(base: str, cluster: LocalCluster, prompt: Any) -> asyncio.StreamWriter:
    """A stream whose first tokens have arrived; the rest waits behind the decode workers' gates."""
    for worker in cluster.workers:
        if worker.role == DECODE:
            worker.gate.clear()
    reader, writer = await connect(base)
    writer.write(post(COMPLETIONS, {"prompt": prompt, "max_tokens": 50, "stream": True}))
    await reader.readuntil(b"data: ")
    return writer


def test_the_openai_client_gets_the_workers_tokens() -> None:
    async def story() -> None:
        async with http_cluster() as (cluster, base):
            async with client(base) as c:
                whole = await c.completions.create(model=cluster.service.model_name, prompt=[1, 2, 3], max_tokens=20)
                stream = await c.completions.create(
                    model=cluster.service.model_name, prompt=[[1, 2, 3], [4, 5]], max_tokens=20, stream=True
                )
                texts = ["", ""]
                async for chunk in stream:
                    texts[chunk.choices[0].index] += chunk.choices[0].text
                chat = await c.chat.completions.create(
                    model=cluster.service.model_name, messages=[{"role": "user", "content": "hi"}], max_tokens=5
                )
            assert whole.choices[0].text == right_text([1, 2, 3], 20)
            assert texts == [right_text([1, 2, 3], 20), right_text([4, 5], 20)]
            assert whole.model_extra is not None
            report = whole.model_extra["pdserve"]
            assert (report["placement"], report["prefill_worker"], report["decode_worker"]) == (
                "disaggregated",
                "prefill-0",
                "decode-0",
            )
            assert report["kv_bytes"] > 0
            assert chat.choices[0].finish_reason == "length"
            await cluster.assert_idle()

    run(story())


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2], [3, 4], [5]]])
def test_a_client_that_leaves_a_stream_frees_the_workers(prompt: Any) -> None:
    async def story() -> None:
        async with http_cluster() as (cluster, base):
            writer = await first_chunk(base, cluster, prompt)
            await cluster.decode.wait_for(lambda: len(cluster.decode.live_handles) > 0)
            writer.transport.abort()
            await cluster.assert_idle()
            assert cluster.decode.cancelled

    run(story())


def test_the_stop_reason_is_what_stopped_the_output_as_in_vllm() -> None:
    """It is null for the length and for the model's own end, and stands in the last chunk alone."""
    ids = [1, 2, 3]
    drawn = right_ids(ids, 3)
    string = right_text(ids, 3)[len(right_text(ids, 2)) :][1:3]
    cases: list[tuple[dict[str, Any], str, Any]] = [
        ({"stop": ["nowhere", string]}, "stop", string),
        ({"stop_token_ids": [drawn[2]]}, "stop", drawn[2]),
        ({}, "length", None),
    ]

    async def story() -> None:
        async with http_cluster() as (cluster, base), client(base) as c:
            for fields, finish, stopped in cases:
                body: dict[str, Any] = {"model": "tiny", "prompt": ids, "max_tokens": 3, "extra_body": fields}
                choice = (await c.completions.create(**body)).choices[0]
                assert (choice.finish_reason, choice.model_extra) == (finish, {"stop_reason": stopped})
                chunks = [chunk.choices[0] async for chunk in await c.completions.create(**body, stream=True)]
                assert [chunk.model_extra for chunk in chunks] == [{}] * (len(chunks) - 1) + [{"stop_reason": stopped}]
            hi: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            usual = (await c.chat.completions.create(**hi, stop=["nowhere"])).choices[0]
            assert (usual.finish_reason, usual.model_extra) == ("length", {"stop_reason": None})
            await cluster.assert_idle()

    run(story())


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_frees_the_workers() -> None:
    async def story() -> None:
        async with http_cluster() as (cluster, base):
            cluster.decode.gate.clear()
            _, writer = await connect(base)
            writer.write(post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 50}))
            await cluster.decode.wait_for(lambda: len(cluster.decode.live_handles) > 0)
            writer.transport.abort()
            await cluster.assert_idle()

    run(story())


def test_bad_requests_name_the_field_and_the_service_goes_on() -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "other"}, 404, "model"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": [1] * 1000}, 400, "prompt"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"temperature": float("nan")}, 400, "body: is not valid JSON"),
        ({"temperature": 9}, 400, "temperature"),
        ({"repetition_penalty": 1e-300}, 400, "repetition_penalty: must be a number in [0.01, 2]"),
        ({"top_p": -1e-9}, 400, "top_p"),
        ({"min_tokens": 99}, 400, "min_tokens"),
        ({"stop": ""}, 400, "stop"),
        ({"priority": 1000}, 400, "priority"),
        ({"deadline_s": -1}, 504, "deadline"),
    ]

    async def story() -> None:
        async with http_cluster() as (cluster, base):
            for fields, status, name in cases:
                answer = await exchange(base, post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 4, **fields}))
                assert answer.status == status, (fields, answer)
                assert name in answer.error["message"], (fields, answer.error)
            good = await exchange(base, post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 4}))
            assert good.json["choices"][0]["text"] == right_text([1, 2], 4)
            await cluster.assert_idle()

    run(story())


OVERFLOWS: list[tuple[str, str, dict[str, Any]]] = [
    ("completions", "prompt", {"prompt": [1] * 256}),
    ("completions", "prompt", {"prompt": [1] * 20_000}),  # a process of its own parses so large a body
    ("completions", "prompt", {"prompt": "word " * 4000}),
    ("completions", "prompt", {"prompt": "x" * 100_000}),
    ("completions", "prompt[1]", {"prompt": [[1], [1] * 256]}),
    ("completions", "max_tokens", {"prompt": [1, 2], "max_tokens": 255}),
    ("chat/completions", "messages", {"messages": [{"role": "user", "content": "word " * 4000}]}),
    (
        "chat/completions",
        "max_completion_tokens",
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 256},
    ),
    ("responses", "input", {"input": "word " * 4000}),
    ("responses", "max_output_tokens", {"input": "a", "max_output_tokens": 256}),
]


def test_frameworks_know_the_error_of_a_context_that_is_too_long() -> None:
    """litellm 1.110 looks for OpenAI's words in the client's error, and langchain-openai 1.7 for Anthropic's words, since the
    text of openai's error has no code any more. Both then tell their callers of an overflow."""

    async def story() -> None:
        async with http_cluster() as (cluster, base), client(base) as c:
            for path, field, body in OVERFLOWS:
                for stream in (False, True):
                    with pytest.raises(openai.BadRequestError) as caught:
                        await c.post(f"/{path}", cast_to=object, body={**body, "stream": stream})
                    error = caught.value
                    assert (error.code, error.param) == ("context_length_exceeded", field), body.keys()
                    assert "this model's maximum context length is 256 tokens. however, you" in str(error).lower()
                    assert "prompt is too long" in error.message
            await cluster.assert_idle()

    run(story())


def test_a_full_queue_is_429_with_a_hint() -> None:
    async def story() -> None:
        async with http_cluster(max_queued_requests=1) as (cluster, base):
            cluster.decode.refuse_binds = 1 << 30
            _, waiting = await connect(base)
            waiting.write(post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 4}))
            await cluster.decode.wait_for(lambda: cluster.service.snapshot().queued_requests == 1)
            full = await exchange(base, post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 4}))
            assert (full.status, full.error["type"]) == (429, "rate_limit_error")
            assert int(full.headers["retry-after"]) >= 1
            waiting.transport.abort()
            await cluster.decode.wait_for(lambda: cluster.service.snapshot().queued_requests == 0)
            await cluster.assert_idle()

    run(story())


def test_health_follows_the_workers() -> None:
    async def story() -> None:
        async with http_cluster() as (cluster, base):
            assert (await exchange(base, head("GET", "/health"))).status == 200
            await cluster.decode.stop()
            while (await exchange(base, head("GET", "/health"))).status != 503:  # noqa: ASYNC110 - bounded by `run`
                await asyncio.sleep(0.01)
            assert b"pdserve_" in (await exchange(base, head("GET", "/metrics"))).body

    run(story())


def test_health_asks_for_both_pools_where_all_prompts_are_computed_apart() -> None:
    """With `placement: disaggregated` a decode pool alone serves nobody; it was called ready."""

    async def story() -> None:
        async with http_cluster(placement="disaggregated") as (cluster, base):
            assert (await exchange(base, head("GET", "/health"))).status == 200
            await cluster.prefill.stop()
            while (answer := await exchange(base, head("GET", "/health"))).status != 503:  # noqa: ASYNC110 - bounded by `run`
                await asyncio.sleep(0.01)
            assert answer.json == {"status": "unavailable", "reason": "no prefill worker is ready"}
            assert (await exchange(base, post(COMPLETIONS, {"prompt": [1], "max_tokens": 1}))).status == 503

    run(story())


def test_concurrent_requests_with_one_x_request_id_all_run() -> None:
    """A proxy gives one id to all requests of a trace. The second got 400."""

    async def story() -> None:
        async with http_cluster() as (cluster, base):
            for worker in cluster.workers:
                worker.token_interval_s = 0.01
            asks = [post(COMPLETIONS, {"prompt": [1, 2, i], "max_tokens": 10}, X_Request_Id="trace-4711") for i in range(4)]
            answers = await asyncio.gather(*(exchange(base, ask) for ask in asks))
            assert [answer.status for answer in answers] == [200] * 4
            assert {answer.headers["x-request-id"] for answer in answers} == {"trace-4711"}
            own = [answer.headers["pdserve-request-id"] for answer in answers]
            assert len(set(own)) == 4
            for answer, request_id in zip(answers, own, strict=True):
                timeline = answer.json["pdserve"]
                assert (timeline["request_id"], timeline["correlation_id"]) == (request_id, "trace-4711")
                assert answer.json["id"] == f"cmpl-{request_id}"
            await cluster.assert_idle()

    run(story())


def test_a_class_is_named_in_the_body_or_in_a_header() -> None:
    async def story() -> None:
        async with http_cluster() as (cluster, base):
            named = {"X_SLO_Class": "batch", "X_Session_Id": "s"}
            asks = ((named, {}), (named, {"slo_class": "code"}), ({}, {"prompt_cache_key": "s"}), ({"X_SLO_Class": "cod"}, {}))
            answers = [await exchange(base, post(COMPLETIONS, {"prompt": [1, 2], **body}, **head)) for head, body in asks]
            assert [answer.json["pdserve"]["slo_class"] for answer in answers[:3]] == ["batch", "code", "default"]
            assert (answers[3].status, answers[3].error["param"]) == (400, "slo_class")
            assert "'cod' is not a class here; default, voice, code, chat, batch are" in answers[3].error["message"]
            await cluster.assert_idle()

    run(story())
