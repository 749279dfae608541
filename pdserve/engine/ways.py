"""The ways to compute a model: compiled code on a CPU, Triton on a GPU, torch anywhere, each with what prevents it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import ModelSpec
from pdserve.engine.kernels.support import triton_usable
from pdserve.engine.kv.paged import TORCH_DTYPES
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.models import decoder
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.choice import TRITON_FEATURES

COMPILED: Final = "compiled CPU"
TRITON: Final = "Triton"
TORCH: Final = "torch"
NO_GPU: Final = "Triton kernels need a CUDA GPU and the package triton"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a model. obstacle: the reason, in words, why it does not compute it; None when it does."""

    name: str
    obstacle: str | None


def ways_of(spec: ModelSpec, *, device: torch.device | None = None, dtype: str = "bfloat16", kv_dtype: str = "") -> list[Way]:
    """Return all ways, the preferred way of an engine first.

    device: the device of the engine; None: return every way that exists, each on its own device. dtype, kv_dtype: names of a
    `KvGroup`; empty: the same as `dtype`.
    """
    compiled = _compiled_obstacle(spec, device or torch.device("cpu"), dtype, kv_dtype or dtype)
    lacking = decoder.obstacle(spec)
    beyond = lacking or spec.beyond(TRITON_FEATURES)
    triton = NO_GPU if device is not None and not triton_usable(device) else beyond
    return [Way(COMPILED, compiled), Way(TRITON, triton), Way(TORCH, lacking)]


def _compiled_obstacle(spec: ModelSpec, device: torch.device, dtype: str, kv_dtype: str) -> str | None:
    try:
        kv = spec.kv_spec(16, kv_dtype)
        pool = KvPool(kv, kv.block_bytes, device, TORCH_DTYPES[dtype])  # one block, since only the layout is needed
    except ConfigError as exc:
        return exc.message
    return native.obstacle(spec, pool)
