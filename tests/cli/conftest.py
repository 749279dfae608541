"""A stand-in router that answers the client's side of the API; started once for all tests of the clients."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cluster.router_process import Endpoints, RouterProcess
from pdserve.config import RouterConfig, RouterProcessConfig

STANDIN = Path(__file__).resolve().parents[1] / "cluster" / "standin_router.py"


@pytest.fixture(scope="session")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    folder = tmp_path_factory.mktemp("router")
    settings = RouterProcessConfig(RouterConfig(http_port=0, grpc_port=0))
    router = RouterProcess(settings, folder=folder, log=folder / "log", command=(sys.executable, str(STANDIN)))
    router.start()
    try:
        yield router.wait_ready(threading.Event())
    finally:
        router.stop()


@pytest.fixture(scope="session")
def address(endpoints: Endpoints) -> str:
    """host:port of its gRPC, which answers for its administration as well."""
    return endpoints.grpc
