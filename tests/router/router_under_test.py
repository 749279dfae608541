"""The real router in this process, on free ports, with scripted workers: what its shell is tested through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from pdserve.config import EngineConfig, RouterConfig, RouterProcessConfig
from pdserve.rpc.status import REASON_METADATA
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pdserve.testing.fake_worker import DECODE, PREFILL, FakeWorker
from router import main
from router.service import RouterService

TOKEN = "of-this-cluster"
PROMPT = tuple(range(10, 30))
BOUND_S = 10.0


@dataclass
class UnderTest:
    service: RouterService
    grpc_address: str
    link_address: str
    http: str
    stub: Any
    channel: grpc.aio.Channel
    fingerprint: str
    workers: list[FakeWorker] = field(default_factory=list)

    def worker(self, role: common_pb2.Role, **changes: Any) -> FakeWorker:
        """Not dialled yet."""
        values: dict[str, Any] = {"cluster_token": TOKEN, "model_fingerprint": self.fingerprint, "max_model_len": 2048}
        return FakeWorker(role, self.link_address, **(values | changes))

    @property
    def prefill(self) -> FakeWorker:
        return next(w for w in self.workers if w.role == PREFILL)

    @property
    def decode(self) -> FakeWorker:
        return next(w for w in self.workers if w.role == DECODE)

    async def assert_empty(self) -> None:
        """No request, ledger entry, work at a worker; whoever held something was told to drop it."""
        core = self.service.core
        await until(lambda: core.num_requests == 0 and not any(w.live_handles for w in self.workers if w.connected))
        core.check_invariants()
        assert len(core.ledger) == len(core.waiting) == 0
        assert not self.service._generations


async def until(condition: Callable[[], object], bound_s: float = BOUND_S) -> None:
    async with asyncio.timeout(bound_s):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(roles: Sequence[common_pb2.Role] = (PREFILL, DECODE), **router: Any) -> AsyncIterator[UnderTest]:
    """A router and a worker of each role. Nothing may be left when the block ends well."""
    service: list[RouterService] = []
    ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    config = RouterProcessConfig(
        RouterConfig(http_port=0, grpc_port=0, **router), EngineConfig(model="tiny", dtype="float32"), TOKEN
    )
    make = main.make_service

    def remember(config: RouterProcessConfig) -> RouterService:
        service.append(make(config))
        return service[0]

    main.make_service = remember  # only to look inside: what runs is what a process runs
    try:
        serving = asyncio.create_task(main.serve(config, stop, ready.set_result))
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    finally:
        main.make_service = make
    if serving.done():
        serving.result()
    where = ready.result()
    try:
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(where["grpc"]))
            stub = inference_pb2_grpc.InferenceStub(channel)
            router_ = service[0]
            under_test = UnderTest(
                router_, where["grpc"], where["link"], f"http://{where['http']}", stub, channel, router_.card.fingerprint
            )
            for role in roles:
                under_test.workers.append(await stack.enter_async_context(under_test.worker(role)))
            yield under_test
            await under_test.assert_empty()
    finally:
        stop.set()
        await asyncio.wait_for(serving, BOUND_S)


def generate(**fields: Any) -> inference_pb2.GenerateRequest:
    """A request of PROMPT, unless told otherwise; `sampling` as a mapping."""
    sampling = common_pb2.SamplingParams(**fields.pop("sampling", {"max_tokens": 4}))
    request = inference_pb2.GenerateRequest(sampling=sampling, **fields)
    if request.WhichOneof("prompt") is None:
        request.tokens.ids.extend(PROMPT)
    return request


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """What a call that must fail fails with."""
    try:
        async with asyncio.timeout(BOUND_S):
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as exc:
        return exc
    raise AssertionError("the call succeeded")


def reason(error: grpc.aio.AioRpcError) -> str:
    found = dict(error.trailing_metadata() or ()).get(REASON_METADATA, "")
    assert isinstance(found, str)
    return found
