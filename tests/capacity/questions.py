"""Questions for tests."""

from __future__ import annotations

from typing import Any

from pdserve.capacity.devices import device
from pdserve.capacity.model_source import find_model
from pdserve.capacity.question import CapacityQuestion, CapacityShares
from pdserve.capacity.worker_speed import WorkerSpeed

FLOORS = CapacityShares(1.0, 1.0, 1.0)


def ask(model: str = "llama-3-8b", gpu: str = "h100-sxm", **rest: Any) -> CapacityQuestion:
    """Return a question about a named model on a named GPU."""
    return CapacityQuestion(find_model(model), device(gpu), **rest)


def worker_of(question: CapacityQuestion, tp: int = 1) -> WorkerSpeed:
    """Return one worker of the question."""
    return WorkerSpeed(question, question.degrees(tp))
