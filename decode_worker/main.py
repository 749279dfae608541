"""The start of a decode worker, in a Ray actor or by `python -m decode_worker`."""

from __future__ import annotations

from pdserve.checkpoint.progress import Progress, silent
from pdserve.config import WorkerConfig
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.process import RunningWorker


def start(config: WorkerConfig, progress: Progress = silent) -> RunningWorker:
    """Start a decode worker. Return when its model is loaded and its services are up; raises what went wrong."""
    return RunningWorker(config, common_pb2.ROLE_DECODE, progress).start()
