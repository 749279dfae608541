"""Answers that are large, and clients that take them slowly: what the router holds for them has a bound."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # the fake router of all tests of HTTP

from http_fakes import MODEL, FakeApi, served
from raw_http import exchange, post

from router.http.reply import PIECE_BYTES, Reply

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
SETTING = "router.max_inflight_answer_bytes"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "p"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": True}


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        (CHATS, {**CHAT, "top_logprobs": 20, "n": 128, "max_completion_tokens": 8000}, "top_logprobs"),
        (COMPLETIONS, {**BODY, "logprobs": 20, "n": 128, "max_tokens": 8000}, "logprobs"),
    ],
)
def test_choices_whose_log_probabilities_would_take_gigabytes_are_refused_by_name(
    path: str, asked: dict[str, Any], field: str
) -> None:
    async def run() -> None:
        api = FakeApi()
        async with served(api) as base:
            refused = await exchange(base, post(path, asked))
            assert (refused.status, refused.error["param"]) == (400, field)
            assert SETTING in refused.error["message"]
            assert not api.requests
            for fewer in ({"n": 2}, {"stream": True, "n": 3}):
                assert (await exchange(base, post(path, {**asked, **fewer}))).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "asked", "word"),
    [
        (CHATS, {**CHAT, "top_logprobs": 20}, "word"),
        (COMPLETIONS, {**BODY, "prompt_logprobs": 20, "prompt": "p" * 400}, "word"),
        (COMPLETIONS, {**BODY, "prompt": ["p"] * 10}, "word" * 100),
        ("/v1/responses", {"model": MODEL, "input": "x"}, "word" * 1000),
    ],
)
def test_an_answer_that_outgrows_the_memory_of_all_is_given_up(path: str, asked: dict[str, Any], word: str) -> None:
    async def run() -> None:
        name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        async with served(FakeApi(words=(word,) * 400), max_inflight_answer_bytes=200_000) as base:
            refused = await exchange(base, post(path, {**asked, name: 400}))
            assert (refused.status, refused.error["param"]) == (413, "answer")
            assert SETTING in refused.error["message"]
            assert (await exchange(base, post(path, {**asked, name: 4}))).status == (413 if "prompt_logprobs" in asked else 200)

    asyncio.run(run())


def test_answers_that_are_gathered_share_the_memory_and_give_it_back() -> None:
    """(1) Two are gathered at once, and the second is told to come later; (2) afterwards there is room again."""

    async def run() -> None:
        api = FakeApi(words=("w" * 1000,) * 120)
        async with served(api, max_inflight_answer_bytes=100_000) as base:
            request = post(COMPLETIONS, {**BODY, "max_tokens": 120})
            both = await asyncio.gather(*(exchange(base, request) for _ in range(2)))
            assert sorted(answer.status for answer in both) == [200, 429]
            refused = max(both, key=lambda answer: answer.status)
            assert (refused.error["code"], refused.headers["retry-after"]) == ("overloaded", "1")
            assert (await exchange(base, request)).status == 200

    asyncio.run(run())


def test_a_long_answer_is_handed_over_in_pieces_as_the_client_takes_them() -> None:
    """It was written whole, so the transport held a second and a third copy of it."""

    class Slow:
        """Takes one piece in a turn of the loop, and sees what is left."""

        def __init__(self) -> None:
            self.pieces: list[bytes] = []
            self.left: list[int] = []

        async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes, *, more: bool) -> None:
            self.length = int(dict(headers)[b"content-length"])
            await self.write(body, more=more)

        async def write(self, body: bytes, *, more: bool) -> None:
            await asyncio.sleep(0)
            self.pieces.append(body)
            self.left.append(sum(map(len, parts)))
            assert more == (self.length > sum(map(len, self.pieces)))

    parts = [b"[", b"a" * 3 * PIECE_BYTES, b",", b"b" * (PIECE_BYTES - 3), b"]"]
    body = b"".join(parts)

    async def run() -> None:
        slow = Slow()
        await Reply(slow).parts(200, parts)
        assert (b"".join(slow.pieces), slow.length) == (body, len(body))
        assert max(map(len, slow.pieces)) < 2 * PIECE_BYTES
        assert slow.left[-1] == 0
        assert slow.left[2] < len(body) // 2

    asyncio.run(run())
