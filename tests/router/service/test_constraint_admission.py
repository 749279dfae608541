"""No worker ignores a field: the router refuses constraints that do not compile, and what an older worker would not follow."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from pdserve.config import RouterConfig
from pdserve.core.errors import PdserveError
from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.core.worker import (
    CONSTRAINT_LINK_VERSION,
    LINK_VERSIONS,
    SPEC_LINK_VERSIONS,
    TEXT_LINK_VERSION,
    Role,
    newest_field,
)
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2, link_pb2
from router.core import events as ev
from router.service.service import RouterService
from testkit.fake_worker import DECODE

from ..core_peers import hello
from ..local_cluster import local_cluster, tiny_model

REGEX = common_pb2.StructuredOutputs(regex="a+")


class Sent:
    """Links that note the bodies of messages."""

    def __init__(self) -> None:
        self.bodies: list[str] = []

    def send(self, link: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        self.bodies.append(message.WhichOneof("body") or "")

    def hang_up(self, link: ev.LinkId, error: PdserveError) -> None:
        self.bodies.append("hang up")

    def take_alive(self) -> tuple[ev.LinkId, ...]:
        return ()


def _with(field: str) -> RequestSpec:
    """Return a request that sets this field."""
    options: dict[str, Any] = {"include_stop_str_in_output": True, "skip_special_tokens": False, "prompt_logprobs": 0}
    sampling = SamplingParams(max_tokens=3, **({field: options[field]} if field in options else {}))
    return RequestSpec((1, 2), sampling, constraint=None if field in options else Constraint(ConstraintKind.REGEX, "a+"))


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize(("field", "since"), [(field, since) for field, since, _ in SPEC_LINK_VERSIONS])
def test_a_worker_that_would_ignore_a_field_is_not_sent_it(field: str, since: int, newest: bool) -> None:
    """It has linked after the request was admitted. Its work without the field goes on."""
    version = LINK_VERSIONS.newest if newest else since - 1
    assert newest_field(_with(field)) == (field, since)

    async def story() -> None:
        links = Sent()
        made = RouterService(RouterConfig(probe_workers=False), tiny_model(), links=links)  # type: ignore[arg-type]
        fingerprint = tiny_model().card.fingerprint
        made.tell(ev.WorkerJoined(ev.LinkId(1), hello("d", Role.DECODE, model_fingerprint=fingerprint, link_version=version)))
        for name, spec in (("free", RequestSpec((1, 2), SamplingParams(max_tokens=3))), ("bound", _with(field))):
            made._start(ev.Submit(RequestId(name), spec, arrived_s=0.0, deadline_s=math.inf))
        told = [made._core.requests.get(RequestId(name)) for name in ("free", "bound")]
        assert None not in told
        for _ in range(20):
            made._tick()
            await asyncio.sleep(0)
        assert links.bodies.count("bind") == (2 if newest else 1)
        await made.close()

    asyncio.run(story())


def test_a_constraint_is_refused_while_an_older_worker_is_linked() -> None:
    async def story() -> None:
        async with asyncio.timeout(90), local_cluster((DECODE,)) as cluster:
            (worker,) = cluster.service._core.registry
            assert worker.link_version < CONSTRAINT_LINK_VERSION
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.generate((1, 2), 3, structured_outputs=REGEX)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "decode-0" in (caught.value.details() or "")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.generate((1, 2), 3, structured_outputs=common_pb2.StructuredOutputs(regex="("))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert len((await cluster.generate((1, 2), 3)).ids) == 3
            await cluster.assert_idle()

    asyncio.run(story())


LATER = [
    {"include_stop_str_in_output": True},
    {"skip_special_tokens": False},
]


@pytest.mark.parametrize("fields", LATER)
def test_a_later_field_of_sampling_is_neither_accepted_for_nor_sent_to_an_older_worker(fields: dict[str, bool]) -> None:
    """The table names the field, the first version that has it, and nothing for a request without it."""
    (name,) = fields
    plain = RequestSpec((1, 2), SamplingParams(max_tokens=3))
    spec = RequestSpec((1, 2), SamplingParams(max_tokens=3, **fields))
    assert newest_field(plain) == ("", 0)
    assert newest_field(spec) == (name, TEXT_LINK_VERSION)

    async def story() -> None:
        for version, binds in ((TEXT_LINK_VERSION - 1, 1), (TEXT_LINK_VERSION, 2)):
            links = Sent()
            made = RouterService(RouterConfig(probe_workers=False), tiny_model(), links=links)  # type: ignore[arg-type]
            worker = hello("d", Role.DECODE, model_fingerprint=tiny_model().card.fingerprint, link_version=version)
            made.tell(ev.WorkerJoined(ev.LinkId(1), worker))
            for request_id, one in (("plain", plain), ("later", spec)):
                made._start(ev.Submit(RequestId(request_id), one, arrived_s=0.0, deadline_s=math.inf))
            for _ in range(20):
                made._tick()
                await asyncio.sleep(0)
            assert links.bodies.count("bind") == binds
            await made.close()
        async with asyncio.timeout(90), local_cluster((DECODE,)) as cluster:
            sampling = common_pb2.SamplingParams(max_tokens=3, **fields)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.generate((1, 2), 3, sampling=sampling)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert name in (caught.value.details() or "")
            assert "decode-0" in (caught.value.details() or "")

    asyncio.run(story())


def test_a_message_without_skip_special_tokens_skips_them() -> None:
    """A router of an older release does not write the field."""
    wire = codec.spec_to_wire(RequestSpec((1,), SamplingParams()))
    wire.sampling.ClearField("skip_special_tokens")
    assert codec.spec_from_wire(wire).sampling.skip_special_tokens
    for skip in (True, False):
        spec = RequestSpec((1,), SamplingParams(skip_special_tokens=skip))
        assert codec.spec_from_wire(codec.spec_to_wire(spec)) == spec
