"""A router process as the cluster sees one: its arguments, its one line, its end. It places nothing.

Workers tell it who they are over a plain socket on the link port; `Generate` answers with scripted text.
Run as `python standin_router.py --config FILE --exit-with-parent`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from pdserve import config
from pdserve.core.errors import PdserveError
from pdserve.rpc.status import TABLE
from pdserve.rpc.v1 import admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc, scaling_pb2
from router.grpc.scaling import ScalingMailbox

WORDS = ("two ", "pools ", "share ", "one ", "cache")
KV_BYTES = 360 << 10
SLOWLY, SLOWLY_S = "slowly", 120.0  # a prompt with this word is answered until its client leaves


def answer_http(listener: socket.socket) -> None:
    """Answer whatever is asked, as one who is there."""
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


class Registry:
    """Who has dialled and is still connected."""

    def __init__(self, host: str, port: int) -> None:
        self.listener = socket.create_server((host, port))
        self.workers: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self._follow, args=(connection,), daemon=True).start()

    def _follow(self, connection: socket.socket) -> None:
        with connection, connection.makefile() as lines:
            hello = json.loads(lines.readline()) | {"link": connection}
            self.workers[hello["worker_id"]] = hello
            lines.read()  # until the worker is gone
            if self.workers.get(hello["worker_id"]) is hello:
                del self.workers[hello["worker_id"]]


def _role(name: str, hello: dict[str, Any]) -> common_pb2.Role:
    role = hello.get("role") or name.partition("-")[0]
    return common_pb2.ROLE_PREFILL if role == "prefill" else common_pb2.ROLE_DECODE


def _demand() -> inference_pb2.Demand:
    """As many prompt tokens wait as a file says."""
    file = os.environ.get("STANDIN_QUEUED_TOKENS")
    queued = int(Path(file).read_text()) if file else 0
    return inference_pb2.Demand(uptime_s=time.monotonic(), queued_prompt_tokens=queued)


@contextlib.contextmanager
def _errors(context: Any) -> Iterator[None]:
    try:
        yield
    except PdserveError as exc:
        context.set_trailing_metadata((("pdserve-error-reason", exc.code.value),))
        context.abort(grpc.StatusCode[TABLE[exc.code].grpc], exc.message)


class Inference(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    def __init__(self, registry: Registry, settings: config.RouterProcessConfig) -> None:
        self.registry = registry
        self.settings = settings
        self.mailbox = ScalingMailbox(os.getpid())
        self.lock = threading.Lock()

    def GetClusterState(self, request: Any, context: Any) -> inference_pb2.GetClusterStateResponse:
        workers = [
            inference_pb2.WorkerState(
                hello=common_pb2.WorkerHello(
                    worker_id=name,
                    role=_role(name, hello),
                    address=hello["address"],
                    pid=hello["pid"],
                    incarnation=hello.get("incarnation", hello["pid"]),
                ),
                load=common_pb2.WorkerLoad(blocks=common_pb2.BlockCounts(total=100, free=60, held=30, cached=10)),
                ready=True,
                draining=hello.get("draining", False),
            )
            for name, hello in sorted(self.registry.workers.items())
        ]
        with self.lock:
            scaling = self.mailbox.state(time.monotonic())
        return inference_pb2.GetClusterStateResponse(
            router_incarnation=os.getpid(), workers=workers, block_size=16, scaling=scaling, demand=_demand()
        )

    def Actuate(self, request: scaling_pb2.ActuateRequest, context: Any) -> scaling_pb2.ActuateResponse:
        with self.lock, _errors(context):
            return self.mailbox.actuate(request, time.monotonic())
        raise AssertionError

    def Scale(self, request: scaling_pb2.ScaleRequest, context: Any) -> scaling_pb2.ScaleResponse:
        with self.lock, _errors(context):
            return scaling_pb2.ScaleResponse(order=self.mailbox.scale(request, time.monotonic()))
        raise AssertionError

    def Flip(self, request: scaling_pb2.FlipRequest, context: Any) -> Iterator[inference_pb2.DrainProgress]:
        hello = self.registry.workers[request.worker_id]
        hello["draining"] = True
        hello["link"].sendall(b"f")  # before the first message, after which the caller may leave
        yield inference_pb2.DrainProgress(requests_placed=2, blocks_held=30)

    def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(model="scripted", block_size=16, max_model_len=1600, dtype="bfloat16")

    def Drain(self, request: inference_pb2.DrainRequest, context: Any) -> Iterator[inference_pb2.DrainProgress]:
        hello = self.registry.workers.get(request.worker_id)
        if hello is None:
            context.set_trailing_metadata((("pdserve-error-reason", "unknown_worker"),))
            context.abort(grpc.StatusCode.NOT_FOUND, f"worker_id: {request.worker_id!r} is not linked; linked: decode-0")
        roles = [_role(name, each) for name, each in self.registry.workers.items() if not each.get("draining")]
        role = _role(request.worker_id, hello)
        if roles.count(role) == 1 and not request.force:
            context.set_trailing_metadata((("pdserve-error-reason", "cannot_drain"),))
            kind = common_pb2.Role.Name(role).removeprefix("ROLE_").lower()
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.worker_id} is the last {kind} worker that serves")
        hello["draining"] = True
        hello["link"].sendall(b"d")  # before the first message, after which the caller may leave
        yield inference_pb2.DrainProgress(requests_placed=2, blocks_held=30)
        while self.registry.workers.get(request.worker_id) is hello:
            time.sleep(0.01)
        yield inference_pb2.DrainProgress(elapsed_s=0.1, done=True)

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
        if request.sampling.temperature > 2:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature: must be a number in [0, 2]")
        pause_s = float(os.environ.get("STANDIN_PAUSE_S", "0.01"))
        left = threading.Event()
        context.add_callback(left.set)
        for index, word in enumerate(WORDS):
            left.wait(SLOWLY_S if index and SLOWLY in str(request) else pause_s)
            last = index == len(WORDS) - 1
            yield inference_pb2.GenerateResponse(
                request_id="r",
                index=index,
                ids=[index],
                text=word,
                finish_reason=common_pb2.FINISH_REASON_STOP if last else common_pb2.FINISH_REASON_UNSPECIFIED,
                usage=inference_pb2.Usage(prompt_tokens=7, output_tokens=len(WORDS)) if last else None,
                report=self._report() if last else None,
            )

    def _report(self) -> inference_pb2.RequestReport:
        return inference_pb2.RequestReport(
            placement=common_pb2.PLACEMENT_DISAGGREGATED,
            placement_reason="scripted",
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            ttft_s=0.01,
            tpot_s=0.01,
            kv_bytes=int(os.environ.get("STANDIN_KV_BYTES", KV_BYTES)),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--log-file")
    parser.add_argument("--exit-with-parent", action="store_true")
    arguments = parser.parse_args()
    settings = config.load(config.RouterProcessConfig, arguments.config)
    router = settings.router
    print("a line of a log", file=sys.stderr, flush=True)
    try:
        http = socket.create_server((router.host, router.http_port))
    except OSError:
        print(f"error: --http-port {router.http_port} is in use", file=sys.stderr)
        raise SystemExit(2) from None
    link_host = router.link_host or router.host
    registry = Registry(link_host, router.link_port)
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    service = Inference(registry, settings)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    port = server.add_insecure_port(f"{router.host}:{router.grpc_port}")
    admin = server.add_insecure_port(f"{router.admin_host}:{router.admin_port_or_default}")
    server.start()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    addresses = {"http": http.getsockname()[1], "grpc": port, "admin": admin}
    ready = {name: f"{router.host}:{number}" for name, number in addresses.items()}
    ready["link"] = f"{link_host}:{registry.listener.getsockname()[1]}"
    ready["metrics"] = f"{router.metrics_host}:{router.metrics_port or 0}"  # nothing listens there
    print(json.dumps({"event": "ready", **ready, "pid": os.getpid()}), flush=True)
    threading.Thread(target=answer_http, args=(http,), daemon=True).start()
    if arguments.exit_with_parent:
        sys.stdin.buffer.read()  # until the parent is gone
    else:
        threading.Event().wait()
    os._exit(0)


if __name__ == "__main__":
    main()
