"""`n`, `best_of` and beam search over HTTP: order, seeds, usage, chunks, and every way such a call ends early."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pytest
from http_fakes import MODEL, WORDS, FakeApi, FakeGeneration, served
from raw_http import post

from pdserve.core.errors import InvalidRequest, Overloaded, ReplicaLost
from pdserve.core.sampling import TokenLogprobs
from router.api.request import GenerateInput
from router.openai.request import candidate_ids, parse_chat, parse_completion

HELLO: list[Any] = [{"role": "user", "content": "Say hello"}]


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story

    asyncio.run(bounded())


async def until(met: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks of this loop bring about. `run` bounds the wait."""
    while not met():  # noqa: ASYNC110 - the fake router tells no events
        await asyncio.sleep(0.001)


def client(base: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=60)


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"prompt": "p", **fields}).encode(), None)


def seeds(api: FakeApi) -> list[int]:
    return [request.sampling["seed"] for request in api.requests]


def test_choices_of_several_prompts_stand_in_openais_order() -> None:
    async def story() -> None:
        api = FakeApi()
        async with served(api) as base, client(base) as c:
            answer = await c.completions.create(model=MODEL, prompt=["a", "bcd"], n=3, seed=-1, max_tokens=2)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert seeds(api) == [2**64 - 1, 0, 1] * 2
        ids = [request.request_id for request in api.requests]
        assert ids == [f"{answer.id.removeprefix('cmpl-')}-{i}" for i in range(6)]
        assert [request.leader for request in api.requests] == ["", ids[0], ids[0], "", ids[3], ids[3]]
        assert [request.prompt for request in api.requests][::3] == ["a", "bcd"]
        assert [g.prompt_ids for g in api.generations[3:]] == [(0, 1, 2)] * 3
        assert [request.prompt for request in api.requests][4:] == [(0, 1, 2)] * 2, "a prompt is encoded once"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1 + 3, 6 * 2)
        assert answer.model_extra is not None
        assert len(answer.model_extra["pdserve"]["requests"]) == 6

    run(story())


def test_choices_without_a_seed_differ_by_one_drawn_for_each_prompt() -> None:
    async def story() -> None:
        api = FakeApi()
        async with served(api) as base, client(base) as c:
            await c.completions.create(model=MODEL, prompt=["a", "a"], n=2, temperature=0)
            await c.chat.completions.create(model=MODEL, messages=HELLO, n=1)
        drawn = seeds(FakeApi(requests=api.requests[:4]))
        assert drawn[1] == (drawn[0] + 1) % 2**64
        assert drawn[3] == (drawn[2] + 1) % 2**64
        assert drawn[0] != drawn[2], "equal prompts of one call get different choices"
        assert "seed" not in api.requests[4].sampling

    run(story())


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_carries_every_choice_and_the_prompt_counts_once(chat: bool) -> None:
    async def story() -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        ask: Any = {"model": MODEL, "n": 3, "stream": True, "stream_options": options, "max_tokens": 4}
        async with served(FakeApi()) as base, client(base) as c:
            if chat:
                stream: Any = await c.chat.completions.create(messages=HELLO, **ask)
            else:
                stream = await c.completions.create(prompt="p", **ask)
            chunks = [chunk async for chunk in stream]
        texts, reasons, roles = ["", "", ""], [None] * 3, [""] * 3
        for chunk in chunks[:-1]:
            (choice,) = chunk.choices
            if chat:
                roles[choice.index] += choice.delta.role or ""
            texts[choice.index] += (choice.delta.content or "") if chat else choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert texts == ["".join(WORDS[:4])] * 3
        assert reasons == ["length"] * 3
        assert roles == ["assistant" if chat else ""] * 3
        order = [chunk.choices[0].index for chunk in chunks[:-1]]
        assert order != sorted(order), "choices run side by side"
        assert chunks[-1].choices == []
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (1, 12)
        told = [chunk.usage for chunk in chunks[:-1] if chunk.usage]
        assert max(usage.completion_tokens for usage in told) == 4

    run(story())


