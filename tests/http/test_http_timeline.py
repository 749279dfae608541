"""Every answer says how it was served, and a failure never looks like an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from http_fakes import MODEL, WORDS, FakeApi, served
from raw_http import exchange, post

from pdserve.core.error_table import CLASSES, TABLE
from pdserve.core.errors import DeadlineExceeded, ErrorCode, InternalBug, Overloaded, ReplicaLost
from pdserve.rpc.status import TIMELINE_METADATA, from_reason, to_reason

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "p"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
PHASES = {
    "queue_s", "prefill_start_s", "prefill_end_s", "reserve_s", "transfer_s", "commit_s", "kv_committed_s", "first_decode_s",
    "attempts", "binds",
}  # fmt: skip


def events(body: bytes) -> list[Any]:
    """Of a stream, in order; [DONE] as it is."""
    lines = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


async def ask(api: FakeApi, path: str, **fields: Any) -> Any:
    async with served(api) as base:
        return await exchange(base, post(path, {**BODIES[path], **fields}))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_whole_answer_has_its_timeline_in_a_header(path: str) -> None:
    answer = asyncio.run(ask(FakeApi(), path))
    timeline = json.loads(answer.headers[TIMELINE_METADATA])
    assert timeline.keys() >= PHASES
    assert timeline == answer.json["pdserve"]
    assert timeline["prefill_worker"] == "prefill-0"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
def test_the_last_chunk_of_a_stream_has_it_and_no_other(path: str, options: Any) -> None:
    answer = asyncio.run(ask(FakeApi(), path, stream=True, stream_options=options))
    *chunks, done = events(answer.body)
    assert done == b"[DONE]"
    assert chunks[-1]["pdserve"].keys() >= PHASES
    assert not any("pdserve" in chunk for chunk in chunks[:-1])


def test_many_prompts_have_their_timelines_in_the_body_alone() -> None:
    """A header of hundreds of them would be over what clients and proxies take."""
    answer = asyncio.run(ask(FakeApi(), COMPLETIONS, prompt=["a", "b"]))
    assert TIMELINE_METADATA not in answer.headers
    assert len(answer.json["pdserve"]["requests"]) == 2
    streamed = asyncio.run(ask(FakeApi(), COMPLETIONS, prompt=["a", "b"], stream=True))
    assert sum("pdserve" in chunk for chunk in events(streamed.body)[:-1]) == 2


@pytest.mark.parametrize("code", list(ErrorCode))
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_its_own_status_never_a_200(code: ErrorCode, stream: bool) -> None:
    """(1) Refused at submit: it never ran. (2) Failed after: the header says how far it came."""
    error = from_reason(to_reason(code), "told")
    assert type(error) is CLASSES[code]
    refused = asyncio.run(ask(FakeApi(error=error), CHAT, stream=stream))
    failed = asyncio.run(ask(FakeApi(error=error, fail_at=0), CHAT, stream=stream))
    for answer in (refused, failed):
        assert (answer.status, answer.error["type"]) == (TABLE[code].http, TABLE[code].openai_type)
        assert ("retry-after" in answer.headers) == TABLE[code].client_retries
    assert TIMELINE_METADATA not in refused.headers
    assert json.loads(failed.headers[TIMELINE_METADATA]).keys() >= PHASES


def test_a_whole_answer_that_fails_at_its_last_token_is_an_error() -> None:
    answer = asyncio.run(ask(FakeApi(error=ReplicaLost("gone"), fail_at=len(WORDS) - 1), CHAT))
    assert (answer.status, answer.error["code"]) == (503, "replica_lost")
    assert TIMELINE_METADATA in answer.headers


@pytest.mark.parametrize("error", [ReplicaLost("gone"), DeadlineExceeded("late"), Overloaded("full", retry_after_s=2)])
def test_a_stream_that_fails_ends_with_an_error_event_and_without_done(error: Any) -> None:
    answer = asyncio.run(ask(FakeApi(error=error, fail_at=3), COMPLETIONS, stream=True))
    *chunks, last = events(answer.body)
    assert answer.status == 200  # three words were on their way already
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(WORDS[:3])
    assert last["error"]["code"] == error.code.value
    assert last["pdserve"].keys() >= PHASES


def test_a_stream_without_an_end_is_our_bug_and_not_an_answer() -> None:
    answer = asyncio.run(ask(FakeApi(finishes=False), COMPLETIONS, stream=True))
    last = events(answer.body)[-1]
    assert last["error"]["code"] == InternalBug.code.value
    assert asyncio.run(ask(FakeApi(finishes=False), COMPLETIONS)).status == 500


def test_the_public_client_takes_it_all() -> None:
    async def run() -> None:
        async with (
            served(FakeApi()) as base,
            openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            raw = await client.chat.completions.with_raw_response.create(model=MODEL, **BODIES[CHAT])
            assert json.loads(raw.headers[TIMELINE_METADATA])["binds"] == 1
            stream = await client.chat.completions.create(model=MODEL, stream=True, **BODIES[CHAT])
            chunks = [chunk async for chunk in stream]
            assert (chunks[-1].model_extra or {})["pdserve"]["attempts"] == 1
            assert chunks[-1].choices[0].finish_reason == "length"

    asyncio.run(run())
