"""Several choices and batches over gRPC: whose message is whose, and who pays when one fails or the client stops reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.rpc.status import TIMELINE_METADATA
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from router.parsing.generate import GenerateCall, RefusedRequest, RequestBatch, generate_batch
from router.parsing.parser import INLINE_BYTES
from testkit.fake_worker import DECODE, PREFILL
from tests.router.local_cluster import LocalCluster, cancel_request, generate_request, local_cluster, right_ids, right_text

TIMEOUT_S = 60.0
IDS = (1, 2, 3)


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await story

    asyncio.run(bounded())


async def read_choices(call: Any) -> dict[int, list[inference_pb2.GenerateResponse]]:
    """The messages of each choice."""
    choices: dict[int, list[inference_pb2.GenerateResponse]] = {}
    async for message in call:
        choices.setdefault(message.choice, []).append(message)
    return choices


def output(messages: list[inference_pb2.GenerateResponse]) -> tuple[list[int], str]:
    ids: list[int] = []
    for message in messages:
        assert message.index == len(ids)
        ids += message.ids
    return ids, "".join(message.text for message in messages)


def test_each_choice_has_its_own_messages_and_its_own_end() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE)) as cluster:
            call = cluster.stub.Generate(generate_request(IDS, 12, n=4))
            choices = await read_choices(call)
            told = dict(await call.initial_metadata())
            assert sorted(choices) == [0, 1, 2, 3]
            for messages in choices.values():
                assert output(messages) == (right_ids(IDS, 12), right_text(IDS, 12))
                assert [bool(message.finish_reason) for message in messages] == [False] * (len(messages) - 1) + [True]
                assert (messages[-1].usage.prompt_tokens, messages[-1].usage.output_tokens) == (3, 12)
                assert messages[-1].report.decode_worker == "decode-0"
            ids = [choices[i][0].request_id for i in range(4)]
            assert ids == [told["pdserve-request-id"], *(f"{told['pdserve-request-id']}-{i}" for i in (1, 2, 3))]
            assert TIMELINE_METADATA not in dict(await call.trailing_metadata() or ())
            await cluster.assert_idle()

    run(story())


async def _held(cluster: LocalCluster, **fields: Any) -> Any:
    """A call whose choices have begun and wait behind the decode worker's gate."""
    cluster.decode.gate.clear()
    call = cluster.stub.Generate(generate_request(IDS, 50, **fields))
    begun = set()
    while len(begun) < (fields.get("n") or 1):
        begun.add((await call.read()).choice)
    return call


async def _to_the_end(call: Any) -> None:
    while await call.read():
        pass


@pytest.mark.parametrize("leaves", [True, False])
def test_a_cancel_of_the_first_choice_or_of_the_call_ends_all(leaves: bool) -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE)) as cluster:
            call = await _held(cluster, n=5)
            if leaves:
                call.cancel()
            else:
                asked = await cancel_request(call)
                assert (await cluster.stub.Cancel(asked)).found
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _to_the_end(call)
                assert caught.value.code() == grpc.StatusCode.CANCELLED
                told = dict(caught.value.trailing_metadata() or ())
                assert json.loads(told[TIMELINE_METADATA])["request_id"].startswith(asked.request_id)
                assert not (await cluster.stub.Cancel(asked)).found
            await cluster.decode.wait_for(lambda: not cluster.service._open)
            cluster.decode.gate.set()
            await cluster.assert_idle()

    run(story())