class Ranked(FakeApi):
    """Candidate i has the log-probability -(i - 2)^2 for each token, so number 2 is the likeliest; later ones are longer."""

    async def submit(self, request: GenerateInput) -> FakeGeneration:
        generation = await super().submit(request)
        number = len(self.generations) - 1
        generation._words = WORDS[: 1 + number]
        told = generation._told
        generation._told = lambda i: tuple(TokenLogprobs(-float((number - 2) ** 2), t.top) for t in told(i))  # type: ignore[method-assign]
        return generation


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_best_of_returns_the_likeliest_first_and_counts_all(logprobs: int | None) -> None:
    async def story() -> None:
        api = Ranked()
        async with served(api) as base, client(base) as c:
            answer = await c.completions.create(model=MODEL, prompt="p", n=2, best_of=5, seed=7, logprobs=logprobs)
        assert [choice.text for choice in answer.choices] == ["".join(WORDS[:3]), "".join(WORDS[:2])]
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 1 + 2 + 3 + 4 + 5)
        assert seeds(api) == [7, 8, 9, 10, 11]
        assert {request.sampling["logprobs"] for request in api.requests} == {logprobs or 0}
        told = answer.choices[0].logprobs
        assert (told is not None) == (logprobs is not None)
        if told is not None:
            assert told.token_logprobs == [-0.0] * 3

    run(story())


def test_best_of_n_ranks_nothing_and_may_stream() -> None:
    assert "logprobs" not in completion(n=3, best_of=3, stream=True).inputs[0].sampling
    assert completion(length_penalty=1, best_of=1, use_beam_search=False).choices.plain
    call = completion(prompt=["a", "b"], n=1, best_of=4)
    assert candidate_ids(call, 1) == tuple(f"{call.request_id}-{i}" for i in range(4, 8))


