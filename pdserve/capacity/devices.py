"""GPUs and links as data: peaks, memory and prices, each with its source (`data/gpus.toml`, `data/links.toml`)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from pdserve.core.errors import ConfigError

GIGA: Final = 1e9
TERA: Final = 1e12
MOST_LINK_BYTES: Final = 1e15
"""The fastest link that is believed, bytes a second: a thousand times NVLink."""
_RATES: Final = {"B/s": 1.0, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator. Peaks are of dense products, never of the data sheet's rates with sparsity."""

    name: str
    title: str
    memory_bytes: float
    bytes_per_s: float
    """The bandwidth of its memory."""
    flops_per_s: Mapping[str, float]
    """The peak of products by dtype: bfloat16 (float16 is equal), float32, and fp8 and int8 where the device has them."""
    source: str
    nvlink_bytes_per_s: float | None = None
    """One direction, all links together. None: the device has no such link."""
    pcie_bytes_per_s: float | None = None
    price_per_hour: float | None = None
    """US dollars: an example. None: no source was at hand."""
    price_source: str | None = None
    name_parts: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Return the peak of products of `dtype`, operations a second. Without such products it computes in bfloat16."""
        return self.flops_per_s.get("bfloat16" if dtype == "float16" else dtype, self.flops_per_s["bfloat16"])

    @property
    def scale_up_bytes_per_s(self) -> float | None:
        """The fastest link between two such devices of one machine: NVLink, or PCIe."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The link over which KV goes from a prefill worker to a decode worker."""

    name: str
    bytes_per_s: float
    """One direction, all GPUs of a worker together."""


@functools.cache
def devices() -> Mapping[str, DeviceSpec]:
    """Return all known devices by name, in the order of the data."""
    return {name: _device(name, entry) for name, entry in _data("gpus.toml").items()}


def device(name: str) -> DeviceSpec:
    """Return the device of this name. Raises `ConfigError` that lists the known devices."""
    found = devices().get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu {name!r:.60} is not known; known: {', '.join(devices())}")
    return found


def device_by_driver_name(driver_name: str) -> DeviceSpec | None:
    """Return the device that a driver calls so, for example "NVIDIA H100 80GB HBM3". None: no device or several fit."""
    words = driver_name.lower().replace("-", " ").split()
    found = [one for one in devices().values() if one.name_parts and all(part in words for part in one.name_parts)]
    return found[0] if len(found) == 1 else None


def link_names() -> tuple[str, ...]:
    """Return the names of all known links."""
    return tuple(_data("links.toml"))


def link(text: str, gpu: DeviceSpec, tp: int) -> LinkSpec:
    """Return the link of a name, or of a rate such as "12.5GB/s", "400Gbit/s" or plain bytes a second.

    A rate counts for a whole worker. Raises `ConfigError` for an unknown name, a link that the GPU lacks, and a bad rate.
    """
    entry = _data("links.toml").get(text.lower())
    if entry is None:
        return LinkSpec(text, _rate(text))
    if "gpu_field" not in entry:
        return LinkSpec(text.lower(), entry["gb_s"] * GIGA)
    own = gpu.nvlink_bytes_per_s if entry["gpu_field"] == "nvlink_gb_s" else gpu.pcie_bytes_per_s
    if own is None:
        raise ConfigError(f"--link {text} needs a GPU that has it, and {gpu.name} has none; see --link pcie or 400gbe")
    return LinkSpec(text.lower(), own * tp)


def node_link(text: str) -> float:
    """Return the bytes a second of a link between nodes, of a name or a rate. Raises `ConfigError` also for a link that lies
    within one node.
    """
    entry = _data("links.toml").get(text.lower())
    if entry is None:
        return _rate(text, "--node-link")
    if "gpu_field" in entry:
        names = [name for name, one in _data("links.toml").items() if "gpu_field" not in one]
        raise ConfigError(f"--node-link {text} lies within one node; take {', '.join(names)}, or a rate such as 400GB/s")
    return float(entry["gb_s"]) * GIGA


def links_of(gpu: DeviceSpec, tp: int) -> tuple[LinkSpec, ...]:
    """Return the known links that workers of this GPU may have."""
    lacks = {"nvlink"} if gpu.nvlink_bytes_per_s is None else set()
    return tuple(link(name, gpu, tp) for name in link_names() if name not in lacks)


def _rate(text: str, flag: str = "--link") -> float:
    number, unit = text, "B/s"
    for name in sorted(_RATES, key=len, reverse=True):
        if text.lower().endswith(name.lower()):
            number, unit = text[: -len(name)], name
            break
    try:
        rate = float(number) * _RATES[unit]
    except (ValueError, OverflowError):
        known = f"{', '.join(link_names())}, or a rate such as 12.5GB/s"
        raise ConfigError(f"{flag} {text!r:.60} is not known; known: {known}") from None
    if not 1 <= rate <= MOST_LINK_BYTES:  # NaN fails too
        raise ConfigError(f"{flag} must be from 1 to {MOST_LINK_BYTES:.0e} bytes a second, got {text!r:.60}")
    return rate


def _device(name: str, entry: Mapping[str, Any]) -> DeviceSpec:
    def scaled(field: str, unit: float) -> float | None:
        value = entry.get(field)
        return None if value is None else float(value) * unit

    return DeviceSpec(
        name,
        entry["title"],
        float(entry["memory_gb"]) * GIGA,
        float(entry["bandwidth_gb_s"]) * GIGA,
        {dtype: rate * TERA for dtype, rate in entry["tflops"].items()},
        entry["source"],
        scaled("nvlink_gb_s", GIGA),
        scaled("pcie_gb_s", GIGA),
        scaled("price_per_hour", 1.0),
        entry.get("price_source"),
        tuple(entry["name_parts"]),
    )


@functools.cache
def _data(name: str) -> Mapping[str, Any]:
    return tomllib.loads((resources.files("pdserve.capacity") / "data" / name).read_text(encoding="utf-8"))
