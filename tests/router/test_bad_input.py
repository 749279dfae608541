"""Every way a client can be wrong gets its status and a message that names the field and the limit; others are served."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.rpc.v1 import inference_pb2
from pdserve.text.tokenizer import Tokenizer
from router.api.request import ChatMessage, GenerateInput, TokenizeInput

from .local_cluster import generate_request, local_cluster, right_ids
from .test_end_to_end import failure, run

Request = inference_pb2.GenerateRequest
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def changed(change: Callable[[Request], object]) -> Request:
    request = generate_request((1, 2, 3), 4)
    change(request)
    return request


def sampled(**values: Any) -> Request:
    request = generate_request((1, 2, 3), 4)
    for name, value in values.items():
        setattr(request.sampling, name, value)
    return request


def chat(role: str, content: str) -> Request:
    return Request(chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role=role, content=content)]))


TABLE = {  # values beyond the limits of single fields: tests/router/service/test_request_fields.py
    "no prompt": (Request(), INVALID, ["prompt"]),
    "empty text": (Request(text=""), INVALID, ["prompt", "empty"]),
    "no ids": (Request(tokens=inference_pb2.TokenPrompt()), INVALID, ["prompt", "empty"]),
    "no messages": (Request(chat=inference_pb2.ChatPrompt()), INVALID, ["messages", "empty"]),
    "id out of range": (generate_request((1, 512), 4), INVALID, ["prompt", "512", "511"]),
    "prompt too long": (generate_request([1] * 256, 4), INVALID, ["prompt", "256", "max_model_len"]),
    "text too long": (Request(text="word " * 4000), INVALID, ["prompt", "max_model_len", "256"]),
    "text far too long": (Request(text="x" * 100_000), INVALID, ["prompt", "max_model_len"]),
    "chat too long": (chat("user", "word " * 4000), INVALID, ["messages", "max_model_len"]),
    "unknown model": (changed(lambda r: setattr(r, "model", "gpt")), grpc.StatusCode.NOT_FOUND, ["model", "gpt", "tiny"]),
    "max_tokens over what fits": (sampled(max_tokens=254), INVALID, ["max_tokens", "254", "253", "max_model_len"]),
    "min over max": (sampled(min_tokens=5), INVALID, ["min_tokens", "4"]),
    "temperature nan": (sampled(temperature=math.nan), INVALID, ["temperature", "[0, 2]"]),
    "repetition_penalty under float32": (sampled(repetition_penalty=1e-300), INVALID, ["repetition_penalty", "[0.01, 2]"]),
    "stop id out of range": (changed(lambda r: r.sampling.stop_token_ids.append(9999)), INVALID, ["stop_token_ids", "511"]),
    "biased id out of range": (changed(lambda r: r.sampling.logit_bias.update({512: 1.0})), INVALID, ["logit_bias", "511"]),
    "frequency penalty nan": (sampled(frequency_penalty=math.nan), INVALID, ["frequency_penalty"]),
    "unknown class": (
        changed(lambda r: setattr(r, "slo_class", "x" * 9999)),
        INVALID,
        ["slo_class", "is not", "voice"],
    ),
    "session too long": (changed(lambda r: setattr(r, "session_id", "é" * 65)), INVALID, ["session_id", "128"]),
    "placement": (changed(lambda r: setattr(r, "placement", 17)), INVALID, ["placement", "17"]),
    "deadline nan": (changed(lambda r: setattr(r, "deadline_s", math.nan)), INVALID, ["deadline_s"]),
    "deadline too far": (changed(lambda r: setattr(r, "deadline_s", 1e9)), INVALID, ["deadline_s", "3600"]),
    "deadline passed": (
        changed(lambda r: setattr(r, "deadline_s", -1.0)),
        grpc.StatusCode.DEADLINE_EXCEEDED,
        ["deadline_s"],
    ),
    "id too long": (changed(lambda r: setattr(r, "request_id", "é" * 65)), INVALID, ["request_id", "128"]),
    "id with a line break": (changed(lambda r: setattr(r, "request_id", "a\nb")), INVALID, ["request_id"]),
}


def test_the_table_over_grpc() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            for name, (request, code, words) in TABLE.items():
                given, reason, message = await failure(read(cluster.stub.Generate(request)))
                assert given is code, (name, message)
                assert reason, name
                assert all(word in message for word in words), (name, message)
            assert (await cluster.generate((1, 2), 3)).ids == right_ids((1, 2), 3)
            rejected = [line for line in cluster.service.metrics().decode().splitlines() if "rejected_total{" in line]
            assert 'pdserve_requests_rejected_total{reason="unknown_model"} 1.0' in rejected
            await cluster.assert_idle()

    run(story())


async def read(call: Any) -> None:
    async for _ in call:
        pass


def test_an_oversized_message_is_refused_and_the_others_are_served() -> None:
    async def story() -> None:
        async with local_cluster(max_body_bytes=1 << 20) as cluster:
            code, _, message = await failure(read(cluster.stub.Generate(Request(text="x" * (2 << 20)))))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "1048576" in message
            garbage = cluster.channel.unary_stream("/pdserve.rpc.v1.Inference/Generate")
            assert (await failure(read(garbage(b"\xff" * 100))))[:2] == (INVALID, "invalid_request")
            assert (await cluster.generate((1, 2), 3)).ids == right_ids((1, 2), 3)

    run(story())


def test_defaults_fill_the_context_and_draw_a_seed() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            admit = cluster.service._admission.admit
            first = await admit(GenerateInput(prompt=(1, 2)), arrived_s=0.0)
            second = await admit(GenerateInput(prompt=(1, 2)), arrived_s=0.0)
            assert (first.spec.sampling.max_tokens, first.open_ended) == (254, True)
            named = await admit(GenerateInput(prompt=(1, 2), sampling={"max_tokens": 254}), arrived_s=0.0)
            assert not named.open_ended
            assert first.spec.sampling.seed != second.spec.sampling.seed
            assert first.request_id != second.request_id
            assert first.deadline_s == 600.0

    run(story())


def test_long_prompts_are_tokenised_beside_the_loop() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            text = "once upon a time " * 1000
            ids = await cluster.service.tokenize(TokenizeInput(None, text))
            assert list(ids) == cluster.service.model.tokenizer.encode(text)
            results = await asyncio.gather(
                *(cluster.service.tokenize(TokenizeInput(None, text)) for _ in range(80)), return_exceptions=True
            )
            refused = [r for r in results if isinstance(r, PdserveError)]
            assert {r.code.value for r in refused} == {"overloaded"}
            assert len(cluster.service._encoder._thread._turns) == 0

    run(story())


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 prompts of 2 MB were tokenised for 21 s, and refused for their lengths after that. Whoever asks for the ids alone
    still gets them."""

    async def story() -> None:
        async with local_cluster() as cluster:
            service = cluster.service
            text = "ab " * 5 * service.max_model_len
            assert len(await service.tokenize(TokenizeInput(None, text))) > service.max_model_len
            monkeypatch.setattr(Tokenizer, "encode", lambda *args, **more: pytest.fail("it was tokenised"))
            for prompt, field in ((text, "prompt"), ((ChatMessage("user", text),), "messages")):
                with pytest.raises(
                    InvalidRequest, match=rf"^{field}: .* resulted in at least \d+ tokens\..* 255 tokens"
                ) as refused:
                    await service.submit(GenerateInput(prompt=prompt))
                assert refused.value.field == field

    run(story())


def test_a_lone_surrogate_or_a_bad_chat_is_the_clients_fault() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            for prompt in ("\ud800", (ChatMessage("user", "\ud800"),), ()):
                with pytest.raises(InvalidRequest):
                    await cluster.service.submit(GenerateInput(prompt=prompt))

    run(story())
