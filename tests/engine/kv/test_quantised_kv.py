"""Quantised KV: what is stored, by torch and compiled, and what the engine still promises with it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import ConfigError
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import QUANTISED, gqa_group
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.format import LARGEST
from pdserve.engine.kv.span import Span
from pdserve.engine.loading.load import load_weights
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.batched import BatchedDecoder
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind

CPU = torch.device("cpu")
SIZE = 16
compiled_only = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")


def poisoned(dtype: str, blocks: int = 6, heads: int = 2, dim: int = 8, compute: torch.dtype = torch.float32) -> KvCache:
    """NaN scales, and numbers that are NaN in fp8 and large otherwise."""
    layout = gqa_group(3, heads, dim, SIZE, dtype)
    kv = KvCache(layout, blocks * layout.block_bytes, CPU, compute)
    kv.tensor.fill_(0x7F)
    kv.scales.fill_(math.nan)
    return kv


def nearest(x: float, dtype: str) -> float:
    """The stored number for `x`, by definition, in float64."""
    if dtype != "fp8_e4m3":
        return max(-LARGEST[dtype], min(LARGEST[dtype], math.floor(x + 0.5)))
    step = 2.0 ** (max(math.frexp(x)[1] - 1, -6) - 3)
    return max(-448.0, min(448.0, round(x / step) * step))  # round: halves to even


class LoopHead:
    """One head of one block: its numbers and scale, token by token and number by number."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.scale, self.numbers = dtype, 0.0, []

    def write(self, tokens: list[list[float]]) -> None:
        before = self.scale
        self.scale = max(before, max(abs(x) for token in tokens for x in token) / LARGEST[self.dtype])
        if self.scale > before:
            self.numbers = [[nearest(n * before / self.scale, self.dtype) for n in token] for token in self.numbers]
        self.numbers += [[nearest(x / self.scale, self.dtype) for x in token] for token in tokens]

    def values(self) -> torch.Tensor:
        return torch.tensor(self.numbers, dtype=torch.float64) * self.scale


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("seed", range(3))
def test_any_chunks_in_any_company_are_stored_as_a_loop_in_float64_says(dtype, compute, seed):
    """float32 may round to the neighbour where float64 sees almost a half: seldom, and by one step."""
    rng = random.Random(seed)
    kv = poisoned(dtype, compute=compute)
    tables = [(BlockId(4), BlockId(1), BlockId(3)), (BlockId(0), BlockId(2))]
    lengths, done = [37, 20], [0, 0]
    spread = torch.logspace(-1, 1, 20)[torch.randperm(20, generator=torch.Generator().manual_seed(seed))].repeat(2)[:37]
    tokens = torch.randn(2, 2, 37, 2, 8, generator=torch.Generator().manual_seed(seed)) * spread[:, None, None]
    tokens = tokens.to(compute)  # [sequence, K or V, token, head, dim]
    heads = {(block, which, head): LoopHead(dtype) for block in range(5) for which in (0, 1) for head in (0, 1)}
    while done != lengths:
        spans, rows = [], []
        for i in (0, 1):
            count = min(rng.choice([0, 1, 1, 2, 7, 20]), lengths[i] - done[i])
            if count:
                spans.append(Span(sum(len(part[0]) for part in rows), done[i], count, tables[i]))
                rows.append(tokens[i][:, done[i] : done[i] + count])
                for begin in range(done[i], done[i] + count):
                    end = min(done[i] + count, begin - begin % SIZE + SIZE)
                    if begin == done[i] or begin % SIZE == 0:
                        for which, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
                            mine = tokens[i, which, begin:end, head].double().tolist()
                            heads[tables[i][begin // SIZE], which, head].write(mine)
                done[i] += count
        if spans:
            key, value = torch.cat(rows, 1)
            kv.write(1, kv.slots(spans), key, value)
    for i, table in enumerate(tables):
        found = kv.gather(1, kv.gather_rows(torch.tensor([table])), 1)
        for which, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
            expected = torch.cat([heads[block, which, head].values() for block in table])
            scales = torch.tensor([heads[block, which, head].scale for block in table]).repeat_interleave(SIZE)
            off = (found[which][0, head, : lengths[i]].double() - expected).abs()
            near = 1e-6 if compute is torch.float32 else 2.0**-8
            step = expected.abs() / 8 if dtype == "fp8_e4m3" else scales[: lengths[i], None].double()
            assert (
                off <= torch.maximum(step, scales[: lengths[i], None].double() * 2.0**-9) * 1.01 + near * expected.abs()
            ).all()
            assert (off <= near * expected.abs() + 1e-9).double().mean() > 0.98
    assert kv.scales[5].isnan().all()
    assert kv.scales[:, [0, 2]].isnan().all()
    assert (kv.tensor[5] == 0x7F).all()
    assert (kv.tensor[:, [0, 2]] == 0x7F).all()
    assert (kv.tensor[3, 1, :, :, 37 - 32 :] == 0x7F).all(), "behind the end"


@pytest.mark.parametrize("dtype", QUANTISED)
def test_older_tokens_keep_their_bits_while_the_scale_stays(dtype):
    kv, table = poisoned(dtype), (BlockId(2),)
    tokens = torch.randn(2, 9, 2, 8, generator=torch.Generator().manual_seed(1))
    tokens[:, 0] *= 10
    kv.write(0, kv.slots([Span(0, 0, 5, table)]), *tokens[:, :5])
    before, scales = kv.tensor[2, 0, :, :, :5].clone(), kv.scales[2, 0].clone()
    kv.write(0, kv.slots([Span(0, 5, 4, table)]), *tokens[:, 5:])
    assert torch.equal(kv.tensor[2, 0, :, :, :5], before)
    assert torch.equal(kv.scales[2, 0], scales)


@pytest.mark.parametrize(("stored", "compute"), [("float32", torch.bfloat16), ("bfloat16", torch.float32)])
def test_plain_kv_of_another_dtype_is_cast_both_ways(stored, compute):
    layout = gqa_group(2, 2, 8, SIZE, stored)
    kv = KvCache(layout, 3 * layout.block_bytes, CPU, compute)
    key, value = torch.randn(2, 20, 2, 8, generator=torch.Generator().manual_seed(2)).to(compute)
    table = (BlockId(2), BlockId(0))
    kv.write(1, kv.slots([Span(0, 0, 20, table)]), key, value)
    found, _ = kv.gather(1, kv.gather_rows(torch.tensor([table])), 1)
    assert found.dtype is compute
    assert torch.equal(found[0, :, :20], key.bfloat16().to(compute).transpose(0, 1))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_same_memory_holds_twice_or_four_times_the_blocks(dtype):
    plain = gqa_group(30, 3, 64, 16, "bfloat16")
    layout = dataclasses.replace(plain, dtype=dtype)
    blocks = [KvCache(one, 64 * MIB, CPU, torch.bfloat16).num_blocks for one in (plain, layout)]
    times = 4 if dtype == "int4" else 2
    assert times * 0.98 < blocks[1] / blocks[0] <= times


def test_what_cannot_be_is_refused_by_the_name_of_the_setting():
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        EngineConfig(kv_cache_dtype="int3")
    with pytest.raises(ConfigError, match=r"batch_invariant.*kv_cache_dtype.*int8"):
        EngineConfig(kv_cache_dtype="int8", batch_invariant=True)
    EngineConfig(kv_cache_dtype="fp32", batch_invariant=True)


# --- the whole model


def replayed(runner: ModelRunner, ids: tuple[int, ...], cuts: list[int], table: tuple[BlockId, ...]) -> torch.Tensor:
    """The logits of all tokens, computed in the pieces between `cuts`."""
    pieces = [SequenceSlice(SeqId(1), a, ids[a:b], (table,), ()) for a, b in itertools.pairwise(cuts)]
    return torch.cat([runner.logits(StepPlan((piece,))) for piece in pieces])


def random_ids(count: int, vocab: int = 512) -> tuple[int, ...]:
    rng = random.Random(count)
    return tuple(rng.randrange(3, vocab) for _ in range(count))


TABLE = tuple(BlockId(40 - i) for i in range(20))
CUTS = [0, 7, 100, 101, 102, 103, 150, 250, 251, 260, 300]


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=compiled_only), False])
def test_fewer_bits_are_further_from_float32(make_runner, compiled):
    """Of logits with a standard deviation of 3: int8 off by 0.13, fp8 by 0.5, int4 by 1.4; bfloat16 KV by 0.1."""
    ids = random_ids(300)
    exact = replayed(make_runner(), ids, CUTS, TABLE)
    off = {
        kind: rms(replayed(make_runner(dtype="bfloat16", compiled=compiled, kv_cache_dtype=kind), ids, CUTS, TABLE) - exact)
        for kind in ("int8", "fp8_e4m3", "int4")
    }
    assert off["int8"] < 0.25 < off["fp8_e4m3"] < 0.8 < off["int4"] < 2.2


