"""A router with real sockets and scripted workers, in this process and loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from pdserve.config import EngineConfig, RouterConfig
from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.grpc.admin import AdminServer
from router.grpc.front import GrpcFront
from router.parsing.parser import RequestParser
from router.service.model import ServedModel
from router.service.service import RouterService
from router.workers.link import LinkThread
from testkit.fake_worker import DECODE, PREFILL, FakeWorker, expected_text, token_at

TOKEN = "secret"
HOST = "127.0.0.1"
MAX_CONNECTIONS = 64


@functools.cache
def tiny_model() -> ServedModel:
    return ServedModel.load(EngineConfig(model="tiny", max_model_len=256))


@dataclass
class Answer:
    """All that one Generate call streamed."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    last: inference_pb2.GenerateResponse | None = None

    @property
    def report(self) -> inference_pb2.RequestReport:
        assert self.last is not None
        return self.last.report


@dataclass
class LocalCluster:
    service: RouterService
    parser: RequestParser
    stub: Any
    channel: grpc.aio.Channel
    link_address: str
    grpc_address: str
    admin: Any
    workers: list[FakeWorker]
    admin_port: int

    @property
    def prefill(self) -> FakeWorker:
        return next(w for w in self.workers if w.role == PREFILL)

    @property
    def decode(self) -> FakeWorker:
        return next(w for w in self.workers if w.role == DECODE)

    def worker(self, role: Any, **settings: Any) -> FakeWorker:
        """Not yet started."""
        number = sum(w.role == role for w in self.workers)
        defaults: dict[str, Any] = {
            "worker_id": f"{'prefill' if role == PREFILL else 'decode'}-{number}",
            "cluster_token": TOKEN,
            "model_fingerprint": self.service.model.card.fingerprint,
            "vocab_size": self.service.model.card.vocab_size,
        }
        worker = FakeWorker(role, self.link_address, **(defaults | settings))
        self.workers.append(worker)
        return worker

    async def generate(self, ids: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
        """Raises grpc.aio.AioRpcError. Checks that indices follow one another."""
        request = generate_request(ids, max_tokens, **fields)
        return await read_answer(self.stub.Generate(request))

    async def assert_idle(self) -> None:
        """Nothing is left on any worker nor in the router."""
        for worker in self.workers:
            await worker.wait_empty()
        core = self.service._core
        core.check_invariants()
        assert core.num_requests == 0
        assert len(core.ledger) == 0
        assert not self.service._live
        assert not self.service._open


async def read_answer(call: Any) -> Answer:
    answer = Answer()
    async for message in call:
        assert message.index == len(answer.ids)
        answer.ids.extend(message.ids)
        answer.text += message.text
        if message.finish_reason:
            assert answer.last is None
            answer.last = message
    return answer


async def cancel_request(call: Any) -> inference_pb2.CancelRequest:
    """What cancels the request of a running Generate call, as its initial metadata says."""
    told = dict(await call.initial_metadata())
    return inference_pb2.CancelRequest(request_id=told["pdserve-request-id"], cancel_token=told["pdserve-cancel-token"])


def generate_request(ids: Sequence[int], max_tokens: int, **fields: Any) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(**fields)
    request.tokens.ids.extend(ids)
    request.sampling.max_tokens = max_tokens
    return request


def right_ids(ids: Sequence[int], count: int) -> list[int]:
    return [token_at(ids, index, tiny_model().card.vocab_size) for index in range(count)]


def right_text(ids: Sequence[int], count: int) -> str:
    return expected_text(ids, count, tiny_model().card.vocab_size)


@contextlib.asynccontextmanager
async def local_cluster(
    roles: Sequence[Any] = (PREFILL, DECODE),
    *,
    worker: Callable[[], dict[str, Any]] = dict,
    model: ServedModel | None = None,
    **config: Any,
) -> AsyncIterator[LocalCluster]:
    """`worker()` gives settings of every worker; `config` those of the router. `model` is the tiny one unless it is given.

    Workers are not probed unless asked: many tests count what a worker was sent.
    """
    links = LinkThread(TOKEN)
    service = RouterService(RouterConfig(**({"probe_workers": False} | config)), model or tiny_model(), links=links)
    async with contextlib.AsyncExitStack() as stack:
        service.start()
        stack.push_async_callback(service.close)
        parser = RequestParser(service.max_body_bytes)
        stack.callback(parser.close)
        stack.push_async_callback(links.close)
        link_port = await links.start(service.hear, HOST, 0)
        front = GrpcFront(service, parser, MAX_CONNECTIONS)
        stack.push_async_callback(front.close)
        await front.start(HOST, 0)
        address = f"{HOST}:{front.port}"
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = inference_pb2_grpc.InferenceStub(channel)
        admin_server = AdminServer(service, TOKEN, 32)
        stack.push_async_callback(admin_server.close)
        await admin_server.start(HOST, 0)
        admin_channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{HOST}:{admin_server.port}"))
        admin = admin_pb2_grpc.AdminStub(admin_channel)
        cluster = LocalCluster(service, parser, stub, channel, f"{HOST}:{link_port}", address, admin, [], admin_server.port)
        for role in roles:
            await stack.enter_async_context(cluster.worker(role, **worker()))
        yield cluster
