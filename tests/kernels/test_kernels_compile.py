"""What the interpreter runs, the compiler must take as well: every kernel for an H200, in a process that is not interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # ptxas takes as long as a hundred other tests

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["rows", "sums", "decode", "prefill", "head_64", "write_int4", "attend_fp8_e4m3", "latent_16", "experts_8"]
ATTENTION = ("decode_kernel", "prefill_kernel")
SHARED_BYTES = 227 << 10  # of a multiprocessor on Hopper, and of a program
RESERVED_BYTES = 1 << 10  # of shared memory, for the system, with each program
REGISTERS = 1 << 16  # of a multiprocessor; a warp gets its registers in units of 256
# At a time on a multiprocessor, as the docstrings of tiling.py say.
PROGRAMS = {
    ("prefill_kernel", "prefill"): 1, ("prefill_kernel", "head_64"): 2, ("decode_kernel", "decode"): 3,
    ("decode_kernel", "latent_16"): 2,
}  # fmt: skip
# In a loop, where numbers are quantised: K, V and their scales. Latent keys have two parts and one scale.
BUFFERS = {"attend_int8": 4, "attend_fp8_e4m3": 4, "attend_int4": 4, "latent_fp8_e4m3": 3}
# A tile of 64 latent keys is measured to be the fastest, though its addresses do not fit into registers and no stage is left
# to load a tile ahead.
LARGE = {("prefill_kernel", "latent_32"), ("prefill_kernel", "latent_128")}
ON_THE_STACK = {("decode_kernel", "latent_128"): 192, **dict.fromkeys(LARGE, 640)}  # bytes of addresses, as tiling.py says


def compiled(*cases: str, cache: Path, **environment: str) -> list[dict]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py")), *cases],
        env={**inherited, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache), **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def programs(kernel: dict) -> int:
    """How many of a kernel run on a multiprocessor at a time."""
    of_warp = -(-kernel["registers"] * 32 // 256) * 256
    by_registers = REGISTERS // (of_warp * kernel["threads"] // 32)
    return min(by_registers, SHARED_BYTES // (kernel["shared_bytes"] + RESERVED_BYTES))


def assert_pipelined(kernel: dict) -> None:
    """In every loop K and V of a later tile are on their way while a tile is computed."""
    loops, names = len(kernel["waits"]), "K and V, and of quantised numbers their scales"
    assert loops > 0
    assert len(kernel["buffers"]) == loops * BUFFERS.get(kernel["case"], 2), names
    assert min(kernel["buffers"]) >= 2, kernel
    assert all(min(in_loop, default=0) > 0 for in_loop in kernel["waits"]), kernel


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> list[dict]:
    return compiled(*QUICK, cache=tmp_path_factory.mktemp("triton"))


def test_kernels_compile_for_the_gpu(quick):
    assert {kernel["kernel"] for kernel in quick} == {
        "norm_kernel", "gate_kernel", "rope_kernel", "quantise_kernel", "stripe_sums_kernel", "product_kernel", "sum_kernel",
        "route_kernel", "sort_kernel", "decode_kernel", "merge_kernel", "prefill_kernel",
    }  # fmt: skip
    for kernel in quick:
        if kernel["kernel"] == "prefill_kernel":
            assert kernel["wgmma"] > 0, "prefill does not use Hopper's matrix products"
        if kernel["kernel"] == "decode_kernel":
            assert kernel["mma"] > 0, "decode does not use tensor cores"


def test_attention_does_not_wait_for_kv_that_it_has_just_asked_for(quick):
    """It did: the load of the block table within the loop took the pipeline's stages, and one tile was on its way at most."""
    found = [kernel for kernel in quick if kernel["kernel"] in ATTENTION]
    assert {kernel["case"] for kernel in found} == {"decode", "prefill", "head_64", "attend_fp8_e4m3", "latent_16"}
    for kernel in found:
        assert_pipelined(kernel)


def test_experts_do_not_wait_for_matrices_that_they_have_just_asked_for(quick):
    found = [kernel for kernel in quick if kernel["kernel"] == "product_kernel"]
    assert len(found) == 2
    for kernel in found:
        assert min(kernel["buffers"]) >= 2, kernel
        assert all(min(in_loop, default=0) > 0 for in_loop in kernel["waits"]), kernel
        assert not kernel["stack_bytes"], kernel


def test_as_many_programs_fit_on_a_multiprocessor_as_is_said(quick):
    """Prefill was said to fit twice at 128 dimensions; its registers allowed one."""
    found = {(kernel["kernel"], kernel["case"]): kernel for kernel in quick}
    assert {name: programs(found[name]) for name in PROGRAMS} == PROGRAMS


@pytest.mark.timeout(1500)
def test_every_shape_compiles_fits_and_spills_nothing(tmp_path):
    for kernel in compiled(cache=tmp_path):
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        if kernel["case"] == "float32":
            continue
        name = (kernel["kernel"], kernel["case"])
        assert kernel["stack_bytes"] <= ON_THE_STACK.get(name, 0), kernel
        if kernel["kernel"] in ATTENTION and name not in LARGE:
            assert_pipelined(kernel)
