"""The cluster's state in pages: no worker is missed or told twice, and an answer has room when all pairs are set aside."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdserve.client import AdminClient
from pdserve.commands.tables import status
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import Role
from pdserve.observe.snapshot import ClusterSnapshot
from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2
from router.grpc.admin import AdminServer
from router.grpc.cluster_state import cluster_state_to_wire
from router.service.snapshots import cluster_snapshot
from tests.router.core_peers import Stage
from tests.seams.echo_router import WORKER, EchoRouter

SOME = st.sets(st.tuples(st.sampled_from(Role), st.text("ab/-", min_size=1, max_size=4)), max_size=12)
MAX_MESSAGE_BYTES = 4 << 20  # what a gRPC client takes by default


def cluster(names: set[tuple[Role, str]]) -> ClusterSnapshot:
    workers = [
        dataclasses.replace(WORKER, hello=dataclasses.replace(WORKER.hello, worker_id=WorkerId(name), role=role))
        for role, name in sorted(names, key=lambda one: (one[0] is Role.DECODE, one[1]))
    ]
    return ClusterSnapshot(1, 0, 0, tuple(workers))


def names_of(state: inference_pb2.GetClusterStateResponse) -> list[tuple[Role, str]]:
    roles = {1: Role.PREFILL, 2: Role.DECODE}
    return [(roles[one.hello.role], one.hello.worker_id) for one in state.workers]


@given(SOME, SOME, st.integers(1, 5))
def test_pages_have_each_worker_once_though_others_come_and_go(
    before: set[tuple[Role, str]], after: set[tuple[Role, str]], page_size: int
) -> None:
    """The set changes after the first page. Those that are in both sets are told."""
    page = cluster_state_to_wire(cluster(before), 16, page_size)
    told = names_of(page)
    while page.next_page_token:
        page = cluster_state_to_wire(cluster(after), 16, page_size, page.next_page_token)
        assert len(page.workers) <= page_size
        told += names_of(page)
    assert len(told) == len(set(told))
    if len(before) > page_size:
        assert before & after <= set(told) <= before | after
    else:
        assert set(told) == before


def test_a_client_follows_the_pages_and_an_old_one_gets_all_at_once() -> None:
    echo = EchoRouter()
    echo.workers = cluster({(role, f"w{n}") for role in Role for n in range(601)}).workers

    async def run() -> None:
        server = AdminServer(echo, "token", 32)
        await server.start("127.0.0.1", 0)

        def ask() -> Any:
            with AdminClient(f"127.0.0.1:{server.port}") as client:
                return client.cluster_state(60.0)

        assert len(set(names_of(await asyncio.to_thread(ask)))) == 1202
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            get = admin_pb2_grpc.AdminStub(channel).GetClusterState
            assert len((await get(inference_pb2.GetClusterStateRequest(), timeout=60)).workers) == 1202
            with pytest.raises(grpc.aio.AioRpcError, match="page_token is not one that an answer had"):
                await get(inference_pb2.GetClusterStateRequest(page_token="nonsense"), timeout=60)
        await server.close()

    asyncio.run(run())


def test_a_network_that_is_cut_between_two_pools_leaves_room_for_an_answer() -> None:
    """All pairs of 120 + 120 workers took more than half of what a client takes, and 200 + 200 twice as much."""
    stage = Stage()
    peers = {role: [stage.join(f"{role.value}-{n}", role).hello for n in range(120)] for role in Role}
    why = "10.0.3.17:41234: " + "the read ran past its deadline " * 4
    for prefill in peers[Role.PREFILL]:
        for decode in peers[Role.DECODE]:
            stage.core.pairs.failed(prefill, decode, why, now_s=0.0)
    snapshot = cluster_snapshot(stage.core, Incarnation(7), ((), 0.0), {}, now_s=0.0, uptime_s=1.0)
    state = cluster_state_to_wire(snapshot, 16)
    assert (state.num_set_aside_pairs, len(state.set_aside_pairs)) == (14_400, 100)
    assert {one.worker_id: one.pairs for one in state.set_aside_counts} == {
        hello.worker_id: 120 for one in peers.values() for hello in one
    }
    assert state.ByteSize() < MAX_MESSAGE_BYTES / 20
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status(state, 120))
    assert "and 14300 more pairs; the workers in most pairs are" in console.export_text()
