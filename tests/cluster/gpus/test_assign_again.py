"""A cluster is adopted with the GPUs that its workers were given, also when another number of them is there now."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cluster import plan
from pdserve.cluster.keeping.order import WorkerFacts, settings_digest, write_facts
from pdserve.cluster.launch import Cluster
from pdserve.cluster.record import ProcessId
from pdserve.config import ClusterConfig

NAME = f"assigned-{os.getpid()}"
CONFIG = ClusterConfig()  # a prefill worker and a decode worker


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """One that has two GPUs, with a worker that runs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Cluster(CONFIG, stop=threading.Event(), lasting=NAME)
    made._begin_record()
    made._assign_gpus(2)
    assert made._record is not None
    planned = plan.Blueprint(made.config, "router:1", "", tmp_path, plan.WORKER_ENTRIES, NAME).plan(plan.DECODE, "decode-0")
    config = dataclasses.replace(planned.config, cluster_token=made._token)
    facts = WorkerFacts(ProcessId.own(), "", plan.DECODE, "", settings_digest(config))
    write_facts(made._record, "decode-0", facts)
    yield made
    made.close()


def test_a_gpu_that_came_or_went_makes_no_cluster_unadoptable(cluster: Cluster) -> None:
    """The next `pdserve up` counted anew, and refused the workers that run as ones with other settings."""
    for present in (1, 0, 8):
        cluster.config = CONFIG
        cluster._assign_gpus(present)
        assert cluster.config.decode.num_gpus == 1.0


def test_gpus_are_counted_anew_once_no_worker_runs(cluster: Cluster) -> None:
    assert cluster._record is not None
    cluster._record.forget_worker("decode-0")
    cluster.config = CONFIG
    cluster._assign_gpus(1)
    assert cluster.config.decode.num_gpus == 0.5
