"""The question of capacity planning: a model, GPUs, a load, and targets. Each wrong value is refused by its flag."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from pdserve.capacity.devices import GIGA, TERA, DeviceSpec, LinkSpec, link, node_link
from pdserve.capacity.published import PublishedModel
from pdserve.checkpoint.card import KV_ALIASES
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import DTYPE_BITS
from pdserve.core.shards import Degrees

MOST_GPUS: Final = 100_000
MOST_DEGREE: Final = 64
"""The most ranks of a stage, and the most stages."""
MOST_TOKENS: Final = 2**27
"""The longest prompt, output or context: a hundred times the longest context of a published model."""
MOST_USERS: Final = 10**9
MOST_SECONDS: Final = 86_400.0
MOST_PRICE: Final = 1e6
MOST_PEAK: Final = 1e6
"""The most TFLOPS, GB/s and GB of a GPU."""
MOST_ATTAINMENT: Final = 0.9999
"""A higher share depends on the tails of distributions, which the model does not know so far out."""
WEIGHT_BITS: Final = {"fp8": 8.0, "int8": 8.0, "int4": 4.0 + 20 / 128}
"""Bits of a quantised number. int4 has a scale of 16 bits and a zero of 4 for each 128 numbers, as GPTQ and AWQ store them."""
QUANTIZATIONS: Final = ("auto", "none", *WEIGHT_BITS)
KV_DTYPES: Final = (
    {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    | {name: name for name in DTYPE_BITS if name not in ("float32", "bfloat16", "float16")}
    | KV_ALIASES
)
DTYPES: Final = ("bfloat16", "float16", "float32")


def check_count(flag: str, value: int, most: int) -> None:
    """Raise `ConfigError` unless the value is an integer from 1 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{flag} must be an integer from 1 to {most}, got {value!r:.60}")


def check_real(flag: str, value: float, most: float) -> None:
    """Raise `ConfigError` unless the value is a number above 0 and at most `most`. NaN is none."""
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 < value <= most:
        raise ConfigError(f"{flag} must be a number above 0 and at most {most:g}, got {value!r:.60}")