@pytest.mark.quick("tiny-*")
@compiled_only
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("tiny", kind) for kind in QUANTISED),
        *(pytest.param("default", kind, marks=[pytest.mark.slow] if kind != "int4" else []) for kind in QUANTISED),
    ],
)
def test_compiled_and_torch_store_the_same_bytes_of_the_same_values(make_runner, model, kind):
    """Layer 0 looks at no KV: a float32 pool shows what its keys and values are before they are quantised."""
    try:
        vocab = ModelCard.load(resolve(model)).vocab_size
    except ConfigError as exc:
        pytest.skip(f"the model is not installed: {exc.message}")
    ids = random_ids(300, vocab)
    plain = make_runner(model, dtype="bfloat16", kv_cache_dtype="fp32", kv_cache_memory=96 * MIB)
    quantised = make_runner(model, dtype="bfloat16", kv_cache_dtype=kind)
    assert isinstance(quantised._model, native.NativeDecoder)
    quantised.kv.caches[0].blocks.fill_(0xFF)  # NaN wherever a former owner's numbers or scales would be read
    for runner in (plain, quantised):
        assert replayed(runner, ids, CUTS, TABLE).isfinite().all()
    used = list(TABLE[:19])
    values = plain.kv.caches[0].tensor[used, 0].permute(1, 0, 3, 2, 4).flatten(1, 2)  # [2, tokens, heads, dim]
    torchs = KvCache(quantised.kv.spec.groups[0], quantised.kv.nbytes, CPU, torch.float32)
    torchs.blocks.fill_(0xFF)
    for start, end in itertools.pairwise(CUTS):
        torchs.write(0, torchs.slots([Span(0, start, end - start, TABLE)]), *values[:, start:end])
    assert torch.equal(quantised.kv.caches[0].tensor[:, 0], torchs.tensor[:, 0])
    assert torch.equal(quantised.kv.caches[0].scales[used, 0], torchs.scales[used, 0])
    quantised.kv.caches[0].blocks.zero_()


