"""A router that is told to stop refuses new requests, lets streams end, and tells those that it cuts off why."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pdserve.core.errors import RouterStopping
from router.openai.json import error_headers
from router.service.service import RouterService

from ..local_cluster import LocalCluster, generate_request, local_cluster, right_ids
from ..test_end_to_end import failure, rest, run, started


def stop(cluster: LocalCluster, limit_s: float) -> tuple[asyncio.Task[None], asyncio.Event]:
    hurry = asyncio.Event()
    service: RouterService = cluster.service
    return asyncio.create_task(service.wind_down(limit_s, hurry)), hurry


def go_on(cluster: LocalCluster) -> None:
    for worker in cluster.workers:
        worker.gate.set()


def test_streams_end_undisturbed_while_new_requests_are_refused() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            call = await started(cluster)
            winding, _ = stop(cluster, 60.0)
            await asyncio.sleep(0)
            assert cluster.service.not_ready_reason == "the router is stopping"
            status, reason, message = await failure(cluster.stub.Generate(generate_request((1, 2), 3)).read())
            assert (status, reason) == (grpc.StatusCode.UNAVAILABLE, "unavailable")
            assert "the router is stopping, and takes no new requests" in message
            assert not winding.done()
            go_on(cluster)
            assert [*right_ids((1, 2, 3), 1), *await rest(call)] == right_ids((1, 2, 3), 100)
            await winding
            await cluster.assert_idle()

    run(story())


@pytest.mark.parametrize("how", ["its time is over", "a second signal"])
def test_a_stream_that_is_cut_off_is_told_why_and_to_try_again(how: str) -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            call = await started(cluster)
            winding, hurry = stop(cluster, 0.0 if how == "its time is over" else 3600.0)
            if how == "a second signal":
                hurry.set()
            status, reason, message = await failure(drained(call))
            assert (status, reason) == (grpc.StatusCode.UNAVAILABLE, "unavailable")
            assert "the router is stopping: its time to finish streams is over" in message
            await winding
            go_on(cluster)
            await cluster.assert_idle()

    run(story())


async def drained(call: Any) -> None:
    await rest(call)


def test_over_http_the_refusal_says_when_to_try_again_and_closes_the_connection() -> None:
    assert error_headers(RouterStopping("x")) == [(b"retry-after", b"1"), (b"connection", b"close")]
