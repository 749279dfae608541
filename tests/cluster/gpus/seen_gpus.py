"""A stand-in for a worker that writes down the GPUs that its process may see, and on which device it was told to compute."""

from __future__ import annotations

import os
from pathlib import Path

import standin_worker

from pdserve.checkpoint.progress import Progress
from pdserve.config import WorkerConfig


def start_prefill(config: WorkerConfig, progress: Progress) -> standin_worker.Worker:
    _note(config)
    return standin_worker.start_prefill(config, progress)


def start_decode(config: WorkerConfig, progress: Progress) -> standin_worker.Worker:
    _note(config)
    return standin_worker.start_decode(config, progress)


def _note(config: WorkerConfig) -> None:
    engine = config.engine
    said = (os.environ.get("CUDA_VISIBLE_DEVICES", "all"), engine.device, f"{engine.gpu_memory_utilization:.3f}")
    (Path(os.environ["SEEN"]) / config.worker_id).write_text(" ".join(said))
