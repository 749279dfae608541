"""Log-probabilities of long answers: written as they come, so that the loop is not held when the answer ends."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from http_fakes import MODEL, FakeApi, app_of
from raw_http import protocol_post

import router.http.answer
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason, Placement, TokenLogprobs
from router.api.answer import Delta
from router.api.request import GenerateInput
from router.openai.logprobs import LogprobsFormat, logprobs_format
from router.service.buffered_generation import BufferedGeneration

TOKENS, TOP = 500, 20
PATHS = {"/v1/completions": {"prompt": "p", "logprobs": TOP}, "/v1/chat/completions": {
    "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": TOP}}  # fmt: skip


def told(index: int) -> TokenLogprobs:
    return TokenLogprobs(-index - 0.5, tuple(((index + rank) % 9, -float(rank)) for rank in range(TOP)))


class Finished(FakeApi):
    """Every answer is complete before anybody takes of it: the longest that the writing of one can take at a time."""

    async def submit(self, request: GenerateInput) -> Any:
        generation = BufferedGeneration("r", (1,), lambda _: None)
        for i in range(TOKENS):
            last = i + 1 == TOKENS
            generation.push(Delta(i, (i % 9,), '","logprobs":"', FinishReason.LENGTH if last else None, (told(i),)))
        generation.end(Report(Placement.COLOCATED, "", 1, TOKENS), None)
        return generation


class Watched:
    """A format that notes how often the loop has turned whenever it writes, and how many tokens at a time."""

    def __init__(self, inner: LogprobsFormat, turns: list[int], most: list[int]) -> None:
        self._inner, self._turns, self._most = inner, turns, most

    def of(self, ids: Any, logprobs: Any) -> dict[str, Any]:
        self._most.append(len(ids))
        self._turns.append(-1)  # a mark; turns are counted between marks
        return self._inner.of(ids, logprobs)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 8])
def test_a_long_answer_with_logprobs_lets_the_loop_go_on(
    path: str, stream: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,000 tokens with 20 log-probabilities each took 0.8 s at once. Others have their turn between any two tokens, and not
    only after a token of each choice."""
    turns: list[int] = []
    most: list[int] = []
    monkeypatch.setattr(
        router.http.answer,
        "logprobs_format",
        lambda token_bytes, chat: Watched(logprobs_format(token_bytes, chat=chat), turns, most),
    )

    async def run() -> Any:
        async def others() -> None:
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        body = json.dumps({"model": MODEL, "stream": stream, "n": n, **PATHS[path]}).encode()
        try:
            return await protocol_post(app_of(Finished()), path, body)
        finally:
            task.cancel()

    answer = asyncio.run(run())
    assert answer.status == 200
    assert most == [1] * TOKENS * n
    marks = [i for i, turn in enumerate(turns) if turn == -1]
    assert all(1 in turns[a:b] for a, b in itertools.pairwise(marks))


@pytest.mark.parametrize("path", PATHS)
def test_what_is_written_piece_by_piece_is_what_was_written_at_once(path: str) -> None:
    """Also beside text that looks like the place where they go."""
    answer = asyncio.run(protocol_post(app_of(Finished()), path, json.dumps({"model": MODEL, **PATHS[path]}).encode()))
    choice = answer.json["choices"][0]
    chat = "chat" in path
    format_ = logprobs_format(Finished().token_bytes, chat=chat)
    expected = format_.of([i % 9 for i in range(TOKENS)], [told(i) for i in range(TOKENS)])
    assert choice["logprobs"] == expected
    text = choice["message"]["content"] if chat else choice["text"]
    assert text == '","logprobs":"' * TOKENS
    plain = {name: value for name, value in PATHS[path].items() if "logprobs" not in name}
    alone = asyncio.run(protocol_post(app_of(Finished()), path, json.dumps({"model": MODEL, **plain}).encode()))
    assert alone.json["choices"][0]["logprobs"] is None
