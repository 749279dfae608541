"""Settings that a GPU cannot follow are refused before anything is loaded, by the GPU's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import KV_CACHE_DTYPES, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.memory.cuda_limits import Gpu, refuse_expandable_segments, refuse_fp8
from pdserve.engine.warm_up import check_before_loading

A100, A10, L4, H200 = Gpu("A100", (8, 0)), Gpu("A10", (8, 6)), Gpu("L4", (8, 9)), Gpu("H200", (9, 0))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("gpu", [A100, A10])
def test_fp8_kv_is_refused_by_the_name_of_a_gpu_without_it(gpu: Gpu, dtype: Any) -> None:
    sm = f"{gpu.name} is sm_{gpu.capability[0]}{gpu.capability[1]}"
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype {dtype} .*{sm}.*int8 or bf16"):
        refuse_fp8(EngineConfig(kv_cache_dtype=dtype), gpu)


def test_other_kv_and_newer_gpus_are_not_refused() -> None:
    for dtype in KV_CACHE_DTYPES:
        refuse_fp8(EngineConfig(kv_cache_dtype=dtype), H200)
        refuse_fp8(EngineConfig(kv_cache_dtype=dtype), L4)
        if dtype not in ("fp8", "fp8_e4m3"):
            refuse_fp8(EngineConfig(kv_cache_dtype=dtype), A100)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments : true"])
def test_expandable_segments_are_refused_by_the_name_of_their_variable(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} has expandable_segments:True"):
        refuse_expandable_segments({variable: value})


@pytest.mark.parametrize("value", ["", "expandable_segments:False", "max_split_size_mb:64"])
def test_other_settings_of_the_allocator_stay(value: str) -> None:
    refuse_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": value})


def test_a_worker_asks_the_gpu_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for torch's view of the GPU, through the check that a worker makes."""
    card = ModelCard.load(resolve("tiny"))
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    check_before_loading(card, EngineConfig(kv_cache_dtype="int8"))
    with pytest.raises(ConfigError, match="NVIDIA A100-SXM4-80GB is sm_80"):
        check_before_loading(card, EngineConfig(kv_cache_dtype="fp8_e4m3"))
    check_before_loading(card, EngineConfig(kv_cache_dtype="fp8_e4m3", device="cpu"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="expandable_segments"):
        check_before_loading(card, EngineConfig())
