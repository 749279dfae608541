"""The keeper of a router outlives what a machine does to its files: the cluster serves on while no router can be started."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from pdserve.cluster.errors import ClusterError
from pdserve.cluster.events import Event, RouterBack, RouterLost
from pdserve.cluster.launch import Cluster, reachable
from pdserve.cluster.record import ClusterRecord
from pdserve.cluster.router.keeper import RouterKeeper
from pdserve.cluster.router_process import RouterProcess
from pdserve.config import ClusterConfig, RouterConfig, RouterProcessConfig
from pdserve.planner.limits import PoolSizes

STANDIN = (sys.executable, str(Path(__file__).resolve().parents[1] / "standin_router.py"))
SETTINGS = RouterProcessConfig(RouterConfig(http_port=0, grpc_port=0), cluster_token="t")
BOUND_S = 60.0


def test_a_router_is_started_again_once_its_folder_can_be_made(tmp_path: Path) -> None:
    """(1) The record's folder is gone, a file is in its place. (2) The router dies, and cannot be started: that raised out of
    the supervision. (3) The file is gone: the folder is made again, and the router is back."""
    kept = ClusterRecord.open("a", tmp_path / "root")
    process = RouterProcess(SETTINGS, folder=kept.folder, log=tmp_path / "log", command=STANDIN, lasting=True)
    events: list[Event] = []
    keeper = RouterKeeper(process, record=kept, listener=events.append, dial=reachable)
    keeper._life.backoff.first_s = keeper._life.backoff.longest_s = 0.01

    def tick_until(kind: type[Event], count: int = 1) -> None:
        deadline = time.monotonic() + BOUND_S
        while sum(isinstance(event, kind) for event in events) < count:
            assert time.monotonic() < deadline, events
            keeper.tick(time.monotonic())
            time.sleep(0.01)

    keeper.begin(threading.Event(), 0.0)
    try:
        keeper.wait_ready(threading.Event())
        shutil.rmtree(kept.folder)
        kept.folder.touch()
        keeper.kill()
        tick_until(RouterLost, 2)
        kept.folder.unlink()
        tick_until(RouterBack)
        assert kept.router is not None
        assert kept.router.process == process.process
    finally:
        keeper.close(0.0)


def test_a_router_whose_ready_file_is_gone_is_a_failure_and_no_crash(tmp_path: Path) -> None:
    process = RouterProcess(SETTINGS, folder=tmp_path, log=tmp_path / "log", command=(sys.executable, "-c", "input()"))
    process.start()
    (tmp_path / "router.ready").unlink()
    try:
        with pytest.raises(ClusterError, match=r"router\.ready"):
            process.ready()
    finally:
        process.stop(0.0)


def test_sizes_that_cannot_be_recorded_end_nothing(tmp_path: Path) -> None:
    cluster = Cluster(ClusterConfig(), stop=threading.Event())
    cluster._record = ClusterRecord.open("a", tmp_path / "root")
    shutil.rmtree(cluster._record.folder)
    cluster._keep_sizes(PoolSizes(1, 1))
