"""The compiled kernels against torch's way of computing the same model, and against themselves in other company."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import sampling_cases

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.sampling import SamplingParams, uniform
from pdserve.core.step_plan import NO_TOKEN, SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.loading.load import load_weights
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.batched import BatchedDecoder
from pdserve.engine.models.native_decoder import PackedRows
from pdserve.engine.models.weights import ModelWeights
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import sample

pytestmark = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")
NEAR_TIE = 0.5  # single logits of SmolLM2 are up to 1.8 apart between the two; among the leading ones this sufficed


@pytest.fixture(scope="module", params=["tiny", "default"])
def pair(request, make_runner):
    """(compiled, torch, float32) runners of one model."""
    try:
        resolve(request.param)
    except ConfigError as exc:
        pytest.skip(f"the model is not installed: {exc.message}")
    compiled = make_runner(request.param, dtype="bfloat16")
    plain = make_runner(request.param, compiled=False, dtype="bfloat16")
    assert isinstance(compiled._model, native.NativeDecoder)
    assert isinstance(plain._model, BatchedDecoder)
    return compiled, plain, make_runner(request.param)


@pytest.fixture(scope="module")
def tiny_runner(make_runner) -> ModelRunner:
    return make_runner("tiny", dtype="bfloat16")


def plan_of(ids: list[int], start: int, *samples: SampleSpec) -> StepPlan:
    """Tokens [start, len(ids)) on blocks in descending order."""
    table = tuple(BlockId(80 - i) for i in range(-(-len(ids) // 16)))
    return StepPlan((SequenceSlice(SeqId(1), start, tuple(ids[start:]), (table,), samples),))


def vocab_of(compiled: ModelRunner) -> int:
    return compiled._model._vocab


@pytest.mark.quick("tiny")
def test_compiled_logits_are_nearer_to_float32_than_torch_in_bfloat16(pair):
    compiled, plain, exact = pair
    rng, vocab = random.Random(1), vocab_of(compiled)
    for length in (1, 17, 70, 300):
        plan = plan_of([rng.randrange(vocab) for _ in range(length)], 0)
        expected = exact.logits(plan)
        ours, torchs = ((runner.logits(plan) - expected).square().mean().sqrt().item() for runner in (compiled, plain))
        assert ours <= 1.05 * torchs
        assert ours < 0.25


@pytest.mark.quick("tiny")
def test_eight_bits_stay_near_float32(pair, make_runner):
    """With one scale a row of activations the difference was 2.1 on SmolLM2."""
    compiled, _, exact = pair
    vocab = vocab_of(compiled)
    runner = make_runner("tiny" if vocab == 512 else "default", dtype="bfloat16", quantization="int8")
    rng = random.Random(6)
    plan = plan_of([rng.randrange(vocab) for _ in range(200)], 0)
    assert (runner.logits(plan) - exact.logits(plan)).square().mean().sqrt().item() < 0.6


@pytest.mark.parametrize("threads", [1, 2])
def test_four_bits_compute_what_their_codes_say(tiny_dir, threads):
    """Against torch on weights that were rounded in the same way: no error but that of bfloat16 and of the head in 8 bits."""
    config = EngineConfig(kv_cache_memory=8 * MIB, dtype="bfloat16", threads=threads, max_model_len=512)
    card = ModelCard.load(tiny_dir)

    def rounded(dtype: torch.dtype, device: torch.device) -> ModelWeights:
        weights = load_weights(tiny_dir, card, torch.float32, device)
        changed = weights.map(lambda tensor: as_four_bits(tensor) if tensor.dim() == 2 else tensor)
        return replace(changed, embedding=weights.embedding, head=weights.head)

    exact = ModelRunner.make(card, replace(config, dtype="float32"), rounded)
    runner = ModelRunner.make(card, replace(config, quantization="int4"), partial(load_weights, tiny_dir, card))
    rng = random.Random(8)
    try:
        for length in (1, 3, 7, 13, 40, 200):  # one piece of rows, several, rows shared out
            plan = plan_of([rng.randrange(512) for _ in range(length)], 0)
            expected, found = exact.logits(plan), runner.logits(plan)
            assert (found - expected).square().mean().sqrt() < 0.04 * expected.square().mean().sqrt()
    finally:
        torch.set_num_threads(1)


def as_four_bits(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 32 along a row, from the least to the largest in sixteen steps; scale and least in bfloat16."""
    groups = weight.bfloat16().float().view(-1, 32)
    least = groups.amin(1, keepdim=True)
    scale = ((groups.amax(1, keepdim=True) - least) / 15).bfloat16().float()
    codes = ((groups - least) * (1 / scale)).round().clamp(0, 15)
    return (codes * scale + least.bfloat16().float()).view(weight.shape)


