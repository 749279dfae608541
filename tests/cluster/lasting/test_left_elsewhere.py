"""The end of a cluster on a joined Ray that is away: its workers on other machines are named, and can still be adopted."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import cast

import pytest

from pdserve.cluster import plan
from pdserve.cluster.driver.driver import RayDriver
from pdserve.cluster.launch import Cluster
from pdserve.cluster.member import Member, MemberState
from pdserve.cluster.record import ClusterRecord
from pdserve.config import ClusterConfig

NAME = f"elsewhere-{os.getpid()}"
CONFIG = ClusterConfig(address="10.0.0.1:6379")


class LostRay:
    """A connection to Ray whose child is gone."""

    def __init__(self, folder: Path, *, lost: bool) -> None:
        self.lost = lost
        plans = plan.Blueprint(CONFIG, "10.0.0.1:1", "", folder, plan.WORKER_ENTRIES, NAME).plan_all()
        here, there = (dataclasses.replace(each, host=f"10.0.0.{index + 1}") for index, each in enumerate(plans[:2]))
        self.members = (Member(here, state=MemberState.RUNNING), Member(there, state=MemberState.RUNNING))

    def stop(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Started, with a worker on this machine and one on another."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Cluster(CONFIG, stop=threading.Event(), lasting=NAME)
    made._begin_record()
    made._host, made._started = "10.0.0.1", True
    return made


@pytest.mark.parametrize("lost", [True, False], ids=["before", "within the stop"])
def test_a_close_without_ray_keeps_the_record(cluster: Cluster, tmp_path: Path, lost: bool) -> None:
    """The workers kept their GPUs, the record with their secret was removed, and nothing was said to be left."""
    cluster._pool = cast(RayDriver, LostRay(tmp_path, lost=lost))
    cluster.close()
    assert len(cluster.left) == 1
    assert ("workers of other machines" if lost else "decode-0 at 10.0.0.2") in cluster.left[0]
    kept = ClusterRecord.find(NAME)
    assert kept is not None
    assert kept.facts is not None
    assert kept.facts.joined


def test_an_end_at_once_keeps_the_record(cluster: Cluster, tmp_path: Path) -> None:
    cluster._pool = cast(RayDriver, LostRay(tmp_path, lost=False))
    cluster.kill()
    assert cluster.left == ("decode-0 at 10.0.0.2",)
    assert ClusterRecord.find(NAME) is not None
    cluster.close()
