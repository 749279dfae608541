"""The speed of the device, measured and by the data sheet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tools.gpu.row import Row, Setup, replayed_s

# Bytes of memory and bfloat16 operations a second, from NVIDIA's data sheets (SXM, without sparsity).
NOMINAL = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.04e12, 312e12)}


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, with its bytes and bfloat16 operations a second."""

    name: str
    bytes_s: float
    flops_s: float


def machine(setup: Setup) -> Machine:
    """Return the figures of the data sheet when they are known, else those measured here."""
    name = "CPU" if setup.rehearsed else torch.cuda.get_device_name()
    for known, (bytes_s, flops_s) in NOMINAL.items():
        if known in name:
            return Machine(name, bytes_s, flops_s)
    return Machine(name, copy_bytes_s(setup), product_flops_s(setup))


def copy_bytes_s(setup: Setup) -> float:
    """Return the bytes a second that a copy reads and writes together. No cache holds its data."""
    source = torch.ones((1 << 20) if setup.rehearsed else (4 << 30), dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / replayed_s([lambda: target.copy_(source)], setup.device)


def product_flops_s(setup: Setup) -> float:
    """Return the operations a second of a bfloat16 matrix product."""
    size = 64 if setup.rehearsed else 8192
    a, b = (torch.randn((size, size), device=setup.device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / replayed_s([lambda: a @ b], setup.device)


def run(setup: Setup) -> None:
    """Show the measured figures beside those of the data sheet."""
    found = machine(setup)
    bytes_s, flops_s = copy_bytes_s(setup), product_flops_s(setup)
    Row("machine", f"{found.name}: copy", f"{bytes_s / 1e12:.2f} TB/s", f"{found.bytes_s / 1e12:.2f}",
        f"{bytes_s / found.bytes_s:.0%}").emit()  # fmt: skip
    Row("machine", "bfloat16 product of 8192^3", f"{flops_s / 1e12:.0f} TFLOP/s", f"{found.flops_s / 1e12:.0f}",
        f"{flops_s / found.flops_s:.0%}").emit()  # fmt: skip