@pytest.mark.quick("tiny")
def test_greedy_tokens_equal_torchs_until_a_near_tie(pair):
    compiled, plain, _ = pair
    rng, vocab, compared = random.Random(2), vocab_of(pair[0]), 0
    spec = SampleSpec(SamplingParams(temperature=0.0), 0)
    for _ in range(12 if vocab == 512 else 5):
        ids, computed = [rng.randrange(3, vocab) for _ in range(rng.randint(1, 60))], 0
        for _ in range(24):
            (token,) = (token_id for token_id, _ in compiled.execute(plan_of(ids, computed, spec)))
            computed, ids = len(ids), [*ids, token]
        for token, logits in zip(ids[-24:], plain.logits(plan_of(ids[:-1], 0))[-24:], strict=True):
            first, second = logits.topk(2).values.tolist()
            assert logits[token] >= first - NEAR_TIE
            if first - second > NEAR_TIE:
                assert token == logits.argmax().item()
                compared += 1
    assert compared > 60


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_decode_has_the_bits_of_its_prefill_with_any_number_of_threads(make_runner, make_sheets, quantization):
    """Chunks of KV are shared out among threads and merged; rows or columns are split: neither may show."""
    runner = make_runner(dtype="bfloat16", quantization=quantization)
    rng = random.Random(3)
    sheets = make_sheets(runner, [300, 700, 1030], rng)
    whole = [runner.logits(sheet.whole())[-1] for sheet in sheets]
    last = [sheet.piece(len(sheet.tokens) - 1, len(sheet.tokens)) for sheet in sheets]
    try:
        for threads in (1, 2, 3):
            runner._model.threads = threads
            for piece, expected in zip(last, whole, strict=True):
                assert torch.equal(runner.logits(StepPlan((piece,)))[0], expected)
            assert torch.equal(runner.logits(StepPlan(tuple(last))), torch.stack(whole))
            assert torch.equal(runner.logits(sheets[2].whole())[-1], whole[2])
    finally:
        runner._model.threads = 1


@pytest.mark.parametrize("block_size", [16, 5])
def test_nan_behind_the_end_and_in_other_blocks_does_not_leak(make_runner, make_sheets, block_size):
    runner = make_runner(dtype="bfloat16", block_size=block_size)
    (sheet,) = make_sheets(runner, [83], random.Random(4))
    expected = runner.logits(sheet.whole())
    runner.kv.caches[0].tensor.fill_(torch.nan)
    assert torch.equal(runner.logits(sheet.whole()), expected)
    assert torch.equal(runner.logits(StepPlan((sheet.piece(82, 83),)))[0], expected[-1])
    runner.kv.caches[0].tensor.zero_()


@pytest.mark.parametrize(("tokens", "table"), [(17, (0,)), (2, (1 << 30,)), (2, (-1,))])
def test_a_step_outside_its_blocks_is_not_computed(tiny_runner, tokens, table):
    blocks = tuple(BlockId(block) for block in table)
    with pytest.raises(AssertionError, match="block"):
        tiny_runner.logits(StepPlan((SequenceSlice(SeqId(0), 0, (5,) * tokens, (blocks,), ()),)))


def test_only_the_wanted_rows_are_answered_and_chunks_without_any_write_their_kv(make_runner, make_sheets):
    runner = make_runner(dtype="bfloat16")
    first, second = make_sheets(runner, [40, 33], random.Random(5))
    expected = torch.cat([runner.logits(first.whole())[-1:], runner.logits(second.whole())[-1:]]).argmax(1).tolist()
    runner.kv.caches[0].tensor.zero_()
    spec = SampleSpec(SamplingParams(temperature=0.0), 0)
    assert runner.execute(StepPlan((first.piece(0, 21), second.piece(0, 32)))) == []
    drawn = runner.execute(StepPlan((first.piece(21, 40, spec), second.piece(32, 33, spec))))
    assert [token_id for token_id, _ in drawn] == expected


@settings(max_examples=150, deadline=None)
@given(case=sampling_cases(vocab=512))
def test_compiled_tokens_and_logprobs_equal_the_torch_samplers(tiny_runner, case):
    """To the bit: both compute the same weights, whose sums are exact."""
    logits, specs = case
    taken = tiny_runner._model._sample(logits.clone(), list(range(len(specs))), specs)
    assert taken == sample(logits.clone(), specs)


