"""Starts a decode worker: in a Ray actor, or by `python -m decode_worker`."""

from __future__ import annotations

from decode_worker.role import DecodeRole
from pdserve.config import WorkerConfig
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.runtime import RunningWorker


def start(config: WorkerConfig) -> RunningWorker:
    """Blocks until the model is loaded and the services are up."""
    return RunningWorker(config, common_pb2.ROLE_DECODE, DecodeRole).start()
