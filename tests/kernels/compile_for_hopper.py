"""Compiles every kernel for an H200 as its callers launch it, on any machine: `python compile_for_hopper.py [CASE...]`.

The interpreter forgives what the compiler does not (types that change in a loop, returns within branches). A driver
that only names the target stands in for CUDA, and launches end once the kernel is compiled. Prints a line of JSON for
each: kernel, registers and bytes of stack of a thread (it is 0 where nothing is spilled), bytes of shared memory, how its
matrix products were made, and how its loops were pipelined.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import pdserve.engine.kernels.decode as decode_module
import pdserve.engine.kernels.experts as experts_module
import pdserve.engine.kernels.prefill as prefill_module
from pdserve.core.kv_layout import gqa_group
from pdserve.core.model_spec import MlaSpec, MoeSpec, NormSpec, RopeSpec
from pdserve.engine.kernels import tiling
from pdserve.engine.kernels.activation import gelu_and_mul, silu_and_mul
from pdserve.engine.kernels.block_sums import KernelSums
from pdserve.engine.kernels.experts import GroupedExperts
from pdserve.engine.kernels.norm import add_rms_norm, rms_norm
from pdserve.engine.kernels.quantise import quantise_write
from pdserve.engine.kernels.rope import rotate_and_write
from pdserve.engine.kernels.routing import route, sort_few
from pdserve.engine.kernels.shape import KernelShape, grouped, shape_of
from pdserve.engine.kernels.tiling import decode_tiling, prefill_tiling
from pdserve.engine.kv.checksum import Stripes, stripes_of
from pdserve.engine.kv.paged import KvFormat, LayerKv, PagedKv, plain_kv, quantised_block_bytes, quantised_kv
from pdserve.engine.norms import HeadNorms, Norm

BF16 = torch.bfloat16


def deepseek(heads: int) -> MlaSpec:
    return MlaSpec(heads, 512, 128, 64, 128, RopeSpec(1e4), NormSpec(1e-6))


class Hopper:
    """What Triton asks of a driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(function: JITFunction, grid: Any) -> Any:
    def launch(*args: Any, **settings: Any) -> None:
        kernel = function.run(*args, grid=grid, warmup=True, **settings)
        print(json.dumps({"kernel": function.__name__, "case": CASE, **facts(kernel)}), flush=True)

    return launch


def facts(kernel: Any) -> dict[str, Any]:
    ptx, loops = kernel.asm["ptx"], kernel.asm["ttgir"]
    registers, stack_bytes = resources(kernel.asm["cubin"])
    return {
        "registers": registers,
        "stack_bytes": stack_bytes,
        "threads": 32 * kernel.metadata.num_warps,
        "shared_bytes": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "buffers": buffers(loops),
        "waits": [waits(body) for body in re.findall(r"scf\.for .*?scf\.yield", loops, re.DOTALL)],
    }