def test_best_of_sends_each_choice_whole_and_counts_what_it_leaves_out() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE)) as cluster:
            for logprobs in (None, 1):
                message = generate_request(IDS, 6, n=2, best_of=5)
                if logprobs is not None:
                    message.sampling.logprobs = logprobs
                choices = await read_choices(cluster.stub.Generate(message))
                assert sorted(choices) == [0, 1]
                for messages in choices.values():
                    assert output(messages) == (right_ids(IDS, 6), right_text(IDS, 6))
                    assert messages[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
                    assert {one.HasField("logprobs") for one in messages} == {logprobs is not None}
                assert [choices[i][-1].usage.output_tokens for i in (0, 1)] == [6 + 3 * 6, 6]
            await cluster.assert_idle()

    run(story())


def test_a_beam_search_over_grpc_ends_with_its_beams_or_its_cancel() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE)) as cluster:
            call = cluster.stub.Generate(generate_request(IDS, 3, beam_width=3, sampling={"ignore_eos": True}))
            choices = await read_choices(call)
            assert sorted(choices) == [0, 1, 2]
            for (beam,) in choices.values():
                assert len(beam.ids) == beam.usage.output_tokens == 3
                assert not beam.HasField("report")
                assert beam.request_id == dict(await call.initial_metadata())["pdserve-request-id"]
            assert len({tuple(beam.ids) for (beam,) in choices.values()}) == 3
            cluster.prefill.gate.clear()
            call = cluster.stub.Generate(generate_request(IDS, 100, beam_width=2))
            asked = await cancel_request(call)
            while not (await cluster.stub.Cancel(asked)).found:  # noqa: ASYNC110 - the search begins after the metadata
                await asyncio.sleep(0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_choices(call)
            assert caught.value.code() == grpc.StatusCode.CANCELLED
            cluster.prefill.gate.set()
            await cluster.assert_idle()

    run(story())


BAD: list[tuple[str, dict[str, Any]]] = [
    ("n: must be from 1 to 128, got 129", {"n": 129}),
    ("best_of: must be at least n", {"n": 3, "best_of": 2}),
    ("beam_width: must be from 1 to 10", {"beam_width": 11}),
    ("n: is not allowed beside beam_width", {"beam_width": 2, "n": 2}),
    ("length_penalty: is only allowed with beam_width", {"length_penalty": 1.0}),
    ("length_penalty: must be a number in [-10, 10]", {"beam_width": 2, "length_penalty": float("nan")}),
    ("top_k: is not allowed beside a beam search", {"beam_width": 2, "sampling": {"top_k": 5}}),
    ("num_speculative_tokens: must be 0 or not set beside a beam", {"beam_width": 2, "num_speculative_tokens": 3}),
]


@pytest.mark.parametrize(("message", "fields"), BAD)
def test_wrong_choices_are_refused_by_name_alone_and_in_a_batch(message: str, fields: dict[str, Any]) -> None:
    """The other request of the batch is served."""

    async def story() -> None:
        async with local_cluster((PREFILL, DECODE)) as cluster:
            wrong = generate_request(IDS, 4, **fields)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_choices(cluster.stub.Generate(wrong))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(message)
            answers = await read_batch(cluster, [wrong, generate_request(IDS, 4)])
            (refused,) = answers[0]
            assert refused.error.reason == common_pb2.ERROR_REASON_INVALID_REQUEST
            assert refused.error.message.startswith(message)
            assert output([one.response for one in answers[1]])[0] == right_ids(IDS, 4)

    run(story())


async def read_batch(cluster: LocalCluster, requests: list[Any]) -> dict[int, list[inference_pb2.GenerateBatchResponse]]:
    answers: dict[int, list[inference_pb2.GenerateBatchResponse]] = {}
    async for message in cluster.stub.GenerateBatch(inference_pb2.GenerateBatchRequest(requests=requests)):
        answers.setdefault(message.index, []).append(message)
    return answers


@pytest.mark.parametrize("pad", ["", "u" * INLINE_BYTES])
def test_a_batch_mixes_answers_and_errors_by_index(pad: str) -> None:
    """A large batch is read in the child process."""

    async def story() -> None:
        async with local_cluster((PREFILL, DECODE)) as cluster:
            prompts = [(i + 1, i + 2, 5) for i in range(20)]
            requests = [generate_request(ids, 5, request_id=f"mine-{i}") for i, ids in enumerate(prompts)]
            requests[3] = generate_request((9999999,), 5)
            requests[4] = generate_request(IDS, 5, model="another")
            requests[5] = generate_request(IDS, 5, n=3)
            requests[6] = generate_request(IDS, 5, cache_salt="x" * 129 + pad)
            answers = await read_batch(cluster, requests)
            assert sorted(answers) == list(range(20))
            reasons = {i: [one.error.reason for one in answers[i]] for i in (3, 4, 6)}
            invalid, unknown = common_pb2.ERROR_REASON_INVALID_REQUEST, common_pb2.ERROR_REASON_UNKNOWN_MODEL
            assert reasons == {3: [invalid], 4: [unknown], 6: [invalid]}
            assert answers[6][0].error.message.startswith("cache_salt: ")
            assert {one.response.choice for one in answers[5]} == {0, 1, 2}
            for i in {*range(20)} - {3, 4, 5, 6}:
                messages = [one.response for one in answers[i]]
                assert output(messages) == (right_ids(prompts[i], 5), right_text(prompts[i], 5))
                assert messages[-1].report.correlation_id == f"mine-{i}"
            await cluster.assert_idle()

    run(story())


def test_a_batch_is_bounded_by_its_requests_and_by_their_choices() -> None:
    limits: dict[str, Any] = {"call_remaining_s": None, "max_deadline_s": 9.0, "max_prompt_tokens": 9}
    one = generate_request(IDS, 1)
    for count in (0, 257):
        with pytest.raises(InvalidRequest, match="requests: "):
            generate_batch(inference_pb2.GenerateBatchRequest(requests=[one] * count), **limits)
    requests = [one, generate_request(IDS, 1, n=128), generate_request(IDS, 1, n=128), generate_request(IDS, 1, n=127), one]
    taken: RequestBatch = generate_batch(inference_pb2.GenerateBatchRequest(requests=requests), **limits)
    assert [type(call) for call in taken.calls] == [GenerateCall, GenerateCall, RefusedRequest, GenerateCall, RefusedRequest]
    refused = taken.calls[2]
    assert isinstance(refused, RefusedRequest)
    assert refused.error.message == "n: 128 choices are more than the 127 that the batch has left of 256"


def test_one_request_of_a_batch_that_fails_costs_the_others_nothing() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE)) as cluster:
            cluster.decode.gate.clear()
            call = cluster.stub.GenerateBatch(
                inference_pb2.GenerateBatchRequest(
                    requests=[generate_request(IDS, 50, deadline_s=1.5, n=3), generate_request((4, 5), 50)]
                )
            )
            answers: dict[int, list[Any]] = {0: [], 1: []}
            async for message in call:
                answers[message.index].append(message)
                if message.HasField("error"):
                    cluster.decode.gate.set()
            assert answers[0][-1].error.reason == common_pb2.ERROR_REASON_DEADLINE_EXCEEDED
            assert output([one.response for one in answers[1]])[0] == right_ids((4, 5), 50)
            await cluster.assert_idle()

    run(story())


