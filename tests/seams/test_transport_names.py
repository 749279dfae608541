"""A worker chooses its transport by name, and workers with different transports are told apart."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.api import Region, TransferDevice
from kvtransfer.backends.cma import CmaTransport
from kvtransfer.backends.registry import prepare
from kvtransfer.lease_client import PeerLink
from kvtransfer.lease_service import PeerService
from pdserve.cluster.plan import plan_workers
from pdserve.config import ClusterConfig, LeaseConfig, load
from pdserve.core.errors import ConfigError, IncompatiblePeer, TransferFailed
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.rpc.v1 import peer_pb2_grpc

LENDER = Incarnation(7)
POOL = np.zeros((4, 64), np.uint8)
REGION = Region(POOL.ctypes.data, 4, 64)


@contextlib.asynccontextmanager
async def link_to(ours: str, **theirs: Any) -> AsyncIterator[PeerLink]:
    server = grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(PeerService(LENDER, b"agent", cluster_token="t", **theirs), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    link = PeerLink(LENDER, address, LeaseConfig(), cluster_token="t", transport=ours)
    try:
        yield link
    finally:
        await link.close()
        await server.stop(None)


def handshake(ours: str, **theirs: Any) -> bytes:
    async def run() -> bytes:
        async with link_to(ours, **theirs) as link:
            return await link.handshake()

    return asyncio.run(run())


def test_two_transports_are_told_apart_and_both_are_named() -> None:
    with pytest.raises(IncompatiblePeer, match=r"transfer\.transport is mine:make at 127.* and cma at this worker"):
        handshake("cma", transport="mine:make")


def test_equal_transports_and_a_lender_that_names_none_are_accepted() -> None:
    assert handshake("cma", transport="cma") == b"agent"
    assert handshake("nixl", transport="") == b"agent", "a lender of an earlier release has NIXL"
    with pytest.raises(IncompatiblePeer, match=r"is nixl at .* and cma at"):
        handshake("cma", transport="")


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    known = r"transfer\.transport must be one of nixl, cma, fake, or module:function .* got 'tcp'"
    with pytest.raises(ConfigError, match=known):
        prepare("tcp", "127.0.0.1", allow_public=False)


@pytest.mark.parametrize(
    ("prepares", "says"),
    [
        (lambda host, allow_public: None, "this function returned None"),
        (lambda: None, "this function raised TypeError: "),
        (lambda host, allow_public: sys.exit(0), "this function raised SystemExit: 0"),
    ],
)
def test_a_function_that_prepares_no_transport_is_refused_by_name(
    prepares: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker loaded its model and failed afterwards, or ended with the status of a good end."""
    monkeypatch.setitem(sys.modules, "no_transport", types.SimpleNamespace(prepare=prepares))
    with pytest.raises(ConfigError, match=f"^transfer.transport is 'no_transport:prepare', and {says}"):
        prepare("no_transport:prepare", "127.0.0.1", allow_public=False)


def test_nixl_checks_the_host_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="not a loopback address"):
        prepare("nixl", "0.0.0.0", allow_public=False)


def test_a_cma_peer_without_a_start_time_is_no_living_process() -> None:
    """A process that does not exist has no start time either, so the two were equal."""
    transport = CmaTransport(WorkerId("decode-0"), Incarnation(1), [])
    machine = msgpack.unpackb(transport.metadata(), use_list=False)[1]
    absent = msgpack.packb((2, machine, 1 << 33, "", ((4096, 1, 4096),)))
    with pytest.raises(TransferFailed, match="has ended"):
        transport.connect(Incarnation(2), absent)


def test_the_registry_loads_no_transport() -> None:
    code = (
        "import sys, kvtransfer.backends.registry\n"
        "sys.exit(any(f'kvtransfer.backends.{name}' in sys.modules for name in ('nixl', 'cma', 'fake')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_setting_is_a_section_with_a_flag_of_its_own() -> None:
    assert ClusterConfig().transfer.transport == "nixl"
    assert load(ClusterConfig, None, ["transfer.transport=cma"]).transfer.transport == "cma"
    with pytest.raises(ConfigError, match=r"transfer\.transport must be text"):
        load(ClusterConfig, None, ["transfer.transport=3"])


def metadata(**changes: Any) -> bytes:
    names = ("incarnation", "machine", "pid", "started", "pool")
    fields = dict(zip(names, msgpack.unpackb(own().metadata()), strict=True)) | changes
    return bytes(msgpack.packb(tuple(fields.values())))


def own() -> CmaTransport:
    return CmaTransport(WorkerId("w"), LENDER, [REGION])


def test_cma_refuses_a_pool_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="host memory only"):
        CmaTransport(WorkerId("w"), LENDER, [dataclasses.replace(REGION, device=TransferDevice("cuda"))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "another"}, "another machine"),
        ({"started": "1"}, "has ended"),  # the id of a process that has ended now belongs to this one
        ({"pid": 1 << 40}, "has ended"),
        ({"pid": 0}, "not that of a cma transport"),
        ({"pid": str(os.getpid())}, "not that of a cma transport"),
        ({"pool": ()}, "not that of a cma transport"),
        ({"pool": ((1, 2, 3),) * 17}, "not that of a cma transport"),
        ({"pool": ((1, 2),)}, "not that of a cma transport"),
        ({"pool": (1, 2, 3)}, "not that of a cma transport"),
        ({"pool": ((1, 2, 0),)}, "not that of a cma transport"),
        ({"pool": ((1, True, 3),)}, "not that of a cma transport"),
        ({"incarnation": 8}, "names another process"),
    ],
)
def test_cma_refuses_a_process_that_is_not_the_peer(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TransferFailed, match=message):
        own().connect(LENDER, metadata(**changes))


@given(st.binary(max_size=600))
def test_cma_refuses_garbage(data: bytes) -> None:
    with pytest.raises(TransferFailed, match="not that of a cma transport"):
        own().connect(LENDER, data)


def test_cma_reads_more_blocks_than_one_call_takes() -> None:
    """A call takes 512 blocks here; the order of the blocks is kept over the calls."""
    source, into = np.arange(1200, dtype=np.uint64)[:, None], np.zeros((1200, 1), np.uint64)
    lender = CmaTransport(WorkerId("l"), LENDER, [Region(source.ctypes.data, 1200, 8)])
    reader = CmaTransport(WorkerId("r"), Incarnation(1), [Region(into.ctypes.data, 1200, 8)])
    reader.connect(LENDER, lender.metadata())
    order = list(range(1199, -1, -1))
    reader.post_read(LENDER, Region(source.ctypes.data, 1200, 8), order, list(range(1200)), Region(into.ctypes.data, 1200, 8))
    assert into[:, 0].tolist() == order


def test_every_worker_of_a_cluster_gets_the_cluster_s_transport(tmp_path: Path) -> None:
    config = load(ClusterConfig, None, ["transfer.transport=cma", "decode.replicas=2"])
    plans = plan_workers(config, router_address="127.0.0.1:1", cluster_token="t", log_dir=tmp_path)
    assert [plan.config.transfer.transport for plan in plans] == ["cma"] * 3