BAD: list[tuple[str, dict[str, Any]]] = [
    ("n: must be from 1 to 128, got 129", {"n": 129}),
    ("n: must be from 1 to 128, got 1000000000", {"n": 10**9}),
    ("n: must be an integer, got a boolean", {"n": True}),
    ("best_of: must be at least n, which is 3, got 2", {"n": 3, "best_of": 2}),
    ("best_of: must be from 1 to 128, got 129", {"best_of": 129}),
    ("best_of: must be n with stream", {"best_of": 2, "stream": True}),
    ("n: 200 prompts with 2 choices each are 400 choices; one call may have at most 256", {"prompt": ["p"] * 200, "n": 2}),
    ("best_of: 3 prompts with 100 choices", {"prompt": ["p"] * 3, "best_of": 100}),
    ("length_penalty: is only allowed with use_beam_search", {"length_penalty": 0.5}),
    ("length_penalty: must be a number, got a string", {"length_penalty": "1", "use_beam_search": True}),
    ("n: must be from 1 to 10 with use_beam_search", {"use_beam_search": True, "n": 11}),
    ("stream: is not allowed", {"use_beam_search": True, "stream": True}),
    ("best_of: is not allowed", {"use_beam_search": True, "best_of": 4}),
    ("temperature: must be 0 or not set", {"use_beam_search": True, "temperature": 1.0}),
    ("length_penalty: must be a number in [-10, 10]", {"use_beam_search": True, "length_penalty": 11}),
    ("num_speculative_tokens: must be 0 or not set beside a beam", {"use_beam_search": True, "num_speculative_tokens": 3}),
    ("response_format: is not allowed", {"use_beam_search": True, "response_format": {"type": "json_object"}}),
    ("structured_outputs: is not allowed", {"use_beam_search": True, "structured_outputs": {"regex": "a"}}),
    *(
        (f"{name}: is not allowed beside a beam search", {"use_beam_search": True, name: value})
        for name, value in {
            "logprobs": 0, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "stop": "x", "stop_token_ids": [1], "min_tokens": 1,
            "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"1": 1},
            "include_stop_str_in_output": True, "skip_special_tokens": False,
        }.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("message", "fields"), BAD)
def test_choices_that_make_no_sense_are_refused_by_name(message: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.message.startswith(message)


def test_neutral_fields_beside_a_beam_search_ask_for_nothing() -> None:
    neutral = {"temperature": 0, "top_k": -1, "top_p": 1, "stop": [], "logit_bias": {}, "presence_penalty": 0, "seed": 5}
    body = {"messages": HELLO, "use_beam_search": True, "n": 4, "length_penalty": 0, "best_of": 1, **neutral}
    choices = parse_chat(json.dumps(body).encode(), None).choices
    assert (choices.n, choices.beam_width, choices.length_penalty) == (4, 4, 0.0)


def test_one_failed_choice_fails_the_call_and_frees_the_others() -> None:
    async def story() -> None:
        for error, status in ((ReplicaLost("all workers are gone"), 503), (Overloaded("full", retry_after_s=1.0), 429)):
            api = FakeApi(error=error, fail_at=2)
            async with served(api) as base, client(base) as c:
                with pytest.raises(openai.APIStatusError) as caught:
                    await c.completions.create(model=MODEL, prompt="p", n=8)
            assert caught.value.status_code == status
            assert len(api.generations) == 8
            assert all(generation.closed for generation in api.generations)

    run(story())


class Full(FakeApi):
    """Takes three requests."""

    async def submit(self, request: GenerateInput) -> FakeGeneration:
        if len(self.requests) == 3:
            raise Overloaded("the queue is full", retry_after_s=1.0)
        return await super().submit(request)


def test_a_choice_that_finds_no_room_ends_those_before_it() -> None:
    async def story() -> None:
        api = Full()
        api.gate.clear()
        async with served(api) as base, client(base) as c:
            with pytest.raises(openai.RateLimitError):
                await c.completions.create(model=MODEL, prompt="p", n=8, stream=True)
        assert [generation.closed for generation in api.generations] == [True] * 3

    run(story())


def test_a_client_that_leaves_a_hundred_choices_cancels_all() -> None:
    async def story() -> None:
        api = FakeApi()
        api.gate.clear()
        async with served(api) as base:
            async with client(base) as c:
                asking = asyncio.create_task(c.completions.create(model=MODEL, prompt="p", n=128, max_tokens=9))
                await until(lambda: len(api.generations) == 128)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            await until(lambda: all(generation.closed for generation in api.generations))

    run(story())


def test_a_client_that_reads_nothing_of_its_choices_is_dropped_with_all() -> None:
    async def story() -> None:
        api = FakeApi(words=("w" * 100_000,) * 10_000)
        async with served(api, stalled_client_s=0.5) as base:
            host, port = base.removeprefix("http://").split(":")
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await asyncio.to_thread(sock.connect, (host, int(port)))
                sock.sendall(post("/v1/completions", {"prompt": "p", "n": 16, "stream": True, "max_tokens": 10_000}))
                await until(lambda: len(api.generations) == 16 and all(one.closed for one in api.generations))
        assert not any(generation.finished for generation in api.generations)

    run(story())


class Scored(FakeApi):
    """Every output has the same likeliest next tokens: word 1, then word 0, then the end, and so on."""

    TOP = ((2, -0.5), (1, -1.0), (0, -2.0), (3, -3.0))

    async def submit(self, request: GenerateInput) -> FakeGeneration:
        generation = await super().submit(request)
        assert request.sampling == {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "logprobs": 4}
        generation._told = lambda _: (TokenLogprobs(-0.5, self.TOP),)  # type: ignore[method-assign]
        if not isinstance(request.prompt, str) and isinstance(request.prompt[0], int):
            generation.prompt_ids = request.prompt  # type: ignore[assignment]
        return generation

    def text_of(self, ids: Any, *, after: Any) -> str:
        return "".join(WORDS[i] for i in ids if i)


def test_beams_come_best_first_and_their_requests_name_the_call() -> None:
    async def story() -> None:
        api = Scored()
        async with served(api) as base, client(base) as c:
            ask: Any = {"model": MODEL, "n": 2, "max_tokens": 3, "extra_body": {"use_beam_search": True, "ignore_eos": True}}
            answer = await c.completions.create(prompt="pq", **ask)
            chat = await c.chat.completions.create(messages=HELLO, **ask)
        texts = [choice.text for choice in answer.choices]
        assert texts == ["".join(WORDS[i] for i in ids) for ids in ((2, 2, 2), (2, 2, 1))]
        assert [choice.message.content for choice in chat.choices] == texts
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)
        first = [request for request in api.requests if request.correlation_id == answer.id.removeprefix("cmpl-")]
        assert [request.prompt for request in first] == ["pq", (0, 1, 2), (0, 1, 1), (0, 1, 2, 2), (0, 1, 2, 1)]

    run(story())


def test_the_end_of_sequence_ends_beams() -> None:
    async def story() -> None:
        async with served(Scored()) as base, client(base) as c:
            ask: Any = {"model": MODEL, "prompt": "p", "n": 2, "max_tokens": 3}
            answer = await c.completions.create(**ask, extra_body={"use_beam_search": True, "length_penalty": -1})
            endless = await c.completions.create(**ask, extra_body={"use_beam_search": True, "ignore_eos": True})
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
        assert answer.choices[0].text == ""
        assert [choice.finish_reason for choice in endless.choices] == ["length", "length"]

    run(story())


def test_tools_beside_a_beam_search_are_refused() -> None:
    async def story() -> None:
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
        api = FakeApi()
        async with served(api) as base, client(base) as c:
            with pytest.raises(openai.BadRequestError, match="tools: are not allowed beside a beam search"):
                await c.chat.completions.create(
                    model=MODEL, messages=HELLO, tools=[tool], n=2, extra_body={"use_beam_search": True}
                )
        assert not api.requests

    run(story())


def test_each_choice_of_a_chat_has_its_messages() -> None:
    """The router reads calls and reasoning from the output of a chat, and of nothing else."""

    async def story() -> None:
        api = FakeApi()
        async with served(api) as base, client(base) as c:
            await c.chat.completions.create(model=MODEL, messages=HELLO, n=3)
        assert len({str(request.prompt) for request in api.requests}) == 1

    run(story())


def test_a_search_longer_than_the_context_is_refused() -> None:
    async def story() -> None:
        api = Scored(max_prompt_tokens=10)
        async with served(api) as base, client(base) as c:
            with pytest.raises(openai.BadRequestError, match=r"max_tokens: .*, 11 in the completion"):
                await c.completions.create(model=MODEL, prompt="p", n=2, max_tokens=11, extra_body={"use_beam_search": True})
            whole = await c.chat.completions.create(
                model=MODEL, messages=HELLO, n=2, extra_body={"use_beam_search": True, "ignore_eos": True}
            )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 2 * 10

    run(story())


class Busy(Scored):
    """Refuses the second request of a search once, and all after a number."""

    refusals = 0
    refuse_from = 1 << 30

    async def submit(self, request: GenerateInput) -> FakeGeneration:
        if (len(self.requests) == 1 and not self.refusals) or len(self.requests) >= self.refuse_from:
            self.refusals += 1
            raise Overloaded("the queue is full", retry_after_s=0.01)
        return await super().submit(request)


def test_a_search_waits_while_the_router_is_overloaded_but_not_beyond_its_deadline() -> None:
    async def story() -> None:
        api = Busy()
        body: Any = {"use_beam_search": True, "deadline_s": 2}
        async with served(api) as base, client(base) as c:
            ask: Any = {"model": MODEL, "prompt": "p", "n": 2, "max_tokens": 3, "extra_body": body}
            assert len((await c.completions.create(**ask)).choices) == 2
            assert api.refusals == 1
            api.refuse_from = len(api.requests) + 2
            with pytest.raises((openai.RateLimitError, openai.APITimeoutError, openai.InternalServerError)):
                await c.completions.create(**ask)
            assert api.refusals > 2

    run(story())


def test_a_client_that_leaves_a_search_leaves_nothing() -> None:
    async def story() -> None:
        api = Scored()
        async with served(api) as base:
            async with client(base) as c:
                body: Any = {"use_beam_search": True, "ignore_eos": True}
                asking = asyncio.create_task(
                    c.completions.create(model=MODEL, prompt="p", n=2, max_tokens=4000, extra_body=body)
                )
                await until(lambda: len(api.generations) > 4)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            await asyncio.sleep(0)
        count = len(api.generations)
        assert count < 4000
        assert all(generation.closed for generation in api.generations)

    run(story())
