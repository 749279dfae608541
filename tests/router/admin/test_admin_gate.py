"""The admin port stays reachable: connections that have made no allowed call are few and short, and a full port says so."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from pdserve.client import AdminClient, CallFailed
from pdserve.commands.scaling.leaving_host import drain_host
from pdserve.core.ids import WorkerId
from pdserve.rpc import status
from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2
from router.grpc import admin as grpc_admin
from router.grpc import gate as grpc_gate
from router.grpc.admin import AdminServer
from router.grpc.gate import MAX_UNPROVED
from tests.seams.echo_router import EchoRouter

BOUND_S = 60.0
OWN: Any = (("grpc.use_local_subchannel_pool", 1),)


@contextlib.asynccontextmanager
async def served(max_connections: int = 1024) -> AsyncIterator[AdminServer]:
    server = AdminServer(EchoRouter(), "token", max_connections)
    await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(BOUND_S):
            yield server
    finally:
        await server.close()
    assert not server._gate._connections


async def ask(channel: Any, **call: Any) -> inference_pb2.GetClusterStateResponse:
    state = await admin_pb2_grpc.AdminStub(channel).GetClusterState(inference_pb2.GetClusterStateRequest(), **call)
    assert isinstance(state, inference_pb2.GetClusterStateResponse)
    return state


def run_as_router(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a story on the loop of a router process, whose transports are not those of asyncio."""
    uvloop.run(story())


async def ended(reader: asyncio.StreamReader) -> None:
    """Return when the server has ended the connection."""
    with contextlib.suppress(ConnectionResetError):
        await reader.read()


def test_the_folders_of_killed_routers_are_removed_and_those_of_living_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def a_router_starts() -> None:
        async with served():
            pass

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = [tmp_path / f"pdserve-admin-{name}" for name in ("killed", "lives", "starts")]
    for folder in folders:
        folder.mkdir()
    with socket.socket(socket.AF_UNIX) as killed, socket.socket(socket.AF_UNIX) as lives:
        killed.bind(str(folders[0] / "grpc"))
        lives.bind(str(folders[1] / "grpc"))
        lives.listen()
        killed.close()
        asyncio.run(a_router_starts())
    assert sorted(tmp_path.iterdir()) == folders[1:]


def test_idle_connections_lock_nobody_out_and_do_not_end_one_that_has_called() -> None:
    async def run() -> None:
        async with served() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=OWN) as known:
            await ask(known)
            (name,) = server._gate._connections
            idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(10 * MAX_UNPROVED)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=OWN) as new:
                assert (await ask(new)).workers
            assert len(server._gate._unproved) <= MAX_UNPROVED
            await ask(known)
            assert name in server._gate._connections, "it was not dialled again"
            await ended(idle[0][0])  # the oldest gave way
            for _, writer in idle:
                writer.close()

    run_as_router(run)


def test_a_connection_without_an_allowed_call_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_admin, "is_loopback", lambda host: False)

    async def run() -> None:
        async with served() as server:
            server._gate._prove_s = 2.0
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            await ended(reader)  # it has said nothing
            writer.close()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=OWN) as stranger:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(stranger, metadata=((status.CLUSTER_TOKEN_METADATA, "wrong"),))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                while (state := stranger.get_state()) is grpc.ChannelConnectivity.READY:
                    await stranger.wait_for_state_change(state)

    run_as_router(run)


def test_a_port_that_is_full_of_others_says_so() -> None:
    async def run() -> None:
        async with served(max_connections=2) as server, contextlib.AsyncExitStack() as stack:
            address = f"127.0.0.1:{server.port}"
            for _ in range(2):
                await ask(await stack.enter_async_context(grpc.aio.insecure_channel(address, options=OWN)))

            def third() -> str:
                with AdminClient(address) as client, pytest.raises(CallFailed) as caught:
                    client.cluster_state(BOUND_S)
                return caught.value.message

            assert "takes no more connections now" in await asyncio.to_thread(third)
            assert server._gate.refused > 0

    run_as_router(run)


def test_a_large_answer_and_a_slow_reader_pass_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "PAUSED_BYTES", 1024)

    async def run() -> None:
        async with served() as server:
            router: Any = server._router
            router.workers = router.workers * 20_000
            options: Any = (*OWN, ("grpc.max_receive_message_length", 64 << 20))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
                state = await ask(channel)
            assert (len(state.workers), state.ByteSize() > 1 << 20) == (20_000, True)

    run_as_router(run)


def test_hooks_that_wait_for_long_drains_leave_places_to_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more hooks than places, and each worker drains until it is let go."""
    router = EchoRouter()
    (only,) = router.workers
    hellos = [dataclasses.replace(only.hello, worker_id=WorkerId(f"w{n}"), address=f"10.0.0.{n}:1") for n in range(12)]
    router.workers = tuple(dataclasses.replace(only, hello=hello) for hello in hellos)
    told, left = set[str](), list[str]()
    monkeypatch.setattr(router, "drain", lambda worker_id, *, force=False: told.add(worker_id))

    async def run() -> None:
        server = AdminServer(router, "token", 4)
        await server.start("127.0.0.1", 0)
        address = f"127.0.0.1:{server.port}"
        with ThreadPoolExecutor(len(hellos)) as threads:
            hooks = [
                asyncio.get_running_loop().run_in_executor(
                    threads, lambda n=n: drain_host(address, "", f"10.0.0.{n}", left.append, look_s=0.05)
                )
                for n in range(len(hellos))
            ]
            async with asyncio.timeout(BOUND_S):
                while len(told) < len(hellos):  # noqa: ASYNC110 - hooks run in threads
                    await asyncio.sleep(0.01)
                while True:  # an operator whom a burst keeps out tries again, as its message says
                    async with grpc.aio.insecure_channel(address, options=OWN) as operator:
                        with contextlib.suppress(grpc.aio.AioRpcError):
                            assert len((await ask(operator)).workers) == len(hellos)
                            break
                assert not left
                router.workers = ()
                await asyncio.gather(*hooks)
        await server.close()

    run_as_router(run)
    assert sorted(left) == sorted(told)
