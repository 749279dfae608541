"""Starts a prefill worker: in a Ray actor, or by `python -m prefill_worker`."""

from __future__ import annotations

from pdserve.config import WorkerConfig
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.runtime import RunningWorker
from prefill_worker.role import PrefillRole


def start(config: WorkerConfig) -> RunningWorker:
    """Blocks until the model is loaded and the services are up."""
    return RunningWorker(config, common_pb2.ROLE_PREFILL, PrefillRole).start()
