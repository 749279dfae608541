"""What the interpreter runs, the compiler must take as well: every kernel for an H200, in a process that is not interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["rows", "blocks", "sums", "decode", "prefill", "write_int4", "attend_fp8_e4m3"]
SHARED_BYTES = 227 << 10  # of a program on Hopper


def compiled(*cases: str, cache: Path, **environment: str) -> list[dict]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py")), *cases],
        env={**inherited, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache), **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_kernels_compile_for_the_gpu(tmp_path):
    found = compiled(*QUICK, cache=tmp_path)
    assert {kernel["kernel"] for kernel in found} == {
        "norm_kernel", "silu_mul_kernel", "rope_kernel", "gather_kernel", "scatter_kernel", "quantise_kernel",
        "stripe_sums_kernel",
        "decode_kernel", "merge_kernel", "prefill_kernel",
    }  # fmt: skip
    for kernel in found:
        if kernel["kernel"] == "prefill_kernel":
            assert kernel["wgmma"] > 0, "prefill does not use Hopper's matrix products"
        if kernel["kernel"] == "decode_kernel":
            assert kernel["mma"] > 0, "decode does not use tensor cores"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_shape_compiles_fits_and_spills_nothing(tmp_path):
    for kernel in compiled(cache=tmp_path, SPILLS="1"):
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        if kernel["case"] != "float32":
            assert not kernel["spilled_bytes"], kernel
