"""The choice of the model that computes a worker's steps, or a rank's share of them: compiled code, Triton or torch."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Final

import torch
from torch.distributed import is_nccl_available

from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import Attention, AttentionSpec, MlaSpec, ModelSpec
from pdserve.core.shards import RankShare
from pdserve.engine.attention.api import Scores
from pdserve.engine.attention.bounded import BoundedAttention
from pdserve.engine.attention.fast import FastAttention
from pdserve.engine.attention.invariant import InvariantAttention
from pdserve.engine.kernels.support import triton_usable
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.paged import TORCH_DTYPES
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.layers.elementwise import softcap, softcap_fixed
from pdserve.engine.layers.linear import COMPILED_SCHEMES
from pdserve.engine.layers.ranks import Alone, Ranks
from pdserve.engine.layers.rows import TiledRows, WholeRows
from pdserve.engine.layers.torch_ops import TorchOps
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.api import Model
from pdserve.engine.models.batched import BatchedDecoder, Hidden
from pdserve.engine.models.decoder import Backend, Decoder, obstacle
from pdserve.engine.models.weights import WeightSource

TRITON_FEATURES: Final = frozenset({
    "window", "bias", "out_bias", "qk_norm", "softcap", "scale", "rope of a part of a head", "latent attention", "gelu_tanh",
    "a mixture of experts", "post_norms", "an offset of norms", "embedding_scale", "a softcap of logits",
})  # fmt: skip
"""The names of `ModelSpec.features` that the Triton kernels compute, or leave to torch where they are functions of rows. A
model with other features is computed by torch alone."""


def make_model(spec: ModelSpec, weights: WeightSource, kv: KvPool, config: EngineConfig, max_positions: int) -> Model:
    """Return the compiled model, which is batch-invariant by itself, or a torch model where the compiled model does not run.

    Raises `ConfigError` when weights are to be quantised and the compiled model does not run here.
    """
    share = RankShare(spec)
    if native.supports(spec, kv):
        return native.NativeDecoder(share, weights, kv, max_positions, COMPILED_SCHEMES[config.quantization])
    return torch_model(weights, kv, config, max_positions, Alone(share))


def torch_model(weights: WeightSource, kv: KvPool, config: EngineConfig, max_positions: int, ranks: Ranks) -> BatchedDecoder:
    """Return a model by torch or Triton, or the share of one rank of it, which asked `check_ranks`.

    Raises `ConfigError` for what neither computes.
    """
    spec = ranks.share.spec
    if config.quantization is not None:
        raise ConfigError(f"quantization {config.quantization} needs {native.NEEDS}; {native.obstacle(spec, kv)}")
    lacking = obstacle(spec)
    if lacking is not None:
        raise ConfigError(f"the model has {lacking}, which no engine here computes")
    heads = [ranks.share.whole_heads(spec.layers[layers[0]].attention) for layers in spec.kv_groups]
    caches = kv.caches
    if kv.whole:
        # A rank without a head of a group reads and writes nothing there.
        caches = tuple(cache.of_heads(own) if own else cache for cache, own in zip(caches, heads, strict=True))
    backend = _backend(ranks, caches, invariant=bool(config.batch_invariant))
    backend = replace(backend, skipped=tuple(share.layers.start if share else 0 for share in kv.shares))
    model = Decoder(ranks, weights, backend, max_positions)
    hidden = _recorded(model, backend, caches, max_positions, config.largest_limits("cuda").max_num_seqs) or model.hidden
    return BatchedDecoder(model, hidden, caches, backend)


def check_ranks(spec: ModelSpec, kv: KvPool, config: EngineConfig) -> None:
    """Raise `ConfigError` for what the ranks of a gang do not compute by torch or Triton with the bits of one rank."""
    degrees, name = config.degrees, str(kv.dtype).removeprefix("torch.")
    if platform.machine() != "x86_64":
        raise ConfigError(f"{degrees}: ranks meet by the rules of x86-64 processors, and this is {platform.machine()}")
    degrees.check(spec, equal=False)
    device, collective = kv.device.type, config.collective(kv.device.type)
    if collective == "nccl" and (device != "cuda" or not is_nccl_available()):
        raise ConfigError(f"rank_collective nccl: NCCL and CUDA are needed, and the device is {device}: leave it out")
    if collective == "shared_memory" and device == "cuda":
        raise ConfigError(
            "rank_collective shared_memory: rows in the memory of GPUs are gathered by nccl or gloo: leave it out"
        )
    if config.batch_invariant or degrees.tensor == 1:
        return
    if _by_triton(spec, kv.caches):
        if degrees.experts:
            raise ConfigError("enable_expert_parallel: Triton kernels share each expert among all ranks: turn it off")
        return
    # torch chooses the products of attention by their number where they have fewer than 32 bits, and cuts a single one among
    # threads. It computes the last of all scores by another form of the tangent hyperbolic.
    advice = "the bits of attention depend on the ranks, set batch_invariant"
    if kv.dtype is not torch.float32:
        raise ConfigError(f"{degrees} by torch in {name}: {advice}, or dtype float32")
    if (threads := torch.get_num_threads()) > 1:
        raise ConfigError(f"{degrees} by torch with threads {threads}: {advice}, or threads 1")
    if any(one.softcap is not None for layer in spec.layers if isinstance(one := layer.attention, AttentionSpec)):
        raise ConfigError(f"{degrees} by torch with a softcap of scores: {advice}")


def check_gpus(config: EngineConfig, count: int) -> None:
    """Raise `ConfigError` when there are fewer GPUs than ranks. Ranks that gather by gloo may share GPUs."""
    if config.ranks > count and config.collective("cuda") == "nccl":
        raise ConfigError(
            f"{config.gang}, and this process sees {count} GPU{'s' if count != 1 else ''}: NCCL needs one for each rank"
        )


def check_compiled_ranks(spec: ModelSpec, config: EngineConfig) -> None:
    """Raise `ConfigError` for what the ranks of a gang do not compute by compiled code."""
    config.degrees.check(spec)
    if (collective := config.collective("cpu")) != "shared_memory":
        raise ConfigError(
            f"rank_collective {collective}: ranks of compiled steps add up in shared memory: leave it out, or set dtype float32"
        )


def _by_triton(spec: ModelSpec, caches: tuple[KvCache, ...]) -> bool:
    """Tell whether kernels of Triton compute attention and operations, unless a batch may change no bit."""
    first = caches[0]
    cast = not first.layout.quantised and TORCH_DTYPES[first.layout.dtype] is not first.dtype  # kernels cannot cast numbers
    return triton_usable(first.device) and not cast and spec.beyond(TRITON_FEATURES) is None


def _backend(ranks: Ranks, caches: tuple[KvCache, ...], *, invariant: bool) -> Backend:
    """Return the parts of a torch decoder, with attention and operations for the heads of a rank in each KV group."""
    spec = ranks.share.spec
    shared = [_own_heads(spec.layers[layers[0]].attention, ranks.share) for layers in spec.kv_groups]
    groups = [None if one is None else (kv, one.heads, Scores.of(one)) for kv, one in zip(caches, shared, strict=True)]
    if invariant:
        exact = tuple(group and BoundedAttention(InvariantAttention(*group), group[-1]) for group in groups)
        return Backend(TiledRows(ranks.agree), exact, tuple(TorchOps(kv, fixed=True) for kv in caches), softcap_fixed)
    if _by_triton(spec, caches):
        from pdserve.engine.attention.triton import TritonAttention
        from pdserve.engine.kernels.ops import TritonOps
        from pdserve.engine.kernels.shape import shape_of

        by_kernels = tuple(
            None if one is None else TritonAttention(kv.paged, shape_of(one, kv.paged.block_size, kv.paged.format), kv.dtype)
            for kv, one in zip(caches, shared, strict=True)
        )
        return Backend(WholeRows(), by_kernels, tuple(TritonOps(kv.paged) for kv in caches), softcap, "Triton")
    fast = tuple(group and BoundedAttention(FastAttention(*group), group[-1]) for group in groups)
    return Backend(WholeRows(), fast, tuple(TorchOps(kv, fixed=False) for kv in caches), softcap)


def _own_heads(attention: Attention, share: RankShare) -> Attention | None:
    """Return the attention of a rank's heads alone. None: it has no head."""
    own, all_heads = len(share.whole_heads(attention)), attention.kv_heads
    if own == 0 or isinstance(attention, MlaSpec):
        return attention if own else None
    return replace(attention, heads=attention.heads // all_heads * own, kv_heads=own)


def _recorded(
    model: Decoder, backend: Backend, caches: tuple[KvCache, ...], max_positions: int, max_batch: int
) -> Hidden | None:
    """Return decode steps as CUDA graphs, or None when steps cannot be recorded, because the backend computes on the host, or
    because a layer waits for the device.
    """
    if not triton_usable(caches[0].device) or not model.recordable:
        return None
    from pdserve.engine.attention.triton import TritonAttention
    from pdserve.engine.models.graphs import DecodeGraphs, cuda_recorder

    attention = tuple(one for one in backend.attention if isinstance(one, TritonAttention))
    if len(attention) < len(caches):
        return None
    limits = {"max_positions": max_positions, "max_batch": max_batch}
    return DecodeGraphs(model, attention, cuda_recorder(), caches=caches, **limits).hidden
