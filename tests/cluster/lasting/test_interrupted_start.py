"""A `pdserve up` that adopts a cluster is told to end before it has: what served before goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cluster.errors import Interrupted
from pdserve.cluster.launch import Cluster
from pdserve.cluster.record import ClusterRecord, mark_of
from pdserve.config import ClusterConfig

NAME = f"interrupted-{os.getpid()}"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the cluster that ran before."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **mark_of(NAME)})
    yield child
    child.kill()
    child.communicate()


def starting() -> Cluster:
    cluster = Cluster(ClusterConfig(), stop=threading.Event(), lasting=NAME)
    cluster._begin_record()
    return cluster


def test_an_interrupted_start_leaves_what_served_before(served: subprocess.Popen[bytes]) -> None:
    with pytest.raises(Interrupted), starting() as cluster:
        raise Interrupted
    assert cluster.leaves
    assert served.poll() is None
    assert ClusterRecord.find(NAME) is not None


def test_so_does_one_that_is_ended_at_once(served: subprocess.Popen[bytes]) -> None:
    cluster = starting()
    cluster.kill()
    assert served.poll() is None
    assert ClusterRecord.find(NAME) is not None
    cluster.close(leave=cluster.leaves)


def test_a_cluster_that_has_started_ends_with_its_up(served: subprocess.Popen[bytes]) -> None:
    with starting() as cluster:
        cluster._started = True
    assert served.wait(60) == -9
    assert ClusterRecord.find(NAME) is None