def test_compiled_tokens_equal_the_torch_samplers_in_a_vocabulary_of_no_round_size(tiny_runner):
    """The last vector is not full, and many weights are equal."""
    generator = torch.Generator().manual_seed(11)
    wide = torch.randn(3, 512 * 7 - 3, generator=generator).round(decimals=1)
    shape = library.NativeShape(vocab=wide.shape[1])
    assert shape.vocab % 16
    model = library.load().pdserve_model_new(ctypes.byref(shape), None)
    specs = [SampleSpec(SamplingParams(seed=i, top_p=0.9, logprobs=20), i) for i in range(3)]
    greedy = [SampleSpec(SamplingParams(temperature=0.0), i) for i in range(3)]
    masks = [_Mask(i, wide.shape[1]) for i in range(6)]
    specs += [SampleSpec(one.params, one.output_index, grammar=m) for one, m in zip(specs + greedy, masks, strict=True)]
    rows = torch.cat([wide, wide, wide])
    drawn = rows.clone()
    packed = PackedRows(list(range(9)), specs, wide.shape[1])
    try:
        assert library.load().pdserve_model_sample(model, 2, drawn.data_ptr(), packed.address, 9, packed.ids_address) == 1
    finally:
        library.load().pdserve_model_free(model)
    taken = packed.taken()
    assert taken == sample(rows, specs)
    assert taken[3:6] != taken[:3]
    assert all(mask.allows(token_id) for mask, (token_id, _) in zip(masks, taken[3:], strict=True))


class _Mask:
    """A grammar in which a random tenth of the ids may come next."""

    failure = None

    def __init__(self, seed: int, vocab_size: int) -> None:
        allowed = np.random.default_rng(seed).random(vocab_size) < 0.1
        self._bits = np.packbits(allowed, bitorder="little")

    def mask(self) -> bytes:
        return bytes(self._bits) + bytes(3)

    def allows(self, token_id: int) -> bool:
        return bool(self._bits[token_id // 8] >> token_id % 8 & 1)


def test_a_grammar_that_has_failed_gets_no_token_of_compiled_code(tiny_runner):
    class Failed(_Mask):
        def mask(self) -> None:
            return None

    specs = [SampleSpec(SamplingParams(temperature=t), 0, grammar=Failed(0, 512)) for t in (0.0, 1.0)]
    assert tiny_runner._model._sample(torch.randn(2, 512), [0, 1], specs) == [(NO_TOKEN, None)] * 2


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**31))
def test_compiled_code_draws_the_same_number(tiny_runner, seed, index):
    """Ids by a flat distribution: the number drawn is the id, to 1 in 512."""
    (taken,) = tiny_runner._model._sample(torch.zeros(1, 512), [0], [SampleSpec(SamplingParams(seed=seed), index)])
    assert taken[0] == int(uniform(seed, index) * 512)


def test_a_greedy_row_a_banned_one_and_drawn_ones_share_a_step(tiny_runner):
    ids = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    table = [(BlockId(index),) for index in range(3)]
    greedy, warm = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=9)
    first = tiny_runner.logits(plan_of(ids[0], 0))[-1].topk(2).indices.tolist()
    specs = [SampleSpec(greedy, 0, (first[0],)), SampleSpec(greedy, 0), SampleSpec(warm, 3)]
    alone = [
        tiny_runner.execute(StepPlan((SequenceSlice(SeqId(i), 0, tuple(ids[i]), (table[i],), (specs[i],)),)))[0]
        for i in range(3)
    ]
    together = tiny_runner.execute(
        StepPlan(tuple(SequenceSlice(SeqId(i), 0, tuple(ids[i]), (table[i],), (specs[i],)) for i in range(3)))
    )
    assert list(together) == alone
    assert together[0][0] == first[1]


@pytest.fixture
def installed_as(monkeypatch, tmp_path):
    """installed_as(contents): the package's folder holds this for a library, or none. Returns what is found there."""

    def found(contents: bytes | None) -> library.Found:
        if contents is not None:
            (tmp_path / "_kernels_avx2.so").write_bytes(contents)
        monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
        monkeypatch.delenv(library.ISA, raising=False)  # a set that is forced and not there is refused
        library.find.cache_clear()
        return library.find()

    yield found
    library.find.cache_clear()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_without_the_library_fewer_bits_are_refused_by_name(installed_as, tiny_dir, quantization):
    installed_as(None)
    config = EngineConfig(kv_cache_memory=MIB, dtype="bfloat16", quantization=quantization)
    with pytest.raises(ConfigError, match=r"quantization .* no C\+\+ compiler"):
        ModelRunner.load(tiny_dir, ModelCard.load(tiny_dir), config)


def test_without_the_library_torch_computes_and_it_is_said_why(installed_as, tiny_dir):
    installed_as(None)
    runner = ModelRunner.load(tiny_dir, ModelCard.load(tiny_dir), EngineConfig(kv_cache_memory=MIB, dtype="bfloat16"))
    assert isinstance(runner._model, BatchedDecoder)
    assert runner.describe().startswith("torch bfloat16 (no compiled kernels: there was no C++ compiler for x86-64 when")


def test_a_library_of_another_platform_is_passed_over(installed_as):
    found = installed_as(b"not ELF")
    assert found.library is None
    assert found.why.startswith("the compiled kernels do not load, install pdserve again")
