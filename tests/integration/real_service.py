"""What the tests of the whole service share: a quick engine, open streams, and raw HTTP that can vanish."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import grpc

from pdserve.config import MIB, EngineConfig
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from testkit.client import request
from testkit.processes import ProcessCluster

APART = common_pb2.PLACEMENT_DISAGGREGATED
TOGETHER = common_pb2.PLACEMENT_COLOCATED
AUTO = common_pb2.PLACEMENT_AUTO
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
LONG_OUTPUT = 1900  # seconds of decoding, one token a step
LONG_PROMPT = [i % 250 for i in range(1800)]
QUICK_BEATS = {"heartbeat_interval_s": 0.05}  # workers tell their block counts so often
BOUND_S = 60.0  # only what hangs should fail: the machine may be busy with other work


def tiny(**changes: Any) -> EngineConfig:
    """Batch-invariant, so that an output never depends on its company."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "dtype": "float32",
        "batch_invariant": True,
        "kv_cache_memory": 16 * MIB,
        "max_num_batched_tokens": 64,
        "threads": 1,
        "enable_prefix_caching": False,  # the same prompts again and again: their prefill is to take its time
        "step_timeout_s": 600.0,  # an engine that a test holds is not one that hangs
    }
    return EngineConfig(**(fields | changes))


class OpenStream:
    """One gRPC stream that is read token by token and may be dropped. Use as a context manager."""

    def __init__(self, cluster: ProcessCluster, message: inference_pb2.GenerateRequest) -> None:
        self._channel = grpc.insecure_channel(cluster.grpc)
        self._call: Any = inference_pb2_grpc.InferenceStub(self._channel).Generate(message, timeout=2 * BOUND_S)
        self.report = inference_pb2.RequestReport()
        """Of the request, once its last token was read."""

    def __enter__(self) -> OpenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]:
        return iter(self._call)

    def read(self, tokens: int) -> list[int]:
        """At least so many more tokens, or all that are left."""
        ids: list[int] = []
        while len(ids) < tokens and not self.report.total_s:
            part = next(self._call)
            ids += part.ids
            self.report = part.report
        return ids

    def initial_metadata(self) -> dict[str, str]:
        return dict(self._call.initial_metadata())

    def cancel(self) -> None:
        self._call.cancel()

    def failure(self) -> grpc.RpcError:
        """Read to the end, which must be an error."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as exc:
            return exc
        raise AssertionError("the stream ended well")


def long_stream(cluster: ProcessCluster, placement: common_pb2.Placement, tokens: int = LONG_OUTPUT) -> OpenStream:
    """A short prompt whose answer takes seconds."""
    return OpenStream(cluster, request("hello there", placement, max_tokens=tokens, **GREEDY))


def long_prefill(cluster: ProcessCluster, placement: common_pb2.Placement = APART, *, request_id: str = "") -> OpenStream:
    """A prompt of many steps."""
    message = request(LONG_PROMPT, placement, max_tokens=4, **GREEDY)
    message.request_id = request_id
    return OpenStream(cluster, message)


def wait_prefilling(cluster: ProcessCluster) -> None:
    """Until a prefill worker says that it has lent blocks to a request that runs."""
    cluster.wait_state(lambda state: any(worker.load.leases_held for worker in state.workers), BOUND_S)


def wait_holding(cluster: ProcessCluster) -> None:
    """Until any worker says that a request holds blocks."""
    cluster.wait_state(lambda state: any(worker.load.blocks.held for worker in state.workers), BOUND_S)


def ended(cluster: ProcessCluster, request_id: str) -> str:
    """The router's own line on a request that has ended: how it ended and how far it came."""
    lines: list[str] = []

    def written(_: object) -> bool:
        lines[:] = [
            line for line in cluster.processes["router"].log().splitlines() if f" correlation_id={request_id!r}" in line
        ]
        return bool(lines)

    cluster.wait_state(written, BOUND_S)
    (line,) = lines
    return line


def serving(cluster: ProcessCluster) -> str:
    """The decode worker that the one running request was placed on."""
    state = cluster.wait_state(lambda state: state.running_requests == 1, BOUND_S)
    (name,) = [w.hello.worker_id for w in state.workers if w.hello.role == common_pb2.ROLE_DECODE and w.requests_placed]
    return str(name)


class RawHttp:
    """One POST over a plain socket, so that the test decides how the connection ends."""

    def __init__(self, address: str, path: str, body: dict[str, Any]) -> None:
        host, _, port = address.rpartition(":")
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
        self._socket = socket.create_connection((host, int(port)), timeout=BOUND_S)
        self._socket.sendall(f"{head}\r\n\r\n".encode() + payload)

    def read_until(self, text: bytes) -> bytes:
        seen = b""
        while text not in seen:
            piece = self._socket.recv(4096)
            assert piece, f"it was closed after {seen!r}"
            seen += piece
        return seen

    def close(self) -> None:
        """As a client that ends."""
        self._socket.close()

    def reset(self) -> None:
        """As a client whose machine resets the connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
