"""The prompt in an answer: `echo` of completions and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_fakes import MODEL, WORDS, FakeApi, app_of
from raw_http import protocol_post

from router.openai.echo import PromptView

MESSAGES = [{"role": "user", "content": "hi"}] * 3
PROMPT = list(range(3, 153))  # more than two pieces; the fake's own ids of it are 0, 1, 2, ...
SCORES = [-at - 0.25 for at in range(1, len(PROMPT))]


def post(path: str, **fields: Any) -> Any:
    async def run() -> Any:
        return await protocol_post(app_of(FakeApi()), path, json.dumps({"model": MODEL, **fields}).encode())

    return asyncio.run(run())


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    return [json.loads(one) for one in events[:-1]]


def joined(choices: list[dict[str, Any]], name: str) -> list[Any]:
    return [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][name]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_scores_prompt_and_output_in_one_list(stream: bool) -> None:
    """The lists cover both; the first token has no log-probability; the text begins with the prompt's."""
    answer = post("/v1/completions", prompt=PROMPT, echo=True, logprobs=1, max_tokens=2, stream=stream)
    bodies = chunks_of(answer.body) if stream else [answer.json]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert joined(choices, "token_logprobs") == [None, *SCORES, -0.5, -1.5]
    assert joined(choices, "top_logprobs")[0] is None
    assert len(joined(choices, "tokens")) == len(PROMPT) + 2 == len(joined(choices, "text_offset"))
    text = "".join(choice["text"] for choice in choices)
    assert text.startswith("".join(WORDS))
    assert text.endswith(WORDS[0] + WORDS[1])
    assert all(len(top) <= 2 for top in joined(choices, "top_logprobs")[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_text_is_that_text_and_no_token_may_follow(stream: bool) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = post("/v1/completions", prompt="Ünd so", echo=True, max_tokens=0, **fields)
    bodies = chunks_of(answer.body) if stream else [answer.json]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Ünd so"
    assert choices[-1]["finish_reason"] == "length"
    assert all(choice["logprobs"] is None for choice in choices)
    assert bodies[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_list_each_token_by_id(path: str) -> None:
    """The first entry is null. A token that is not among the likeliest has no rank."""
    prompt: dict[str, Any] = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    choice = post(path, **prompt, prompt_logprobs=2, max_tokens=1).json["choices"][0]
    assert choice["logprobs"] is None
    listed = choice["prompt_logprobs"]
    assert listed[0] is None
    assert listed[1] == {
        "1": {"logprob": -1.25, "decoded_token": WORDS[1], "rank": 1},
        "2": {"logprob": -2.25, "decoded_token": WORDS[2], "rank": 2},
    }
    if path == "/v1/completions":
        assert len(listed) == len(PROMPT)
        only = post(path, **prompt, prompt_logprobs=0, echo=True, logprobs=3, max_tokens=1).json["choices"][0]
        assert only["prompt_logprobs"][5] == {"5": {"logprob": -5.25, "decoded_token": WORDS[5]}}
        assert len(only["logprobs"]["top_logprobs"][2]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_others_have_their_turn_between_pieces_of_the_prompts_of_many_choices(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 64 tokens of 128 prompts took half a second together."""
    written: list[str] = []

    def noted(pieces: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def of(view: PromptView, *given: Any) -> Iterator[Any]:
            for piece in pieces(view, *given):
                written.append("piece")
                yield piece

        return of

    monkeypatch.setattr(PromptView, "echoed", noted(PromptView.echoed))
    monkeypatch.setattr(PromptView, "listed", noted(PromptView.listed))

    async def run() -> Any:
        async def others() -> None:
            while True:
                written.append("turn")
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        listed = {} if stream else {"prompt_logprobs": 1}
        body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 8, "stream": stream} | listed
        try:
            return await protocol_post(app_of(FakeApi()), "/v1/completions", json.dumps(body).encode())
        finally:
            task.cancel()

    assert asyncio.run(run()).status == 200
    assert written.count("piece") == 8 * 3 * (1 if stream else 2)
    assert ("piece", "piece") not in itertools.pairwise(written)
