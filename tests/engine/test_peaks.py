"""The peaks of devices: settings win, GPUs are known by name, and a CPU is measured without leaving anything changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.engine import peaks
from pdserve.engine.peaks import Peaks, peaks_of


def pool(nbytes: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    blocks = torch.full((nbytes // 64, 64), 255, dtype=torch.uint8)
    return cast(Any, SimpleNamespace(caches=(SimpleNamespace(blocks=blocks),), device=torch.device(device), dtype=dtype))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "PRODUCTS_S", 0.0)
    monkeypatch.setattr(peaks, "READS_S", 0.0)
    monkeypatch.setattr(peaks, "last_level_bytes", lambda: 8 * MIB)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("nbytes", [1 * MIB, 32 * MIB])
def test_a_cpu_is_measured_and_torch_has_its_threads_back(nbytes: int) -> None:
    before = torch.get_num_threads()
    found = peaks_of(pool(nbytes), EngineConfig())
    assert 1e5 < found.flops_per_s < 1e15  # the machine may stand still in the one step that is measured
    assert 1e4 < found.bytes_per_s < 1e13
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("quick")
def test_the_peak_is_not_below_what_a_step_has_reached_and_grows_with_the_rate_of_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_products", lambda dtype: 10.0)
    assert peaks_of(pool(MIB), EngineConfig(), rate=2.0).flops_per_s == 20.0
    assert peaks_of(pool(MIB), EngineConfig(), rate=2.0, seen_flops_per_s=30.0).flops_per_s == 30.0


@pytest.mark.usefixtures("quick")
def test_without_room_for_a_buffer_the_bandwidth_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks.host, "available_bytes", lambda: 32 * MIB)
    assert peaks_of(pool(MIB), EngineConfig()).bytes_per_s == 0.0


def test_settings_win_and_then_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> float:
        raise AssertionError("measured")

    monkeypatch.setattr(peaks, "_products", measured)
    monkeypatch.setattr(peaks, "_reads", measured)
    config = EngineConfig(peak_flops_per_s=1e12, peak_bytes_per_s=2e10)
    assert peaks_of(pool(MIB), config, seen_flops_per_s=5e12) == Peaks(1e12, 2e10)


def test_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    on_gpu = pool(MIB)
    on_gpu.device = torch.device("cuda")
    assert peaks_of(on_gpu, EngineConfig()) == Peaks(989.4e12, 4.8e12)
    assert peaks_of(on_gpu, EngineConfig(peak_bytes_per_s=4e12)) == Peaks(989.4e12, 4e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Abacus 9000")
    assert peaks_of(on_gpu, EngineConfig()) == Peaks()


def test_the_largest_cache_is_the_last_one(tmp_path: Path) -> None:
    assert peaks.last_level_bytes(tmp_path) == peaks.LAST_LEVEL_BYTES
    for number, size in enumerate(("32K", "1024K", "48M", "junk")):
        index = tmp_path / "sys/devices/system/cpu/cpu0/cache" / f"index{number}"
        index.mkdir(parents=True)
        (index / "size").write_text(size + "\n")
    assert peaks.last_level_bytes(tmp_path) == 48 * MIB


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_peak_is_a_number_above_zero(value: float) -> None:
    with pytest.raises(ConfigError, match="peak_flops_per_s"):
        EngineConfig(peak_flops_per_s=value)
