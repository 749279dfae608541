"""Names of requests and who may end them: the router makes the names, and only its tokens cancel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.ids import Incarnation, RequestId
from pdserve.rpc.v1 import inference_pb2
from router.api.identity import KEY_BYTES, CancelTokens, Claim, new_request_id

from ..local_cluster import cancel_request, generate_request, local_cluster, read_answer, right_ids

KEY = bytes(range(KEY_BYTES))
TOKENS = CancelTokens(Incarnation(0xABC), KEY)


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story

    asyncio.run(bounded())


@given(text=st.text(max_size=100))
def test_no_text_is_a_token_but_the_one_that_was_issued(text: str) -> None:
    mine = RequestId(new_request_id())
    token = TOKENS.issue(mine)
    assert TOKENS.check(mine, token) is Claim.VALID
    assert TOKENS.check(mine, text) is not Claim.VALID
    assert TOKENS.check(RequestId(new_request_id()), token) is Claim.WRONG
    for i in (0, 20, 80):
        other = token[:i] + ("0" if token[i] != "0" else "1") + token[i + 1 :]
        assert TOKENS.check(mine, other) is not Claim.VALID


def test_a_token_names_the_incarnation_that_gave_it() -> None:
    mine = RequestId("r")
    assert TOKENS.check(mine, CancelTokens(Incarnation(0xABD), KEY).issue(mine)) is Claim.NOT_HERE
    assert TOKENS.check(mine, CancelTokens(Incarnation(0xABC), KEY[::-1]).issue(mine)) is Claim.WRONG


def test_a_stranger_cannot_cancel_a_request_whose_id_he_knows() -> None:
    """What he hears does not tell whether the request runs. Who was told its token cancels it, from any connection."""

    async def story() -> None:
        async with local_cluster() as cluster:
            cluster.decode.gate.clear()
            call = cluster.stub.Generate(generate_request((1, 2, 3), 5, request_id="order-17"))
            mine = await cancel_request(call)
            guesses = [
                inference_pb2.CancelRequest(request_id=name, cancel_token=token)
                for name in (mine.request_id, "order-17", "unknown")
                for token in ("guess", mine.cancel_token[:-1] + ("0" if mine.cancel_token[-1] != "0" else "1"))
            ]
            assert {str(await cluster.stub.Cancel(guess)) for guess in guesses} == {""}
            elsewhere = CancelTokens(Incarnation(1), KEY).issue(RequestId(mine.request_id))
            other_router = inference_pb2.CancelRequest(request_id=mine.request_id, cancel_token=elsewhere)
            assert (await cluster.stub.Cancel(other_router)).not_here
            with pytest.raises(grpc.aio.AioRpcError, match="cancel_token: is missing"):
                await cluster.stub.Cancel(inference_pb2.CancelRequest(request_id=mine.request_id))
            assert cluster.service.snapshot().running_requests == 1
            async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
                cancel = channel.unary_unary(
                    "/pdserve.rpc.v1.Inference/Cancel",
                    request_serializer=inference_pb2.CancelRequest.SerializeToString,
                    response_deserializer=inference_pb2.CancelResponse.FromString,
                )
                assert (await cancel(mine)).found
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_answer(call)
            assert caught.value.code() is grpc.StatusCode.CANCELLED
            await cluster.assert_idle()

    run(story())


def test_two_concurrent_requests_with_one_id_of_their_client_both_run(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            calls = [cluster.stub.Generate(generate_request((1, 2, i), 5, request_id="trace-4711")) for i in range(3)]
            answers = await asyncio.gather(*map(read_answer, calls))
            assert [answer.ids for answer in answers] == [right_ids((1, 2, i), 5) for i in range(3)]
            assert {answer.report.correlation_id for answer in answers} == {"trace-4711"}
            assert len({answer.report.request_id for answer in answers}) == 3
            for call, answer in zip(calls, answers, strict=True):
                told = dict(await call.initial_metadata())
                timeline = json.loads(dict(await call.trailing_metadata())["pdserve-timeline"])
                assert answer.last is not None
                assert told["pdserve-request-id"] == answer.last.request_id == answer.report.request_id
                assert (timeline["request_id"], timeline["correlation_id"]) == (answer.last.request_id, "trace-4711")
                assert told["x-request-id"] == "trace-4711"
            await cluster.assert_idle()

    with caplog.at_level("INFO"):
        run(story())
    assert caplog.text.count("correlation_id='trace-4711'") == 3
