"""The port of OpenEngine and the lives of its worker: leases that nobody takes, role flips, and who may call from where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest

from decode_worker.main import start as start_decode
from pdserve.config import MIB, EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.rpc.channel import token_metadata
from pdserve.rpc.v1 import common_pb2, openengine_pb2, openengine_pb2_grpc
from pdserve.worker.openengine.port import OpenEnginePort
from pdserve.worker.process import RunningWorker
from prefill_worker.main import start as start_prefill
from testkit.scripted_router import ScriptedRouter

WAIT_S = 60.0
ENGINE = EngineConfig(
    model="tiny", dtype="float32", batch_invariant=True, max_num_batched_tokens=48, kv_cache_memory=4 * MIB,
    max_model_len=512, threads=1, max_num_seqs=8,
)  # fmt: skip
PROMPT = [i * 7 % 250 for i in range(100)]


def config(name: str, router_address: str, **changes: Any) -> WorkerConfig:
    lease = LeaseConfig(ttl_s=4.0)  # twice as long as a busy machine may stand still
    return WorkerConfig(name, router_address, ENGINE, lease, openengine_port=0, heartbeat_interval_s=0.05, **changes)


@pytest.fixture
def running() -> Iterator[Callable[[RunningWorker], RunningWorker]]:
    with ExitStack() as stack:

        def keep(worker: RunningWorker) -> RunningWorker:
            stack.callback(worker.stop)
            return worker

        yield keep


def request(session: openengine_pb2.KvSessionRef | None = None) -> openengine_pb2.GenerateRequest:
    made = openengine_pb2.GenerateRequest(token_ids=openengine_pb2.TokenIds(ids=PROMPT))
    made.sampling.temperature = 0.0
    made.stopping.max_tokens = 12
    made.stopping.ignore_eos = True
    if session is not None:
        made.kv.session.CopyFrom(session)
    return made


def run(address: str, message: openengine_pb2.GenerateRequest) -> list[openengine_pb2.GenerateResponse]:
    with grpc.insecure_channel(address) as channel:
        return list(openengine_pb2_grpc.InferenceStub(channel).Generate(message, timeout=WAIT_S))  # type: ignore[no-untyped-call]


def ids_of(answer: list[openengine_pb2.GenerateResponse]) -> list[int]:
    return [info.token_id for one in answer for info in one.token.tokens]


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_lease_that_nobody_takes_expires_without_a_router(running: Any) -> None:
    """No heartbeat goes out, with which leases end elsewhere."""
    lender, reader = running(start_prefill(config("p", ""))), running(start_decode(config("d", "")))
    *_, last = run(lender.openengine_address, request())
    session = last.prefill_ready.kv_session
    with grpc.insecure_channel(lender.openengine_address) as channel:
        control = openengine_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]

        def load() -> openengine_pb2.LoadInfo:
            return control.GetLoad(openengine_pb2.GetLoadRequest(), timeout=WAIT_S)

        assert load().active_kv_sessions == 1
        until(lambda: load().active_kv_sessions == 0 and load().used_kv_blocks == 0)
        abort = openengine_pb2.AbortRequest(kv_session=session)
        assert control.Abort(abort, timeout=WAIT_S).status == openengine_pb2.ABORT_STATUS_ALREADY_FINISHED
    (answer,) = run(reader.openengine_address, request(session))
    assert answer.error.code == openengine_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND


def test_a_flip_ends_sessions_and_the_port_has_the_other_role(running: Any) -> None:
    """(1) A lender at a port of its own flips; its lease has no reader, and expires first. (2) At the same port it now computes
    whole requests, (3) and the session of its other life is gone. (4) It lends again after another flip."""
    with ScriptedRouter() as router:
        lender, reader = running(start_prefill(config("p", router.address))), running(start_decode(config("d", router.address)))
        address = lender.openengine_address
        lender.config = _at_port(lender.config, address)  # lives of a worker without a fixed port have one each
        *_, last = run(address, request())
        want = ids_of(run(reader.openengine_address, request()))
        before = router.worker("p")
        router.flip(before, common_pb2.ROLE_DECODE)
        after = router.next_life(before)
        assert ids_of(run(address, request())) == want
        (answer,) = run(reader.openengine_address, request(last.prefill_ready.kv_session))
        gone = (openengine_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND, openengine_pb2.ERROR_CODE_KV_TRANSFER_FAILED)
        assert answer.error.code in gone
        router.flip(after, common_pb2.ROLE_PREFILL)
        router.next_life(after)
        *_, last = run(address, request())
        assert ids_of(run(reader.openengine_address, request(last.prefill_ready.kv_session))) == want


def _at_port(given: WorkerConfig, address: str) -> WorkerConfig:
    return replace(given, openengine_port=int(address.rpartition(":")[2]))


class Refused(Exception):
    """The call was aborted."""


class Context:
    """A call with some metadata."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Any:
        return self._metadata

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(code)


@pytest.mark.parametrize(("host", "asks"), [("127.0.0.1", False), ("::1", False), ("10.0.0.7", True)])
def test_the_token_is_asked_of_callers_on_other_machines(host: str, asks: bool) -> None:
    """As at the port for administration: loopback does not tell users apart anyway."""

    async def story() -> None:
        given = config("w", "", host=host, cluster_token="secret", allow_public_bind=True)
        port = OpenEnginePort(given, lambda message: None, 64)
        await port._authorise(Context(token_metadata("secret")))
        for wrong in ((), token_metadata("other")):
            if asks:
                with pytest.raises(Refused):
                    await port._authorise(Context(wrong))
            else:
                await port._authorise(Context(wrong))
        await port.close()

    asyncio.run(story())


def test_settings_that_leave_a_worker_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"router_address is empty"):
        WorkerConfig("w", "")
    with pytest.raises(ConfigError, match="cluster_token is empty"):
        config("w", "", host="10.0.0.7")


def test_a_taken_port_names_the_setting(running: Any) -> None:
    first = running(start_decode(config("d", "")))
    given = _at_port(config("e", ""), first.openengine_address)
    with pytest.raises(ConfigError, match=r"^openengine_port: port \d+ of 127\.0\.0\.1 is in use"):
        start_decode(given)
