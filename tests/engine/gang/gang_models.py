"""Small models that several ranks can share, and gangs whose ranks are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch

from pdserve.core.errors import ReplicaLost
from pdserve.core.model_spec import DenseSpec, ModelSpec, MoeSpec, NormSpec
from pdserve.core.shards import Degrees, RankShare
from pdserve.engine.gang import memory
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.layers.linear import COMPILED_SCHEMES
from pdserve.engine.models.native_decoder import NativeDecoder
from pdserve.engine.models.weights import ModelWeights
from tests.engine.native.feature_models import GEMMA, heads, latent, model

MOST_ROWS: Final = 1200
SHARED: Final[dict[str, ModelSpec]] = {
    "llama": model(*[heads(8, 8, 64)] * 3, mlp=DenseSpec(512)),
    "grouped": model(*[heads(8, 2, 64, bias=True, out_bias=True)] * 3, mlp=DenseSpec(512)),
    "one_kv_head": model(*[heads(8, 1, 64, qk_norm=NormSpec(0.5))] * 2, mlp=DenseSpec(512)),
    "gemma": model(
        heads(8, 4, 64, window=70, **GEMMA), heads(8, 4, 64, **GEMMA), heads(8, 4, 64, window=70, **GEMMA),
        mlp=DenseSpec(512, "gelu_tanh"), layer={"norms": NormSpec(1e-6, 1.0), "post_norms": True},
        embedding_scale=8.0, softcap=2.0,
    ),
    "latent": model(*[latent(8, 64, 48, 32, 64)] * 2, mlp=DenseSpec(512)),
    "latent_ranked": model(*[latent(8, 64, 48, 32, 64, q_rank=128)] * 2, mlp=DenseSpec(512)),
    "mixture": model(*[heads(8, 4, 64)] * 2, mlp=MoeSpec(8, 2, 512)),
    "shared_expert": model(
        *[heads(8, 4, 64)] * 2,
        mlp=MoeSpec(8, 3, 512, renormalise=False, scale=3.0, groups=4, top_groups=2, shared=512, shared_gate=True),
        layer={"norms": NormSpec(1e-6), "post_norms": True},
    ),
    "latent_mixture": model(
        *[latent(8, 64, 48, 32, 64)] * 2, mlp=MoeSpec(16, 5, 512, score="sigmoid", correction_bias=True, shared=512)
    ),
}  # fmt: skip
BY_COLUMNS: Final[dict[str, ModelSpec]] = {
    "nine_heads": model(*[heads(9, 3, 64, bias=True, out_bias=True)] * 3, mlp=DenseSpec(576), hidden_size=320),
    "windows": model(
        heads(6, 6, 64, window=70, **GEMMA), heads(6, 3, 64, **GEMMA), mlp=DenseSpec(192, "gelu_tanh"),
        layer={"norms": NormSpec(1e-6, 1.0), "post_norms": True},
        hidden_size=256,
    ),
    "twelve_latent": model(*[latent(12, 64, 48, 32, 64, q_rank=128)] * 2, mlp=DenseSpec(384), hidden_size=192),
}  # fmt: skip
"""Models whose sums three or six ranks cannot share."""
HALF_A_PANEL: Final = {"half_a_panel": model(*[heads(9, 3, 64)] * 2, mlp=DenseSpec(144), hidden_size=208)}
"""Its widths are no whole groups of numbers, which weights of fewer bits need."""


@contextmanager
def gang_of_threads(
    spec: ModelSpec, weights: ModelWeights, degrees: Degrees, kv: KvPool, *, quantization: Any = None, timeout_s: float = 30.0
) -> Iterator[NativeDecoder]:
    """Run a gang on one KV pool, and yield its rank 0. The other ranks are threads that follow it."""
    degrees.check(spec)
    layout = memory.gang_layout(spec, degrees, rows=MOST_ROWS, table_blocks=64, groups=len(kv.spec.groups), timeout_s=timeout_s)
    shared = memory.SharedMemory(memory.gang_bytes(layout))
    places = [memory.place_of(layout, RankShare(spec, degrees, number), shared) for number in range(degrees.ranks)]
    ranks = [
        NativeDecoder(RankShare(spec, degrees, number), weights, kv, 2048, COMPILED_SCHEMES[quantization], place)
        for number, place in enumerate(places)
    ]
    failures: list[BaseException] = []

    def follow(rank: NativeDecoder) -> None:
        try:
            rank.follow()
        except BaseException as exc:  # noqa: BLE001 - looked at below
            failures.append(exc)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    try:
        yield ranks[0]
    finally:
        memory.lose(places[0])
        for thread in threads:
            thread.join()
    assert all(isinstance(failure, ReplicaLost) for failure in failures), failures
    assert len(failures) == len(threads)


def bf16_weights(weights: ModelWeights) -> ModelWeights:
    """Return the weights in bfloat16."""
    return weights.map(lambda tensor: tensor.to(torch.bfloat16))


def with_vocab(spec: ModelSpec, vocab_size: int) -> ModelSpec:
    """Return the model with another vocabulary."""
    return replace(spec, vocab_size=vocab_size)
