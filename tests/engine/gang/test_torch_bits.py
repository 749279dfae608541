"""The ranks of a gang that compute by torch, or by Triton under the interpreter, have the bits of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
import torch

from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError, ReplicaLost
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import KvShare, whole_share
from pdserve.core.model_spec import DenseSpec, ModelSpec, MoeSpec, NormSpec
from pdserve.core.shards import Degrees, RankShare, shares_of_rank
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.gang.collective import CollectiveRanks
from pdserve.engine.gang.meeting import Meeting, MetRanks, RankDecoder, lose, meeting_bytes
from pdserve.engine.gang.memory import SharedMemory
from pdserve.engine.kernels.support import triton_installed
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.layers.linear import Scheme
from pdserve.engine.layers.ranks import Alone, linear_for
from pdserve.engine.models import choice
from pdserve.engine.models.api import Model
from pdserve.engine.models.choice import check_ranks, torch_model
from tests.engine.drafted_rows import Case, check_drafts
from tests.engine.native.feature_models import GEMMA, heads, latent, model, weights_of

SIZE = 16
LENGTHS: Final = (1, 17, 90)
SHORT: Final = (1, 18)  # the interpreter is slow
NINE = [heads(9, 3, 32, bias=True, out_bias=True)] * 3
MODELS: Final[dict[str, ModelSpec]] = {
    "nine_heads": model(*NINE, mlp=DenseSpec(200), hidden_size=144),
    "one_kv_head": model(*[heads(8, 1, 16, qk_norm=NormSpec(0.5))] * 2, mlp=DenseSpec(112)),
    "gemma": model(
        heads(8, 4, 32, window=40, **GEMMA), heads(4, 2, 64, **GEMMA), mlp=DenseSpec(112, "gelu_tanh"),
        layer={"norms": NormSpec(1e-6, 1.0), "post_norms": True}, embedding_scale=8.0, softcap=2.0,
    ),
    "latent": model(*[latent(5, 48, 32, 16, 16, q_rank=112)] * 2),
    "mixture": model(
        *[heads(4, 4, 16)] * 2,
        mlp=MoeSpec(8, 3, 48, renormalise=False, scale=3.0, groups=4, top_groups=2, shared=80, shared_gate=True),
    ),
}  # fmt: skip


def pool(spec: ModelSpec, kv_dtype: str, dtype: torch.dtype, shares: Sequence[KvShare | None] = ()) -> KvPool:
    return KvPool(spec.kv_spec(SIZE, kv_dtype), 2 * MIB, torch.device("cpu"), dtype, shares=shares)


def own_pools(spec: ModelSpec, degrees: Degrees, kv_dtype: str, dtype: torch.dtype) -> list[KvPool]:
    """Return the pool of each rank, which holds its part of each block."""
    kv = spec.kv_spec(SIZE, kv_dtype)
    return [pool(spec, kv_dtype, dtype, shares_of_rank(spec, degrees, kv, rank)) for rank in range(degrees.ranks)]


def whole_blocks(pools: list[KvPool]) -> list[torch.Tensor]:
    """Return the blocks of each KV group, put together from the parts of all ranks."""
    blocks = []
    for number, group in enumerate(pools[0].spec.groups):
        whole = torch.zeros(pools[0].caches[number].num_blocks, group.block_bytes, dtype=torch.uint8)
        for kv in pools:
            share = kv.shares[number]
            if share is not None:
                for ours, theirs in zip(share.units(group, share), share.units(group, whole_share(group)), strict=True):
                    part = kv.caches[number].blocks[:, ours.offset :][:, : ours.nbytes]
                    whole[:, theirs.offset :][:, : theirs.nbytes] = part
        blocks.append(whole)
    return blocks


def plans(groups: int, lengths: tuple[int, ...]) -> list[StepPlan]:
    """Return steps of prompts in chunks of different sizes, of single tokens, and of one token."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(160, (length + 2,), generator=generator).tolist() for length in lengths]
    tables, used = [], 0
    for length in lengths:
        count = -(-(length + 2) // SIZE)
        tables.append((tuple(map(BlockId, range(used, used + count))),) * groups)
        used += count

    def piece(i: int, start: int, end: int) -> SequenceSlice:
        return SequenceSlice(SeqId(i), start, tuple(ids[i][start:end]), tables[i], ())

    return [
        StepPlan(tuple(piece(i, 0, length // 2) for i, length in enumerate(lengths) if length > 1)),
        StepPlan(tuple(piece(i, length // 2, length) for i, length in enumerate(lengths))),
        StepPlan(tuple(piece(i, length, length + 1) for i, length in enumerate(lengths))),
        StepPlan((piece(1, lengths[1] + 1, lengths[1] + 2),)),
    ]


@torch.inference_mode()
def computed(model: Model, pools: list[KvPool], lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Compute all steps, and return their logits and the bytes of the blocks. The first step gives no logits."""
    results = []
    for number, plan in enumerate(plans(len(pools[0].caches), lengths)):
        logits = model.forward(plan, [] if number == 0 else list(range(0, plan.num_tokens, 3)))
        results += [] if logits is None else [logits.values.clone()]
    assert len(results) == 3
    return [*results, *whole_blocks(pools)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The bits of torch's plain attention depend on the ranks where a rank has several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Turns:
    """Lets one rank compute at a time, until it meets the others, because the interpreter of Triton is for one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meet = Meeting.meet

    def meet(self, meeting: Meeting, timeout_s: float | None) -> None:
        self._lock.release()
        try:
            self._meet(meeting, timeout_s)
        finally:
            self._lock.acquire()

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self._lock, torch.inference_mode():
            yield


@contextmanager
def gang_of_threads(
    spec: ModelSpec,
    degrees: Degrees,
    pools: list[KvPool],
    config: EngineConfig,
    patch: pytest.MonkeyPatch,
    folder: Path | None,
) -> Iterator[RankDecoder]:
    """Run a gang, and yield its rank 0. The other ranks are threads that follow it. pools: one for all ranks, or one for each.

    They gather by gloo where they get a folder to find each other, and in shared memory otherwise.
    """
    kv = pools[0]
    config = replace(
        config, tensor_parallel_size=degrees.tensor, pipeline_parallel_size=degrees.pipeline,
        enable_expert_parallel=degrees.experts,
    )  # fmt: skip
    check_ranks(spec, kv, config)
    weights, turn = weights_of(spec).map(lambda one: one.to(kv.dtype)), torch.inference_mode
    if folder is None:
        turns = Turns()
        turn = turns.taken
        patch.setattr(Meeting, "meet", lambda meeting, timeout_s: turns.meet(meeting, timeout_s))
    memory = SharedMemory(meeting_bytes(RankShare(spec, degrees)))
    failures: list[BaseException] = []

    def rank(number: int) -> RankDecoder:
        share = RankShare(spec, degrees, number)
        if folder is not None:
            ranks: MetRanks = CollectiveRanks(share, memory, 60.0, library="gloo", folder=folder, device=kv.device)
        else:
            ranks = MetRanks(share, memory, 60.0)
        return RankDecoder(torch_model(weights, pools[number % len(pools)], config, 2048, ranks), ranks)

    def follow(number: int) -> None:
        try:
            with turn():
                rank(number).follow()
        except BaseException as exc:  # noqa: BLE001 - looked at below
            failures.append(exc)
            lose(memory)

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(1, degrees.ranks)]
    for thread in threads:
        thread.start()
    try:
        with turn():
            yield rank(0)
    finally:
        lose(memory)
        for thread in threads:
            thread.join()
    assert all(isinstance(failure, ReplicaLost) for failure in failures), failures
    assert len(failures) == len(threads)


@cache
def of_one_process(name: str, kv_dtype: str, config: EngineConfig, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    spec = MODELS[name]
    kv = pool(spec, kv_dtype, torch_dtype(config))
    weights = weights_of(spec).map(lambda one: one.to(kv.dtype))
    with torch.inference_mode():
        alone = torch_model(weights, kv, config, 2048, Alone(RankShare(spec)))
    results = computed(alone, [kv], lengths)
    assert all(torch.isfinite(one.float()).all() for one in results[:3])
    return results


def torch_dtype(config: EngineConfig) -> torch.dtype:
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def check(
    name: str, degrees: Degrees, kv_dtype: str = "", lengths: tuple[int, ...] = LENGTHS, *, gloo: bool = False, **changes: Any
) -> None:
    config = EngineConfig(**{"model": "toy", "dtype": "float32", "batch_invariant": True, **changes})
    kv_dtype = kv_dtype or config.dtype
    spec, dtype = MODELS[name], torch_dtype(config)
    pools = own_pools(spec, degrees, kv_dtype, dtype) if gloo else [pool(spec, kv_dtype, dtype)]
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory() as folder,
        gang_of_threads(spec, degrees, pools, config, patch, Path(folder) if gloo else None) as gang,
    ):
        found = computed(gang, pools, lengths)
    expected = of_one_process(name, kv_dtype, config, lengths)
    assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(3), Degrees(4), Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_one_process_whatever_the_batch(name: str, degrees: Degrees) -> None:
    """Three ranks of four heads, and four of one, have unequal shares or none."""
    check(name, degrees)


@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(3), Degrees(4), Degrees(1, 2)], ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma"])
def test_the_bits_of_one_process_in_the_fastest_way(name: str, degrees: Degrees) -> None:
    check(name, degrees, batch_invariant=False)


@pytest.mark.parametrize("degrees", [Degrees(2, 1, True), Degrees(4, 1, True), Degrees(1, 2, True)], ids=str)
def test_whole_experts_of_ranks(degrees: Degrees) -> None:
    check("mixture", degrees)
    check("mixture", degrees, batch_invariant=False)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("name", ["nine_heads", "gemma", "latent"])
def test_kv_of_other_dtypes(name: str, kv_dtype: str) -> None:
    """Each rank rounds its heads once, with the scales of these heads."""
    check(name, Degrees(2, 2), kv_dtype)


@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize(
    ("name", "degrees"), [("nine_heads", Degrees(3)), ("one_kv_head", Degrees(2)), ("gemma", Degrees(2, 2))], ids=str
)
def test_each_rank_takes_back_the_rejected_drafts_of_its_heads(name: str, degrees: Degrees, gloo: bool) -> None:
    """A rank without a KV head takes nothing back."""
    config = EngineConfig("toy", dtype="float32", batch_invariant=True)  # torch itself needs no other KV for this
    spec = MODELS[name]
    pools = own_pools(spec, degrees, "int8", torch.float32) if gloo else [pool(spec, "int8", torch.float32)]
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory() as folder,
        gang_of_threads(spec, degrees, pools, config, patch, Path(folder) if gloo else None) as gang,
    ):
        check_drafts(gang, pools, [Case(14, 6, 2), Case(40, 0, 1), Case(63, 3, 1), Case(70, 3, 4)], 1)


def test_numbers_of_16_bits_where_the_batch_changes_no_bit() -> None:
    check("nine_heads", Degrees(3), dtype="bfloat16")


@pytest.mark.quick("nine_heads-tensor_parallel_size 2, pipeline_parallel_size 2")
@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(3), Degrees(4), Degrees(1, 2), Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_one_process_over_gloo_and_in_memory_of_their_own(name: str, degrees: Degrees) -> None:
    check(name, degrees, gloo=True)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("name", ["nine_heads", "gemma", "latent"])
def test_kv_of_other_dtypes_in_memory_of_their_own(name: str, kv_dtype: str) -> None:
    check(name, Degrees(2, 2), kv_dtype, gloo=True)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [Degrees(2, 1, True), Degrees(4, 1, True), Degrees(1, 2, True)], ids=str)
def test_whole_experts_of_ranks_over_gloo(degrees: Degrees) -> None:
    check("mixture", degrees, gloo=True)
    check("mixture", degrees, gloo=True, dtype="bfloat16")


@pytest.mark.slow
def test_ranks_with_several_threads_where_the_batch_changes_no_bit() -> None:
    torch.set_num_threads(2)
    check("mixture", Degrees(4))


@pytest.mark.parametrize(
    ("name", "degrees", "changes", "words"),
    [
        ("latent", Degrees(2), {"dtype": "bfloat16"}, "by torch in bfloat16: .*set batch_invariant, or dtype"),
        ("gemma", Degrees(2), {}, "tensor_parallel_size 2 by torch with a softcap.*set batch_invariant$"),
        ("mixture", Degrees(3, 1, True), {}, "8 experts cannot be shared among 3 ranks"),
    ],
)  # fmt: skip
def test_what_has_other_bits_is_refused_by_name(name: str, degrees: Degrees, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(name, degrees, batch_invariant=False, **changes)


def test_a_product_whose_columns_have_other_bits_alone_is_refused() -> None:
    """So another machine, with other products, never computes other tokens unnoticed."""

    def lay_out(weight: torch.Tensor) -> Any:
        return lambda x: torch.nn.functional.linear(x, weight) + float(len(weight) == 64)

    ranks = MetRanks(RankShare(MODELS["latent"], Degrees(2)), SharedMemory(8 * MIB), 1.0)
    with pytest.raises(ConfigError, match=r"columns 0 to 31 of a product of 64 by 32 numbers \(odd\) have other bits"):
        linear_for(Scheme("odd", lay_out), ranks)(torch.ones(64, 32))


@pytest.mark.skipif(not triton_installed(), reason="the kernels need Triton: pip install 'pdserve[gpu]'")
@pytest.mark.quick("one_kv_head-tensor_parallel_size 2")
@pytest.mark.parametrize("degrees", [Degrees(2), Degrees(3), Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_one_process_by_triton(name: str, degrees: Degrees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "triton_usable", lambda device: True)
    monkeypatch.setattr(choice, "_recorded", lambda *step: None)
    check(name, degrees, lengths=SHORT, batch_invariant=False)
