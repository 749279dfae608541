"""Clients that leave: every block of both workers comes back, whatever the moment and the way."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from real_service import (
    APART,
    AUTO,
    BOUND_S,
    GREEDY,
    LONG_OUTPUT,
    LONG_PROMPT,
    QUICK_BEATS,
    TOGETHER,
    OpenStream,
    RawHttp,
    ended,
    long_prefill,
    long_stream,
    tiny,
    wait_holding,
    wait_prefilling,
)

from pdserve.rpc.status import CANCEL_TOKEN_METADATA, REQUEST_ID_METADATA
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from testkit.client import generate, generate_all, request
from testkit.processes import ProcessCluster, is_empty
from testkit.told_worker import Hold

pytestmark = pytest.mark.cluster


HELD = 100  # tokens: a request that is held here has not ended when its client leaves


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    return Hold(tmp_path_factory.mktemp("hold"))


@pytest.fixture(scope="module")
def cluster(hold):
    """Eight tokens a step: a long prompt takes 225 steps."""
    places = hold.places("prefill-0", "decode-0", "decode-1")
    engine = tiny(max_num_batched_tokens=8)
    with ProcessCluster(engine, prefill=1, decode=2, worker=QUICK_BEATS, places=places) as running:
        yield running


def wait_left(cluster: ProcessCluster) -> None:
    """Until the router has noticed that the client has left."""
    cluster.wait_state(lambda state: state.running_requests + state.queued_requests == 0, BOUND_S)


def wait_empty(cluster: ProcessCluster) -> None:
    cluster.wait_state(is_empty, BOUND_S)


def assert_cancelled_before_its_first_token(cluster: ProcessCluster, request_id: str) -> None:
    line = ended(cluster, request_id)
    assert " outcome=cancelled " in line, line
    assert " output_tokens=0 " in line, line


@pytest.mark.parametrize("placement", [APART, TOGETHER], ids=["apart", "together"])
def test_a_cancelled_grpc_stream_frees_every_block(cluster, hold, placement):
    with hold.at(HELD), long_stream(cluster, placement) as stream:
        stream.read(5)
        wait_holding(cluster)
        stream.cancel()
        wait_left(cluster)
    wait_empty(cluster)


def test_a_cancelled_prefill_frees_both_sides(cluster, hold):
    with hold.at(HELD), long_prefill(cluster, request_id="long-grpc") as stream:
        wait_prefilling(cluster)
        stream.cancel()
        wait_left(cluster)
    wait_empty(cluster)
    assert_cancelled_before_its_first_token(cluster, "long-grpc")


def test_cancel_by_id_from_another_connection(cluster, hold):
    message = request("hello there", APART, max_tokens=LONG_OUTPUT, **GREEDY)
    with hold.at(HELD), OpenStream(cluster, message) as stream, grpc.insecure_channel(cluster.grpc) as channel:
        stream.read(1)
        wait_holding(cluster)
        other = inference_pb2_grpc.InferenceStub(channel)
        told = stream.initial_metadata()
        mine = inference_pb2.CancelRequest(request_id=told[REQUEST_ID_METADATA], cancel_token=told[CANCEL_TOKEN_METADATA])
        nobodys = inference_pb2.CancelRequest(request_id="nobody's", cancel_token=mine.cancel_token)
        assert [other.Cancel(request, timeout=BOUND_S).found for request in (nobodys, mine)] == [False, True]
        assert stream.failure().code() is grpc.StatusCode.CANCELLED
    wait_empty(cluster)


@pytest.mark.quick("reset")
@pytest.mark.parametrize("leave", [RawHttp.close, RawHttp.reset], ids=["close", "reset"])
def test_an_http_client_that_vanishes_in_its_stream_frees_every_block(cluster, hold, leave):
    body = {"prompt": "hello there", "max_tokens": LONG_OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
    with hold.at(HELD):
        client = RawHttp(cluster.http, "/v1/completions", body)
        client.read_until(b"data: ")
        wait_holding(cluster)
        leave(client)
        wait_left(cluster)
    wait_empty(cluster)


@pytest.mark.quick("whole")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_http_client_that_vanishes_in_a_long_prefill_frees_both_sides(cluster, hold, stream):
    """Nothing is being sent then, so only the closed socket can tell the router."""
    name = f"long-http-{stream}"
    body = {"prompt": LONG_PROMPT, "max_tokens": 4, "stream": stream, "placement": "disaggregated", "request_id": name}
    with hold.at(HELD):
        client = RawHttp(cluster.http, "/v1/completions", body)
        wait_prefilling(cluster)
        client.close()
        wait_left(cluster)
    wait_empty(cluster)
    assert_cancelled_before_its_first_token(cluster, name)


@pytest.mark.slow
def test_a_hundred_requests_of_which_half_leave_at_random_moments(cluster):
    """Those that stay get what they get alone."""
    rng = random.Random(5)
    stay = [
        request([rng.randrange(250) for _ in range(rng.randrange(1, 60))], AUTO, max_tokens=12, **GREEDY) for _ in range(50)
    ]
    leave = [request(LONG_PROMPT[: rng.randrange(1, 130)], AUTO, max_tokens=LONG_OUTPUT, **GREEDY) for _ in range(50)]
    alone = [answer.ids for answer in generate_all(cluster.grpc, stay, concurrency=1)]

    async def gone(stub: inference_pb2_grpc.InferenceStub, message: inference_pb2.GenerateRequest) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generate(stub, message), timeout=rng.uniform(0.0, 1.5))

    async def run() -> list[list[int]]:
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            async with asyncio.TaskGroup() as group:
                stayed = []
                for good, bad in zip(stay, leave, strict=True):
                    group.create_task(gone(stub, bad))
                    stayed.append(group.create_task(generate(stub, good)))
        return [task.result().ids for task in stayed]

    assert asyncio.run(run()) == alone
    wait_empty(cluster)
    assert not any(worker.load.blocks.unaccounted for worker in cluster.state().workers)