@compiled_only
@pytest.mark.parametrize("kind", ["bf16", "fp32", *QUANTISED])
def test_compiled_attention_reads_what_is_stored(tiny_dir, kind):
    """One layer, so that nothing that was rounded differently comes back through the next one's KV."""
    whole = ModelCard.load(tiny_dir)
    card = dataclasses.replace(whole, spec=dataclasses.replace(whole.spec, layers=whole.spec.layers[:1]))

    def read(dtype, device):
        weights = load_weights(tiny_dir, whole, dtype, device)
        return dataclasses.replace(weights, layers=weights.layers[:1])

    settings = {"kv_cache_memory": 4 * MIB, "kv_cache_dtype": kind}
    compiled = ModelRunner.make(card, EngineConfig(dtype="bfloat16", **settings), read)
    by_torch = ModelRunner.make(card, EngineConfig(dtype="float32", **settings), read)
    assert isinstance(compiled._model, native.NativeDecoder)
    assert isinstance(by_torch._model, BatchedDecoder)
    off, size = [], []
    for length in (2, 17, 70, 128, 300):
        ids = random_ids(length)
        replayed(compiled, ids, [0, *range(length // 2, length)], TABLE)
        by_torch.kv.caches[0].blocks.copy_(compiled.kv.caches[0].blocks)
        found, expected = (replayed(runner, ids, [length - 1, length], TABLE) for runner in (compiled, by_torch))
        off.append(rms(found - expected))
        size.append(rms(expected))
    assert max(off) < 0.02 * max(size)


@compiled_only
@pytest.mark.parametrize("kind", QUANTISED)
def test_chunks_of_whole_blocks_and_threads_do_not_touch_the_bits(make_runner, kind):
    """Each block is then rounded once, whoever computes it: why a prefix hit is exact."""
    runner = make_runner(dtype="bfloat16", kv_cache_dtype=kind)
    ids = random_ids(300)
    expected = replayed(runner, ids, [0, 300], TABLE)
    kept = runner.kv.caches[0].blocks[list(TABLE[:19])].clone()
    try:
        for threads, cuts in ((1, [0, 16, 80, 288, 300]), (2, [0, 300]), (3, [0, 160, 300])):
            runner._model.threads = threads
            runner.kv.caches[0].blocks.fill_(0xFF)
            assert torch.equal(replayed(runner, ids, cuts, TABLE), expected)
            found = runner.kv.caches[0].blocks[list(TABLE[:19])]
            assert torch.equal(found[:-1], kept[:-1])
    finally:
        runner._model.threads = 1
        runner.kv.caches[0].blocks.zero_()


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=compiled_only), False])
@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_that_moved_to_another_pool_as_bytes_go_on_alike(make_runner, tiny_dir, compiled, kind):
    """A prompt computed here and decoded there equals one that stays, bit for bit, as it is cut alike."""
    settings = {"dtype": "bfloat16", "kv_cache_dtype": kind, "compiled": compiled}
    here, there = make_runner(**settings), make_runner(**settings, max_num_seqs=63)
    assert here is not there
    ids, moved = random_ids(60), tuple(BlockId(7 * i + 3) for i in range(4))
    replayed(here, ids[:41], [0, 20, 41], TABLE[:4])
    there.kv.caches[0].blocks.fill_(0xFF if compiled else 0x11)  # torch's attention takes finite garbage, NaN it does not
    for source, target in zip(TABLE[:3], moved, strict=False):
        there.kv.caches[0].blocks[target] = here.kv.caches[0].blocks[source]
    cuts = list(range(41, 61))
    assert torch.equal(replayed(there, ids, cuts, moved), replayed(here, ids, cuts, TABLE[:4]))
    there.kv.caches[0].blocks.zero_()