def buffers(ttgir: str) -> list[int]:
    """How many tiles each buffer in shared memory holds that a loop reads K, V or their scales ahead into."""
    return [int(count) for count in re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", ttgir)]


def waits(loop: str) -> list[int]:
    """How many loads may still be on their way after each wait of a loop."""
    return [int(count) for count in re.findall(r"async_wait .*?num = (\d+)", loop)]


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def pool(kind: KvFormat, dim: int, dtype: torch.dtype) -> PagedKv:
    if kind is KvFormat.PLAIN:
        return plain_kv(torch.zeros((2, 1, 2, 2, 16, dim), dtype=dtype))
    memory = torch.zeros(2 * quantised_block_bytes(1, 2, 16, dim, kind), dtype=torch.uint8)
    return quantised_kv(memory, num_layers=1, num_kv_heads=2, block_size=16, head_dim=dim, kind=kind)


def attention(kind: KvFormat, dim: int, dtype: torch.dtype, *, window: int = 0, parts: str = "pd", group: int = 4) -> None:
    kv = pool(kind, dim, dtype)
    query = torch.zeros((16, 2 * group, dim), dtype=dtype)
    attend(grouped(kv, 2 * group, window), query, kv.layer(0), parts)


def attend(shape: KernelShape, query: torch.Tensor, layer: LayerKv, parts: str = "pd") -> None:
    ints = torch.zeros((16, 4), dtype=torch.int32)
    out = torch.zeros((*query.shape[:2], shape.v_dim), dtype=query.dtype)
    if "p" in parts:
        prefill_module.prefill(query, out, shape, layer, ints, ints, prefill_tiling(shape, query.dtype))
    if "d" in parts:
        rows = ints[:, 0].contiguous()
        decode_module.decode(query, out, shape, layer, ints, rows, rows, 4, decode_tiling(shape, query.dtype))


def capped(shape: KernelShape) -> None:
    kv = pool(shape.format, shape.qk_dim, BF16)
    attend(shape, torch.zeros((16, shape.heads, shape.qk_dim), dtype=BF16), kv.layer(0))


def latent(kind: KvFormat, heads: int, *, parts: str = "pd") -> None:
    kv = pool(kind, 576, BF16)
    layer = kv.layer(0)
    layer = replace(layer, value=layer.key, value_scales=layer.key_scales)
    attend(shape_of(deepseek(heads), 16, kind), torch.zeros((16, heads, 576), dtype=BF16), layer, parts)


def rows() -> None:
    x = torch.zeros((16, 4096), dtype=BF16)
    rms_norm(x, x[0], 1e-5)
    add_rms_norm(x, x, x[0], 1e-5)
    add_rms_norm(x, x, x[0], 1e-5, 1.0, Norm(x[0], 1e-5, 1.0))
    silu_and_mul(x)
    gelu_and_mul(x)
    slots = torch.zeros((16, 2), dtype=torch.int64)[:, 0]
    norms = HeadNorms(Norm(x[0], 1e-6, 0.0), Norm(x[0], 1e-6, 0.0))
    for kind in (KvFormat.PLAIN, KvFormat.INT8):
        kv = pool(kind, 128, BF16)
        for turned, of_heads in ((128, None), (128, norms), (64, norms)):
            projected = torch.zeros((16, 12 * 128), dtype=BF16)
            rotate_and_write(projected, torch.zeros((16, 2, turned)), kv, kv.layer(0), slots, of_heads)
    latent_kv = plain_kv(torch.zeros((2, 1, 1, 1, 16, 576), dtype=BF16))
    layer = LayerKv(*[latent_kv.data] * 4, latent_kv.data.stride(0), 16 * 576, 0)
    rotate_and_write(torch.zeros((16, 129 * 576), dtype=BF16), torch.zeros((16, 2, 64)), latent_kv, layer, slots)


def experts(rows: int) -> None:
    layer = GroupedExperts(
        MoeSpec(8, 2, 768), torch.zeros((8, 1536, 2048), dtype=BF16), torch.zeros((8, 2048, 768), dtype=BF16)
    )
    x, chosen = torch.zeros((rows, 2048), dtype=BF16), torch.zeros((rows, 2), dtype=torch.int64)
    layer.route(torch.zeros(rows, 8), None)
    layer(x, chosen, torch.zeros(rows, 2), torch.zeros(rows, 2048), torch.tensor(rows))


def routing() -> None:
    spec = MoeSpec(256, 8, 2048, "sigmoid", True, 2.5, True, groups=8, top_groups=4, group_score="best_two")
    chosen, _ = route(spec, torch.zeros(4, 256), torch.zeros(256))
    sort_few(chosen, 256, 16, 40, torch.tensor(3))


def quantised(kind: KvFormat) -> None:
    kv = pool(kind, 128, BF16)
    new = torch.zeros((4, 2, 128), dtype=BF16)
    quantise_write(kv, kv.layer(0), new, new, torch.zeros((1, 4), dtype=torch.int32))


def sums() -> None:
    group = gqa_group(2, 3, 64, 16, "int8")  # stripes of heads, and of scales
    KernelSums(torch.zeros(4, group.block_bytes, dtype=torch.uint8), stripes_of(group))(torch.tensor([0, 2]))
    KernelSums(torch.zeros(4, 8200, dtype=torch.uint8), Stripes.plain(8200))(torch.tensor([0, 2]))


CASES = {
    "sums": sums,
    "rows": rows,
    "routing": routing,
    **{f"experts_{rows}": lambda rows=rows: experts(rows) for rows in (8, 128, 256, 4096)},
    "decode": lambda: attention(KvFormat.PLAIN, 128, BF16, parts="d"),
    "prefill": lambda: attention(KvFormat.PLAIN, 128, BF16, parts="p"),
    "float32": lambda: attention(KvFormat.PLAIN, 128, torch.float32),
    "window": lambda: attention(KvFormat.PLAIN, 128, BF16, window=512),
    **{f"head_{dim}": lambda dim=dim: attention(KvFormat.PLAIN, dim, BF16) for dim in (64, 80, 96, 256)},
    **{f"group_{group}": lambda group=group: attention(KvFormat.PLAIN, 128, BF16, group=group) for group in (1, 7, 16)},
    "softcap": lambda: capped(KernelShape(16, 2, 256, 256, 16, window=4096, softcap=50.0)),
    "latent_16": lambda: latent(KvFormat.PLAIN, 16, parts="d"),
    **{f"latent_{heads}": lambda heads=heads: latent(KvFormat.PLAIN, heads) for heads in (32, 128)},
    "latent_fp8_e4m3": lambda: latent(KvFormat.FP8_E4M3, 128),
    **{f"write_{kind.name.lower()}": lambda kind=kind: quantised(kind) for kind in KvFormat if kind},
    **{f"attend_{kind.name.lower()}": lambda kind=kind: attention(kind, 128, BF16) for kind in KvFormat if kind},
}

if __name__ == "__main__":
    triton.runtime.driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_only
    for module in (prefill_module, decode_module, experts_module):
        module.dot_dtype = lambda query: tiling._COMPUTE[query.dtype]  # as on CUDA
    for CASE in sys.argv[1:] or CASES:
        CASES[CASE]()
