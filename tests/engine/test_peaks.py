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
from pdserve.engine.native import library
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
def test_the_peak_is_of_the_numbers_that_are_multiplied_and_not_below_what_a_step_has_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was twice the rate of bfloat16 for 8 bits, whatever the machine's instructions give."""
    monkeypatch.setattr(peaks, "_products", {torch.bfloat16: 10.0, torch.int8: 17.0}.__getitem__)
    assert peaks_of(pool(MIB), EngineConfig()).flops_per_s == 10.0
    assert peaks_of(pool(MIB), EngineConfig(), products=torch.int8).flops_per_s == 17.0
    assert peaks_of(pool(MIB), EngineConfig(), products=torch.int8, seen_flops_per_s=30.0).flops_per_s == 30.0


def test_the_peaks_of_a_gang_are_those_of_the_cores_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were those of rank 0, so two ranks used up to twice the peak."""
    before = torch.get_num_threads()
    monkeypatch.setattr(peaks, "_products", lambda _: float(torch.get_num_threads()))
    monkeypatch.setattr(peaks, "_reads", lambda _: float(torch.get_num_threads()))
    found = peaks_of(pool(MIB), EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
    assert found == Peaks(4.0 * before, 4.0 * before)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("instruction", "onednn"), [(5.0, 7.0), (7.0, 5.0)])
def test_the_peak_of_products_is_the_machines_whoever_reaches_it(
    instruction: float, onednn: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN may use an instruction that the set in use lacks, and may be slower than the set's own."""
    monkeypatch.setattr(peaks, "instruction_rate", lambda dtype, time_of: instruction)
    monkeypatch.setattr(peaks, "onednn_rate", lambda dtype, width, time_of: onednn)
    assert peaks._products(torch.bfloat16) == 7.0 * torch.get_num_threads()


def test_the_rate_of_an_instruction_is_its_operations_by_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    compiled = SimpleNamespace(pdserve_products=lambda bits, rounds: asked.append((bits, rounds)) or 600)
    monkeypatch.setattr(library, "load", lambda: compiled)
    assert peaks.instruction_rate(torch.int8, lambda call: 2.0) == 300.0
    assert peaks.instruction_rate(torch.bfloat16, lambda call: 3.0) == 200.0
    assert asked == [(8, peaks.ROUNDS), (16, peaks.ROUNDS)]
    assert peaks.instruction_rate(torch.float32, lambda call: 1.0) == 0.0
    monkeypatch.setattr(library, "load", lambda: None)
    assert peaks.instruction_rate(torch.int8, lambda call: 1.0) == 0.0


@pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")
def test_operations_of_an_instruction_are_counted() -> None:
    compiled = library.load()
    assert compiled is not None
    one = compiled.pdserve_products(16, 1)
    assert one > 0
    assert compiled.pdserve_products(16, 7) == 7 * one
    assert compiled.pdserve_products(8, 7) == 14 * one, "as many registers of numbers that are half as wide"


def test_a_torch_that_multiplies_no_such_numbers_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch, "_int_mm", refuses)
    assert peaks.onednn_rate(torch.int8, 64, lambda call: (call(), 1.0)[1]) == 0.0
    assert peaks.onednn_rate(torch.bfloat16, 64, lambda call: (call(), 1.0)[1]) == 2 * 64**3


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
