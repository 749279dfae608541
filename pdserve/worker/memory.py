"""What a worker's memory goes to, as printed at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.config import MIB


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes. `rest_bytes`: resident beyond weights, mostly torch, NIXL and Python; KV is resident once written."""

    weights_bytes: int
    kv_bytes: int
    rest_bytes: int

    def __str__(self) -> str:
        parts = (("weights", self.weights_bytes), ("KV pool", self.kv_bytes), ("rest", self.rest_bytes))
        return ", ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in parts)


def measure(weights_bytes: int, kv_bytes: int) -> MemoryReport:
    """Of this process, now, before its first request: the KV pool is reserved but not yet resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    resident_bytes = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024
    return MemoryReport(weights_bytes, kv_bytes, max(0, resident_bytes - weights_bytes))
