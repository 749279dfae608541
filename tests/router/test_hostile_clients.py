"""Hostile clients and a real router process: they are bounded together, and workers and other clients do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from pathlib import Path
from typing import Any

import grpc

from pdserve.rpc.v1 import inference_pb2_grpc
from testkit.fake_worker import DECODE, FakeWorker
from testkit.footprint import footprint

from .local_cluster import TOKEN, generate_request, read_answer, right_ids, tiny_model
from .test_process import PORTS, ready_line, router_process

BOUND_S = 60.0
MIB = 1 << 20
PROMPT = (1, 2, 3)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty SETTINGS
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


def worker(link: str, name: str = "decode-0") -> FakeWorker:
    return FakeWorker(DECODE, link, name, TOKEN, tiny_model().card.fingerprint, vocab_size=512, heartbeat_interval_s=0.2)


async def send(address: str, *parts: bytes, hold_s: float = 0.0) -> None:
    """Whatever the router does with it: what the client thinks of that is nobody's affair."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            for part in parts:
                writer.write(part)
                await asyncio.wait_for(writer.drain(), 5.0)
            await asyncio.sleep(hold_s)
        finally:
            writer.transport.abort()


def hostile(rng: random.Random) -> tuple[bytes, ...]:
    """One client's bytes: a slow head, a slow body, endless trailers, chunk extensions, many headers, or noise."""
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    length = rng.randrange(1, 8 * MIB)
    kinds: list[tuple[bytes, ...]] = [
        (HEAD + b"x: y",),
        (HEAD + b"content-length: %d\r\n\r\n" % length, b" " * (length - 1)),
        (chunked + b"2\r\n{}\r\n0\r\n", *[b"x: y\r\n" * 20_000] * 40),
        (chunked + b"2\r\n{}\r\n0\r\nx: ", *[b"a" * 120_000] * 40),
        (chunked + b"2;", *[b"a" * 120_000] * 40),
        (HEAD, *[b"a: b\r\n" * 1000] * 100),
        (b"GET / HTTP/1.1\r\n\r\n" * 10_000,),
        (rng.randbytes(rng.randrange(1, 100_000)),),
    ]
    return rng.choice(kinds)


async def generate(ready: dict[str, Any]) -> list[int]:
    async with grpc.aio.insecure_channel(ready["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return (await read_answer(stub.Generate(generate_request(PROMPT, 5)))).ids


async def post(ready: dict[str, Any]) -> dict[str, Any]:
    host, _, port = ready["http"].rpartition(":")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 5}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return dict(json.loads(answer.partition(b"\r\n\r\n")[2]))


def test_a_swarm_of_hostile_clients_costs_little_memory_and_nobody_else(tmp_path: Path) -> None:
    """It was 1.5 GiB for one connection that sent trailers. A bound of 256 MiB is generous: bodies in progress may take 64,
    and 200 connections some hundred KiB each while their bytes are parsed."""
    seed = 7
    rng = random.Random(seed)

    async def story(ready: dict[str, Any], pid: int) -> None:
        async with asyncio.timeout(BOUND_S), worker(ready["link"]) as linked:
            assert await generate(ready) == right_ids(PROMPT, 5)
            before = footprint(pid)
            await asyncio.gather(*(send(ready["http"], *hostile(rng), hold_s=rng.random() * 2) for _ in range(200)))
            during = footprint(pid)
            alive = linked.alive_seen
            await linked.wait_for(lambda: linked.alive_seen > alive)
            assert await generate(ready) == right_ids(PROMPT, 5)
            assert (await post(ready))["usage"]["completion_tokens"] == 5
            assert linked.refused is None
            assert during.rss_bytes - before.rss_bytes < 256 * MIB, f"seed {seed}: {before} -> {during}"

    with router_process(tmp_path, *PORTS) as process:
        ready = ready_line(process)
        asyncio.run(story(ready, process.pid))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=BOUND_S)
        assert "Traceback" not in err, err[-3000:]
        assert "was silent" not in err


async def held(address: str, stack: contextlib.AsyncExitStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection until the stack ends. It keeps both streams: one that is garbage would close the connection."""
    host, _, port = address.rpartition(":")
    streams = await asyncio.open_connection(host, int(port))
    stack.callback(lambda: streams[1].transport.abort())
    return streams


def test_a_flood_of_connections_locks_no_worker_out(tmp_path: Path) -> None:
    """(1) Few descriptors, and more connections than there are, on both ports of clients. (2) A worker dials and serves.
    (3) Who connects over HTTP is served too: idle ones make room."""

    async def story(ready: dict[str, Any], pid: int) -> None:
        async with asyncio.timeout(BOUND_S), contextlib.AsyncExitStack() as stack:
            for address in (ready["http"], ready["grpc"]):
                for _ in range(300):
                    with contextlib.suppress(OSError):
                        await held(address, stack)
            assert footprint(pid).fds < 320
            async with worker(ready["link"]) as linked:
                await linked.wait_for(lambda: linked.alive_seen > 0)
                while "error" in (answer := await post(ready)):  # connections that have only come keep their places for 2 s
                    assert answer["error"]["code"] == "overloaded"
                    await asyncio.sleep(0.1)
                assert answer["usage"]["completion_tokens"] == 5

    with router_process(tmp_path, *PORTS, "--set", "router.max_connections=1024", descriptors=320) as process:
        ready = ready_line(process)
        asyncio.run(story(ready, process.pid))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=BOUND_S)
        assert "router.max_connections 1024 is lowered to 25" in err


def test_a_flood_of_the_links_port_or_the_admins_locks_no_client_out(tmp_path: Path) -> None:
    """Whoever shares the network needs no token to connect. The port of links is tried until it refuses; on that of the admins,
    idle connections give way to new ones."""

    async def admitted(address: str, stack: contextlib.AsyncExitStack) -> bool:
        reader, writer = await held(address, stack)
        writer.write(HTTP2_PREFACE)
        with contextlib.suppress(ConnectionError):
            return bool(await reader.read(1))
        return False

    async def story(ready: dict[str, Any]) -> None:
        async with asyncio.timeout(BOUND_S), contextlib.AsyncExitStack() as stack, worker(ready["link"]) as linked:
            await linked.wait_for(lambda: linked.alive_seen > 0)
            while await admitted(ready["link"], stack):
                pass
            for _ in range(320):
                assert await admitted(ready["admin"], stack)
            assert (await post(ready))["usage"]["completion_tokens"] == 5

    with router_process(tmp_path, *PORTS, descriptors=320) as process:
        asyncio.run(story(ready_line(process)))


def test_descriptors_for_hardly_any_client_are_a_named_refusal_to_start(tmp_path: Path) -> None:
    with router_process(tmp_path, *PORTS, descriptors=280) as process:
        out, err = process.communicate(timeout=BOUND_S)
    assert (process.returncode, out) == (2, "")
    assert "RLIMIT_NOFILE of 280" in err
