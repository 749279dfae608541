"""Limits of a GPU and of torch's allocator on it. They are checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError

FP8_CAPABILITY: Final = (8, 9)
"""The oldest compute capability for fp8: Ada (Hopper is newer). The Triton kernels convert E4M3 by an instruction that
Triton offers only from this capability on."""
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name and the old


@dataclass(frozen=True, slots=True)
class Gpu:
    """Name and compute capability of a GPU. (8, 0) is sm_80."""

    name: str
    capability: tuple[int, int]


def check_cuda(config: EngineConfig, device: torch.device) -> None:
    """Check the configuration against a GPU and its allocator. Raises `ConfigError` naming what to change."""
    properties = torch.cuda.get_device_properties(device)
    refuse_expandable_segments(os.environ)
    refuse_fp8(config, Gpu(properties.name, (properties.major, properties.minor)))


def refuse_fp8(config: EngineConfig, gpu: Gpu) -> None:
    """Raise `ConfigError` for fp8 KV on a GPU without it. Otherwise the first step would fail with a compiler message."""
    if config.kv_cache_dtype in ("fp8", "fp8_e4m3") and gpu.capability < FP8_CAPABILITY:
        major, minor = gpu.capability
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs a GPU of compute capability 8.9 or newer, and {gpu.name} "
            f"is sm_{major}{minor}: set kv_cache_dtype to int8 or bf16"
        )


def refuse_expandable_segments(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` when torch's allocator is set to use expandable segments.

    Such memory has no handle that UCX could pass to another process. NIXL registers it without an error, and then KV goes
    over TCP, at a hundredth of the speed.
    """
    for variable in _ALLOCATOR_VARIABLES:
        for setting in environ.get(variable, "").split(","):
            name, _, value = setting.partition(":")
            if name.strip() == "expandable_segments" and value.strip().lower() == "true":
                raise ConfigError(
                    f"{variable} has expandable_segments:True: CUDA IPC cannot hand over KV in such memory; take it out"
                )
