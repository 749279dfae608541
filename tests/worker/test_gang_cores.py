"""The threads of a gang whose worker is started without Ray."""

from __future__ import annotations

import pytest

from pdserve.config import EngineConfig, WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.worker.process import _with_cores


@pytest.mark.parametrize(
    ("engine", "threads"),
    [
        ({}, 0),  # torch takes all cores
        ({"threads": 9}, 9),
        ({"tensor_parallel_size": 2}, 3),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 2, "threads": 2}, 2),
        ({"tensor_parallel_size": 8, "oversubscribe": True}, 1),
    ],
)
def test_the_ranks_of_a_worker_divide_the_cores_of_its_machine(
    engine: dict[str, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(7))
    config = WorkerConfig("w", "127.0.0.1:1", EngineConfig(**engine))
    assert _with_cores(config).engine.threads == threads


def test_a_machine_with_too_few_cores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    config = WorkerConfig("w", "127.0.0.1:1", EngineConfig(pipeline_parallel_size=4))
    with pytest.raises(
        ConfigError, match=r"^tensor_parallel_size 1 x pipeline_parallel_size 4 are 4 ranks, and this machine has 2"
    ):
        _with_cores(config)