def check_name(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless the value is one of `known`."""
    if value not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(known)}, got {value!r:.60}")


def changed(gpu: DeviceSpec, *, tflops: float | None, bandwidth_gb_s: float | None, memory_gb: float | None) -> DeviceSpec:
    """Return the GPU with the operator's peaks. None keeps the peak of the data. tflops: the peak of every dtype.

    Raises `ConfigError` that names the flag.
    """
    given = {"--gpu-tflops": tflops, "--gpu-bandwidth-gb-s": bandwidth_gb_s, "--gpu-memory-gb": memory_gb}
    for flag, value in given.items():
        if value is not None:
            check_real(flag, value, MOST_PEAK)
    return replace(
        gpu,
        flops_per_s=gpu.flops_per_s if tflops is None else dict.fromkeys(gpu.flops_per_s, tflops * TERA),
        bytes_per_s=gpu.bytes_per_s if bandwidth_gb_s is None else bandwidth_gb_s * GIGA,
        memory_bytes=gpu.memory_bytes if memory_gb is None else memory_gb * GIGA,
    )


@dataclass(frozen=True, slots=True)
class CapacityShares:
    """The shares of the peaks that an engine reaches. The defaults are what published measurements of Llama-2-70B on two A100
    or two H100 reach (docs/capacity.md); 1 gives floors, which no engine beats."""

    compute: float = 0.5
    bandwidth: float = 0.6
    link: float = 0.8

    def __post_init__(self) -> None:
        for name, value in (("compute", self.compute), ("bandwidth", self.bandwidth), ("link", self.link)):
            check_real(f"--{name}-share", value, 1.0)


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """All that an answer depends on. Fields are flags of `pdserve capacity`. Raises `ConfigError` that names the flag."""

    model: PublishedModel
    gpu: DeviceSpec
    gpus: int = 8
    isl: int = 2048
    """Tokens of a prompt."""
    osl: int = 256
    """Tokens of an output."""
    ttft_s: float = 1.0
    tpot_s: float = 0.05
    attainment: float = 0.9
    """The share of the requests that should be within each target."""
    tp: int | None = None
    """GPUs that share each layer of a worker. None: the power of two with the highest goodput."""
    pp: int = 1
    """Stages into which the layers of a worker are cut, each with `tp` GPUs."""
    experts: bool = False
    """Each GPU has whole experts of a mixture instead of a part of every expert."""
    prefill_tp: int | None = None
    """`tp` of the prefill workers. None: that of all workers."""
    prefill_pp: int | None = None
    gpus_per_node: int = 8
    node_link: str = "400gbe"
    """The link between two nodes, as a name or a rate: one direction, all network cards of a node together."""
    dtype: str = "bfloat16"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    users: int | None = None
    context: int | None = None
    """Tokens of each user's context. None: isl + osl."""
    link: str | None = None
    """A name or a rate (`devices.link`). None: NVLink or PCIe where one node has all GPUs, else `node_link`."""
    price_per_hour: float | None = None
    shares: CapacityShares = CapacityShares()
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        check_count("--gpus", self.gpus, MOST_GPUS)
        check_count("--isl", self.isl, MOST_TOKENS)
        check_count("--osl", self.osl, MOST_TOKENS)
        if self.osl < 2:
            raise ConfigError("--osl must be at least 2: a single token comes from the prompt, and needs no decode pool")
        check_real("--ttft", self.ttft_s, MOST_SECONDS)
        check_real("--tpot", self.tpot_s, MOST_SECONDS)
        check_real("--attainment", self.attainment, MOST_ATTAINMENT)
        if self.users is not None:
            check_count("--users", self.users, MOST_USERS)
        if self.context is not None:
            check_count("--context", self.context, MOST_TOKENS)
        if self.price_per_hour is not None:
            check_real("--price-per-hour", self.price_per_hour, MOST_PRICE)
        check_real("--gpu-memory-utilization", self.gpu_memory_utilization, 1.0)
        check_count("--max-num-batched-tokens", self.max_num_batched_tokens, MOST_TOKENS)
        check_name("--dtype", self.dtype, DTYPES)
        check_name("--quantization", self.quantization, QUANTIZATIONS)
        check_name("--kv-cache-dtype", self.kv_cache_dtype, ("auto", *KV_DTYPES))
        check_count("--gpus-per-node", self.gpus_per_node, MOST_GPUS)
        self._check_degrees("", self.tp, self.pp)
        self._check_degrees("prefill-", self.prefill_tp, self.prefill_pp)
        if self.experts and not self.model.experts:
            raise ConfigError(f"--enable-expert-parallel is for mixtures of experts, and {self.model.name} has none")
        if self.link is not None:
            link(self.link, self.gpu, 1)
        node_link(self.node_link)
        if self.isl + self.osl > self.model.max_position:
            raise ConfigError(
                f"--isl {self.isl} + --osl {self.osl} is more than the {self.model.max_position} positions of {self.model.name}"
            )

    def _check_degrees(self, pool: str, tensor: int | None, pipeline: int | None) -> None:
        """Raise `ConfigError` where the model or the nodes cannot be divided so. The error names the degrees that work.

        pool: the beginning of the flags' names, "" or "prefill-".
        """
        tp_flag, pp_flag = f"--{pool}tensor-parallel-size (--{pool}tp)", f"--{pool}pipeline-parallel-size (--{pool}pp)"
        if pipeline is not None:
            check_count(pp_flag, pipeline, min(self.gpus, self.model.shape.num_layers, MOST_DEGREE))
        if tensor is None:
            return
        check_count(tp_flag, tensor, min(self.gpus, MOST_DEGREE))
        degrees = Degrees(tensor, pipeline or self.pp, self.experts)
        tried = [replace(degrees, tensor=each) for each in range(1, MOST_DEGREE + 1)]
        works = [each.tensor for each in tried if self._obstacle(each) is None]
        if tensor not in works:
            use = f"use {' or '.join(map(str, works))}" if works else f"lower {pp_flag}"
            raise ConfigError(f"{tp_flag} {tensor} {self._obstacle(degrees)}: {use}")

    def _obstacle(self, degrees: Degrees) -> str | None:
        """Tell what does not divide. None: such workers are possible."""
        worker = f"with {degrees.pipeline} stages makes workers of {degrees.ranks} GPUs"
        if not self.model.shares_evenly(degrees):
            parts = [f"{self.model.heads} query heads", *([] if self.model.latent else [f"{self.model.kv_heads} KV heads"])]
            parts += [f"{count} experts" for count in self.model.experts if self.experts]
            return f"does not divide the {' and '.join(parts)} of {self.model.name} into equal ranks"
        if degrees.ranks > self.gpus:
            return f"{worker}, and there are {self.gpus} (--gpus)"
        if not self.fills_nodes(degrees):
            return f"{worker}, which do not fill nodes of {self.gpus_per_node} GPUs (--gpus-per-node) evenly"
        return None

    def fills_nodes(self, degrees: Degrees) -> bool:
        """Tell whether workers lie evenly on nodes: several on one node, or one on several whole nodes, and so do stages."""
        return all(
            self.gpus_per_node % count == 0 or count % self.gpus_per_node == 0 for count in (degrees.tensor, degrees.ranks)
        )

    def degrees(self, tp: int) -> Degrees:
        """Return the degrees of a worker with stages of `tp` GPUs."""
        return Degrees(tp, self.pp, self.experts)

    def prefill_degrees(self, tp: int) -> Degrees:
        """Return the degrees of a prefill worker beside workers with stages of `tp` GPUs."""
        return Degrees(self.prefill_tp or tp, self.prefill_pp or self.pp, self.experts)

    @property
    def node_bytes_per_s(self) -> float:
        """The bytes a second that one node sends to others."""
        return node_link(self.node_link)

    @property
    def weight_scheme(self) -> str:
        """The quantization of the weights: the flag's, or else the published quantization."""
        return self.model.quantization if self.quantization == "auto" else self.quantization

    @property
    def weight_bits(self) -> float:
        """Bits of a number of a layer's matrices."""
        return WEIGHT_BITS.get(self.weight_scheme, float(DTYPE_BITS[self.dtype]))

    @property
    def head_bits(self) -> float:
        """Bits of a number of embedding and head, which published checkpoints do not quantise."""
        return float(DTYPE_BITS[self.dtype])

    @property
    def kv_bits(self) -> float:
        """Bits of a stored number of KV."""
        name = self.dtype if self.kv_cache_dtype == "auto" else KV_DTYPES[self.kv_cache_dtype]
        return float(DTYPE_BITS[name])

    @property
    def compute_dtype(self) -> str:
        """The dtype of the products: 4-bit weights are expanded, and 8-bit weights are multiplied as they are."""
        return self.weight_scheme if self.weight_scheme in ("fp8", "int8") else self.dtype

    @property
    def price(self) -> float | None:
        """US dollars for one GPU and hour, or None if no price is given."""
        return self.gpu.price_per_hour if self.price_per_hour is None else self.price_per_hour

    def link_of(self, gpus: int) -> LinkSpec:
        """Return the link over which KV goes to or from a worker of so many GPUs."""
        if self.link is not None:
            return link(self.link, self.gpu, gpus)
        if self.gpus > self.gpus_per_node:
            return LinkSpec(self.node_link, self.node_bytes_per_s)
        return link("nvlink" if self.gpu.nvlink_bytes_per_s else "pcie", self.gpu, gpus)