@pytest.mark.parametrize("batch", [True, False])
def test_a_client_that_reads_nothing_of_its_choices_stalls_only_itself(batch: bool) -> None:
    """The call makes more messages than the connection holds, and its client reads one. It is dropped with all its requests,
    while another client is served on another connection."""

    async def story() -> None:
        settings = {"text_of": lambda _: "x" * 10_000}
        async with local_cluster((PREFILL, DECODE), stalled_client_s=2.5, worker=lambda: settings) as cluster:
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(cluster.grpc_address, options=options) as channel:
                stub: Any = inference_pb2_grpc.InferenceStub(channel)
                one = generate_request(IDS, 250)
                if batch:
                    slow = stub.GenerateBatch(inference_pb2.GenerateBatchRequest(requests=[one] * 16))
                else:
                    one.n = 16
                    slow = stub.Generate(one)
                await slow.read()
                answers = await read_batch(cluster, [generate_request(IDS, 5)])
                assert output([one.response for one in answers[0]])[0] == right_ids(IDS, 5)
                while cluster.service._open:  # noqa: ASYNC110 - the service tells nobody
                    await asyncio.sleep(0.01)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _to_the_end(slow)
                assert caught.value.code() == grpc.StatusCode.CANCELLED
                assert "the client took nothing" in (caught.value.details() or "")
            await cluster.assert_idle()

    run(story())
