"""A server that runs already, with a command that somebody else has written: what it lacks is told at the start."""

from __future__ import annotations

import asyncio

import pytest
from stand_ins import attached

from pdserve.config import EngineConfig, WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.vllm.engine import VllmEngine

pytestmark = pytest.mark.cluster


def load(config: EngineConfig, role: common_pb2.Role) -> VllmEngine:
    worker = WorkerConfig("w", "127.0.0.1:1", config)
    engine = VllmEngine(worker, role, lambda *_: None, lambda _: None)
    engine.load()
    return engine


def test_a_server_that_can_hand_over_serves_both_roles() -> None:
    with attached() as config:
        for role in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE):
            assert load(config, role).traits.engine == "vllm 0.32.0"


@pytest.mark.parametrize("role", [common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE])
def test_a_server_without_scale_out_is_refused_at_the_start(role: common_pb2.Role) -> None:
    with attached(no_scale_out=True) as config, pytest.raises(ConfigError, match="start its vLLM with --enable-scale-out"):
        load(config, role)


def test_a_server_that_lends_no_kv_is_refused_where_it_must() -> None:
    with attached(no_connector=True) as config:
        with pytest.raises(ConfigError, match=r"--kv-transfer-config .*NixlConnector"):
            load(config, common_pb2.ROLE_PREFILL)
        reader = load(config, common_pb2.ROLE_DECODE)
        with pytest.raises(ConfigError, match=r"--kv-transfer-config .*NixlConnector"):
            asyncio.run(reader.take_role(common_pb2.ROLE_PREFILL))


def test_a_server_that_fails_every_request_is_refused_at_the_start() -> None:
    with attached(error_at=1) as config, pytest.raises(ConfigError, match="request of one token with status 500"):
        load(config, common_pb2.ROLE_DECODE)
