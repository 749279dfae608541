"""Floods of large requests against a real router process: they are answered, and workers' links do not notice.

A body of 8 MiB held the loop for up to 0.8 s; after sixteen the workers gave the router up for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.fake_worker import DECODE, PREFILL, LightWorker
from testkit.footprint import footprint

from .local_cluster import TOKEN, tiny_model
from .test_process import PORTS, ready_line, router_process

BOUND_S = 120.0
AT_ONCE = 16
MIB = 1 << 20
SIZE = 8 * MIB - 64
LOST_S = 5.0  # a busy machine holds a process for two seconds


def beating(address: str, role: common_pb2.Role) -> LightWorker:
    """Return a worker with its own end of the link, as workers run it."""
    return LightWorker(role, address, "", TOKEN, tiny_model().card.fingerprint, heartbeat_interval_s=0.2, router_lost_s=LOST_S)


@contextlib.contextmanager
def posts(address: str, bodies: list[bytes]) -> Iterator[list[socket.socket]]:
    """All but the last byte of each is there when this is entered."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        sockets = []
        for body in bodies:
            one = stack.enter_context(socket.create_connection((host, int(port)), BOUND_S))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
            with contextlib.suppress(ConnectionError):  # it may have been refused by now
                one.sendall(head + body[:-1])
            sockets.append(one)
        yield sockets


def flood_http(address: str, body: bytes) -> list[int]:
    """The statuses."""
    with posts(address, [body] * AT_ONCE) as sockets:
        for one in sockets:
            with contextlib.suppress(ConnectionError):
                one.send(body[-1:])
        return [int(one.recv(4096).split()[1]) for one in sockets]


def flood_grpc(address: str, message: bytes) -> list[grpc.StatusCode]:
    with grpc.insecure_channel(address) as channel:
        generate = channel.unary_stream("/pdserve.rpc.v1.Inference/Generate")  # bytes in, bytes out
        return [call.code() for call in [generate(message, timeout=BOUND_S) for _ in range(AT_ONCE)]]


def json_flood() -> bytes:
    return b'{"x":[' + b"[]," * ((SIZE - 16) // 3) + b"[]]}"


def protobuf_flood() -> bytes:
    request = inference_pb2.GenerateRequest(text="hello")
    request.sampling.stop.extend([""] * (SIZE // 2 - 16))
    return request.SerializeToString()


def test_no_worker_is_lost_and_heartbeats_go_on_while_large_requests_flood_in(tmp_path: Path) -> None:
    """(1) Two real links beat. (2) Sixteen bodies of 8 MiB end at once over HTTP, and as many messages over gRPC. (3) Each is
    answered with its own refusal; (4) no link broke meanwhile, and the router's memory is bounded."""

    async def story(ready: dict[str, Any], pid: int) -> None:
        async with asyncio.timeout(BOUND_S), beating(ready["link"], PREFILL) as one, beating(ready["link"], DECODE) as other:
            links = [one.link, other.link]
            before, rss = [link._answers for link in links], footprint(pid).rss_bytes
            began_s = time.monotonic()
            statuses, codes = await asyncio.gather(
                asyncio.to_thread(flood_http, ready["http"], json_flood()),
                asyncio.to_thread(flood_grpc, ready["grpc"], protobuf_flood()),
            )
            took_s = time.monotonic() - began_s
            beats = [link._answers - answers for link, answers in zip(links, before, strict=True)]
            print(f"flood took {took_s:.1f} s; answers to heartbeats meanwhile: {beats}")  # for who measures
            assert set(statuses) <= {400, 429}, statuses
            assert 400 in statuses
            expected = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert set(codes) <= expected, codes
            assert (one.losses, other.losses) == (0, 0)
            assert all(count > 0 for count in beats)
            assert footprint(pid).rss_bytes - rss < 512 * MIB

    with router_process(tmp_path, *PORTS, "--set", f"router.heartbeat_lost_s={LOST_S}") as process:
        ready = ready_line(process)
        asyncio.run(story(ready, process.pid))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=BOUND_S)
        assert "was silent" not in err
        assert "Traceback" not in err, err[-3000:]


@pytest.mark.parametrize("count", [255, 256])
def test_a_large_request_is_read_as_a_small_one_is(tmp_path: Path, count: int) -> None:
    """Ids beyond what fits are refused by their number; what fits goes on to be placed, for which nobody is here."""
    with router_process(tmp_path, *PORTS) as process:
        ready = ready_line(process)
        body = json.dumps({"prompt": [1] * count, "user": "u" * MIB, "max_tokens": 1}).encode()
        with posts(ready["http"], [body]) as (one,):
            one.send(body[-1:])
            answer = http.client.HTTPResponse(one)
            answer.begin()
            text = answer.read().decode()
        assert answer.status == (503 if count == 255 else 400), text
        assert count == 255 or "resulted in 256 tokens" in text