def served(runner: ModelRunner, prompts: list[tuple[int, ...]], *, blocks: int, salt: bytes | None, at_once: bool):
    """Outputs of 40 greedy tokens each, tokens found in the cache, and how often a sequence was preempted."""
    pool = BlockPools(blocks)
    scheduler = Scheduler(
        pool, SIZE, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=blocks * SIZE, eos_token_ids=(), prefix_salt=salt
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    preempted = 0
    for group in [list(enumerate(prompts))] if at_once else [[one] for one in enumerate(prompts)]:
        for i, prompt in group:
            params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            scheduler.add(SeqId(i), RequestSpec(prompt, params), kind=SequenceKind.LOCAL)
        while scheduler.has_work:
            outcome = scheduler.collect(runner.execute(scheduler.plan()))
            preempted += len(outcome.preempted)
            for token in outcome.tokens:
                outputs[token.seq_id].append(token.token_id)
    scheduler.check_invariants()
    return outputs, scheduler.prefix.hit, preempted


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=compiled_only)])
def test_a_prefix_hit_gives_the_tokens_of_the_miss(make_runner, kind, compiled):
    """Budget and prompts are cut at whole blocks; a full block never changes, so a hit has the bits of the miss."""
    runner = make_runner(dtype="bfloat16", kv_cache_dtype=kind, compiled=compiled)
    system = random_ids(150)
    prompts = [system[: 30 * i] + random_ids(20 + i) for i in range(6)]
    missed, _, _ = served(runner, prompts, blocks=200, salt=None, at_once=False)
    runner.kv.caches[0].blocks.fill_(0xFF)
    found, hit, _ = served(runner, prompts, blocks=200, salt=b"model", at_once=False)
    assert found == missed
    assert hit > 200
    runner.kv.caches[0].blocks.zero_()


@pytest.mark.quick("*-True", "fp8_e4m3-False")
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=compiled_only), False])
@pytest.mark.parametrize("kind", ["fp32", *QUANTISED])
def test_a_pool_too_small_for_all_preempts_and_finishes(make_runner, kind, compiled):
    runner = make_runner(dtype="bfloat16", kv_cache_dtype=kind, compiled=compiled)
    prompts = [random_ids(20 + 7 * i) for i in range(6)]
    outputs, _, preempted = served(runner, prompts, blocks=14, salt=None, at_once=True)
    assert preempted > 0
    assert [len(output) for output in outputs] == [40] * 6
