"""The Drain and Flip calls over a scripted cluster: progress while something changes, and an end when the worker has left or is
back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

import router.grpc.draining
from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.observe.snapshot import ClusterSnapshot, WorkerSnapshot
from pdserve.rpc.status import REASON_METADATA
from pdserve.rpc.v1 import admin_pb2_grpc, common_pb2, inference_pb2, scaling_pb2
from router.grpc.admin import AdminServer

TIMEOUT_S = 60.0
HELLO = WorkerHello(WorkerId("decode-1"), Role.DECODE, Incarnation(7), "h:1", "model", 16, 10, 64, 4, "bfloat16", 8)
LOAD = WorkerLoad(BlockCounts(10, 4, 1, 3, 2), running_sequences=2, leases_held=1)
BUSY = WorkerSnapshot(HELLO, LOAD, 0.1, 3)


class ScriptedRouter:
    def __init__(self) -> None:
        self.workers: tuple[WorkerSnapshot, ...] = (
            BUSY,
            dataclasses.replace(BUSY, hello=dataclasses.replace(HELLO, worker_id="decode-2")),
        )
        self.drained: list[str] = []
        self.flipped: list[tuple[str, Role, int]] = []

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(1, 0, 0, self.workers)

    def worker(self, worker_id: str) -> WorkerSnapshot | None:
        return next((worker for worker in self.workers if worker.hello.worker_id == worker_id), None)

    def drain(self, worker_id: str, *, force: bool = False) -> None:
        self.drained.append(worker_id)

    def flip(self, worker_id: str, role: Role, incarnation: int) -> None:
        self.flipped.append((worker_id, role, incarnation))


@asynccontextmanager
async def served() -> AsyncIterator[tuple[ScriptedRouter, Any]]:
    scripted: Any = ScriptedRouter()
    server = AdminServer(scripted, "secret", 32)
    await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield scripted, admin_pb2_grpc.AdminStub(channel)
    finally:
        await server.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await story

    asyncio.run(bounded())


def test_progress_until_the_worker_has_left() -> None:
    """(1) What is left is told at once, (2) again when it changed, (3) and the end when the worker is gone, though one of
    the same name has joined meanwhile."""

    async def story() -> None:
        async with served() as (cluster, stub):
            call = stub.Drain(inference_pb2.DrainRequest(worker_id="decode-1"))
            said = aiter(call)
            first = await anext(said)
            assert (first.requests_placed, first.running_sequences, first.leases_held, first.blocks_held) == (3, 2, 1, 5)
            assert cluster.drained == ["decode-1"]
            cluster.workers = (
                dataclasses.replace(BUSY, requests_placed=0, load=dataclasses.replace(LOAD, running_sequences=0)),
                cluster.workers[1],
            )
            while (progress := await anext(said)).requests_placed:
                pass
            assert not progress.done
            cluster.workers = (
                dataclasses.replace(BUSY, hello=dataclasses.replace(HELLO, incarnation=Incarnation(8))),
                cluster.workers[1],
            )
            rest = [progress async for progress in said]
            assert rest[-1].done
            assert not any(progress.done for progress in rest[:-1])

    run(story())


def test_a_quiet_drain_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.grpc.draining, "QUIET_S", 0.0)

    async def story() -> None:
        async with served() as (_, stub):
            said = aiter(stub.Drain(inference_pb2.DrainRequest(worker_id="decode-1")))
            progress = [await anext(said) for _ in range(3)]
            assert len({p.blocks_held for p in progress}) == 1
            assert progress[0].elapsed_s < progress[2].elapsed_s

    run(story())


def test_an_unknown_worker_is_refused_naming_the_others_and_nobody_drains() -> None:
    async def story() -> None:
        async with served() as (cluster, stub):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(stub.Drain(inference_pb2.DrainRequest(worker_id="moon"))))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert dict(caught.value.trailing_metadata() or ())[REASON_METADATA] == "unknown_worker"
            assert "decode-1, decode-2" in (caught.value.details() or "")
            assert cluster.drained == []

    run(story())


def test_a_call_with_a_deadline_ends_there_and_leaves_nothing_behind() -> None:
    async def story() -> None:
        before = len(asyncio.all_tasks())
        async with served() as (cluster, stub):
            for deadline_s in (0.3, 3.0, 30.0):  # a short one may pass before the router has heard of the call
                call = stub.Drain(inference_pb2.DrainRequest(worker_id="decode-1"), timeout=deadline_s)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if cluster.drained:
                    break
            assert cluster.drained == ["decode-1"]
        assert len(asyncio.all_tasks()) <= before

    run(story())


FLIP = scaling_pb2.FlipRequest(worker_id="decode-1", role=common_pb2.ROLE_PREFILL)


def back_as(role: Role, incarnation: int) -> WorkerSnapshot:
    return dataclasses.replace(BUSY, hello=dataclasses.replace(HELLO, role=role, incarnation=Incarnation(incarnation)))


def test_a_flip_is_told_until_the_worker_is_back_in_its_new_role() -> None:
    """(1) The work that is left is told. (2) The worker leaves, which is no end. (3) It joins again, and the last message has
    its new incarnation."""

    async def story() -> None:
        async with served() as (cluster, stub):
            said = aiter(stub.Flip(FLIP))
            assert (await anext(said)).blocks_held == 5
            assert cluster.flipped == [("decode-1", Role.PREFILL, 0)]
            cluster.workers, both = cluster.workers[1:], cluster.workers
            while (await anext(said)).blocks_held:
                pass
            cluster.workers = (back_as(Role.PREFILL, 8), both[1])
            rest = [progress async for progress in said]
            assert (rest[-1].done, rest[-1].incarnation) == (True, 8)

    run(story())


@pytest.mark.parametrize("lost", ["started anew", "not back"])
def test_a_flip_whose_process_ends_is_told_as_a_loss(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with served() as (cluster, stub):
            said = aiter(stub.Flip(FLIP))
            await anext(said)
            monkeypatch.setattr(router.grpc.draining, "JOIN_TIMEOUT_S", 0.0)
            cluster.workers = (back_as(Role.DECODE, 8),) if lost == "started anew" else ()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in said:
                    pass
            assert dict(caught.value.trailing_metadata() or ())[REASON_METADATA] == "replica_lost"
            assert ("started anew" if lost == "started anew" else "not come back") in (caught.value.details() or "")

    run(story())


def test_a_flip_of_a_stale_actuator_or_to_no_role_is_refused() -> None:
    async def story() -> None:
        async with served() as (cluster, stub):
            for request, reason in (
                (scaling_pb2.FlipRequest(worker_id="decode-1", role=common_pb2.ROLE_PREFILL, term=9), "stale_order"),
                (scaling_pb2.FlipRequest(worker_id="decode-1", role=common_pb2.ROLE_PREFILL, incarnation=6), "stale_order"),
                (scaling_pb2.FlipRequest(worker_id="decode-1"), "invalid_request"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(stub.Flip(request)))
                assert dict(caught.value.trailing_metadata() or ())[REASON_METADATA] == reason
            assert cluster.flipped == []

    run(story())
