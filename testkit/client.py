"""A gRPC client for tests and benchmarks. It runs many requests at once and keeps the tokens and times of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from pdserve.core.sampling import TokenLogprobs, unpack_logprobs
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc

TIMEOUT_S: Final = 120.0


@dataclass(slots=True)
class Answer:
    """The answer to one request, as far as it has come."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: int = common_pb2.FINISH_REASON_UNSPECIFIED
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    report: inference_pb2.RequestReport = field(default_factory=inference_pb2.RequestReport)
    arrivals_s: list[float] = field(default_factory=list)
    """Seconds from sending to the arrival of each token at this client."""
    others: dict[int, Answer] = field(default_factory=dict)
    """The choices after the first one, by their number."""


def request(
    prompt: Sequence[int] | str, placement: int = common_pb2.PLACEMENT_UNSPECIFIED, **sampling: object
) -> inference_pb2.GenerateRequest:
    """Return the message for a prompt of text or token ids. `sampling` are fields of SamplingParams."""
    message = inference_pb2.GenerateRequest(
        placement=placement,  # type: ignore[arg-type]
        sampling=common_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.tokens.ids.extend(prompt)
    return message


async def generate(stub: inference_pb2_grpc.InferenceStub, message: inference_pb2.GenerateRequest) -> Answer:
    """Run one request to its end. Raises grpc.aio.AioRpcError, and AssertionError when an index is missing or comes twice."""
    return await collect(stub, message, Answer())


async def collect(stub: inference_pb2_grpc.InferenceStub, message: inference_pb2.GenerateRequest, answer: Answer) -> Answer:
    """Run one request into an answer that the caller holds, so that what came before a failure stays in it. Raises as
    `generate`."""
    began_s = time.monotonic()
    async for part in stub.Generate(message, timeout=TIMEOUT_S):
        _take(part, answer.others.setdefault(part.choice, Answer()) if part.choice else answer, time.monotonic() - began_s)
    ended = [one.finish_reason for one in (answer, *answer.others.values())]
    assert all(ended), "a stream ended without a finish reason"
    return answer


def _take(part: inference_pb2.GenerateResponse, answer: Answer, arrival_s: float) -> None:
    assert not part.ids or part.index == len(answer.ids), "a token is lost or came twice"
    answer.ids.extend(part.ids)
    answer.text += part.text
    if part.HasField("logprobs"):
        answer.logprobs.extend(unpack_logprobs(part.logprobs, len(part.ids)))
    answer.arrivals_s.extend([arrival_s] * len(part.ids))
    if part.finish_reason:
        answer.finish_reason, answer.usage, answer.report = part.finish_reason, part.usage, part.report


def generate_all(address: str, messages: Sequence[inference_pb2.GenerateRequest], concurrency: int = 64) -> list[Answer]:
    """Run all requests, at most `concurrency` at a time. Return the answers in the order of the requests."""

    async def run() -> list[Answer]:
        gate = asyncio.Semaphore(concurrency)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def one(message: inference_pb2.GenerateRequest) -> Answer:
                async with gate:
                    return await generate(stub, message)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(message)) for message in messages]
        return [task.result() for task in tasks]

    return asyncio.run(run())
