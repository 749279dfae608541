"""Layers of all families: compiled code against a reference in float64, and against itself in other company."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from feature_models import GEMMA, MIXTURES, MODELS, VOCAB, heads, model, weights_of
from spec_reference import spec_logits

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.ids import NULL_BLOCK, BlockId, SeqId
from pdserve.core.model_spec import UNEQUAL_HEADS, DenseSpec, MlaSpec, MoeSpec, NormSpec, RopeSpec
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.models import native_decoder as native
from pdserve.engine.runner import ModelRunner
from tests.engine.engine_ways import COMPILED

SIZE = 16
LENGTHS = (1, 17, 90, 330, 601)
ROUNDING = {"bf16": 0.02, "fp32": 0.02, "int8": 0.04, "fp8_e4m3": 0.1, "int4": 0.3}


@cache
def reference(name: str) -> tuple[torch.Tensor, ...]:
    """The logits of each sequence."""
    spec = MODELS[name]
    return tuple(spec_logits(spec, weights_of(spec), ids_of(length)).float() for length in LENGTHS)


def ids_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def make(tiny_dir):
    made: dict[object, ModelRunner] = {}

    def make(name: str, **settings: object) -> ModelRunner:
        key = (name, *sorted(settings.items()))
        if key not in made:
            card = replace(ModelCard.load(tiny_dir), spec=MODELS[name])
            config = EngineConfig(kv_cache_memory=8 * MIB, max_model_len=640, **{"dtype": "bfloat16", **settings})
            weights = weights_of(MODELS[name])
            made[key] = ModelRunner.make(card, config, lambda dtype, _: weights.map(lambda tensor: tensor.to(dtype)))
            assert isinstance(made[key]._model, native.NativeDecoder) == (config.dtype == "bfloat16")
        return made[key]

    yield make
    torch.set_num_threads(1)


def pieces(runner: ModelRunner, seed: int) -> list[SequenceSlice]:
    """One whole sequence of each length, on blocks that are scattered differently in each group."""
    tables = random.Random(seed)
    free = [tables.sample(range(runner.kv.num_blocks), runner.kv.num_blocks) for _ in runner.kv.spec.groups]
    made = []
    for i, length in enumerate(LENGTHS):
        own = tuple(tuple(BlockId(blocks.pop()) for _ in range(-(-length // SIZE))) for blocks in free)
        made.append(SequenceSlice(SeqId(i), 0, tuple(ids_of(length)), own, ()))
    return made


def cut(piece: SequenceSlice, start: int, end: int) -> SequenceSlice:
    return piece._replace(start=start, token_ids=piece.token_ids[start:end])


def steps(runner: ModelRunner) -> tuple[StepPlan, StepPlan]:
    """Return the step of all prompts but for their last tokens, and that of these tokens."""
    whole = pieces(runner, seed=1)
    prompts = [cut(one, 0, len(one.token_ids) - 1) for one in whole if len(one.token_ids) > 1]
    decodes = [cut(one, len(one.token_ids) - 1, len(one.token_ids)) for one in whole]
    return StepPlan(tuple(prompts)), StepPlan(tuple(decodes))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def error_of_rows(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of the worst row of all but one in five. Rounding decides between two experts of nearly equal scores, and then
    a row is another one."""
    rows = (found - expected).square().mean(1).sqrt() / expected.square().mean().sqrt()
    return float(rows.sort().values[max(0, int(0.8 * len(rows)) - 1)])


NUMBERS = {"nan": float("nan"), "inf": float("inf"), "minus inf": float("-inf")}
PLANES = [("qwen2", 0), ("qwen2", 1), ("all", 0), ("all", 1), ("latent", 0), ("latent_wide", 0)]
PARTS = [(name, plane, kv_cache_dtype, None) for name, plane in PLANES for kv_cache_dtype in ("bf16", "fp32")]
PARTS += [
    (name, plane, "bf16", quantization) for name in ("all", "mixed") for plane in (0, 1) for quantization in ("int8", "int4")
]


@COMPILED
@pytest.mark.quick(
    "2-nan-qwen2-0-bf16-None", "300-inf-latent-0-fp32-None", "2-minus inf-all-0-bf16-None", "300-nan-all-1-bf16-int8"
)
@pytest.mark.parametrize(("name", "plane", "kv_cache_dtype", "quantization"), PARTS)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("position", [2, 300])
def test_one_key_or_value_that_is_no_number_costs_its_own_sequence_alone(
    make, name, plane, number, kv_cache_dtype, quantization, position
):
    """A key that was no number got weight 0, and a token was drawn as if nothing had been wrong.

    Plane 0 has keys, 1 values. The position lies in an early chunk of attention or in the last one. One number is overwritten.
    """
    runner = make(name, kv_cache_dtype=kv_cache_dtype, quantization=quantization, threads=2)
    prompts, decodes = steps(runner)
    runner.logits(prompts)
    clean = runner.logits(decodes)
    ill = next(i for i, one in enumerate(decodes.slices) if one.start == 329)
    block = decodes.slices[ill].block_tables[-1][position // SIZE]
    place = runner.kv.caches[-1].tensor[block, 0, plane, 0, position % SIZE, 5:6]
    kept = place.clone()
    place.fill_(NUMBERS[number])
    try:
        found = runner.logits(decodes)
    finally:
        place.copy_(kept)
    assert not found[ill].isfinite().any()
    others = [i for i in range(len(LENGTHS)) if i != ill]
    assert torch.equal(found[others], clean[others])


@COMPILED
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8", "fp8_e4m3", "int4"])
def test_a_token_that_is_no_number_makes_later_ones_so_in_every_format_of_kv(make, tiny_dir, kv_cache_dtype):
    """An integer cannot tell that a key was no number, so the scale of its block does. It was rounded to a finite key."""
    spec = replace(MODELS["all"], tied_head=False)
    weights = weights_of(spec)
    weights.embedding[7] = float("nan")
    card = replace(ModelCard.load(tiny_dir), spec=spec)
    config = EngineConfig(
        kv_cache_memory=8 * MIB, max_model_len=640, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, threads=1
    )
    runner = ModelRunner.make(card, config, lambda dtype, _: weights.map(lambda tensor: tensor.to(dtype)))
    ill, well = [1, 2, 3, 7, *range(8, 28)], [1, 2, 3, 4, *range(8, 28)]
    tables = [tuple((BlockId(2 * i), BlockId(2 * i + 1)) for _ in runner.kv.spec.groups) for i in range(2)]
    prompts = [SequenceSlice(SeqId(i), 0, tuple(ids), tables[i], ()) for i, ids in enumerate((ill, well))]
    found = runner.logits(StepPlan(tuple(prompts))).isfinite()
    assert not found[3:24].any()
    assert found[24:].all()
    decodes = [SequenceSlice(SeqId(i), 24, (5,), tables[i], ()) for i in range(2)]
    assert runner.logits(StepPlan(tuple(decodes))).isfinite().all(1).tolist() == [False, True]


WAYS = [(name, "bf16", threads) for name in MODELS for threads in (1, 2)]
WAYS += [("all", kv_cache_dtype, 2) for kv_cache_dtype in ("int8", "fp8_e4m3", "int4")]
WAYS += [
    ("latent_wide", kv_cache_dtype, threads) for kv_cache_dtype in ("fp32", "int8", "fp8_e4m3", "int4") for threads in (1, 2)
]


@COMPILED
@pytest.mark.quick("*-2", "all-bf16-1")
@pytest.mark.parametrize(("name", "kv_cache_dtype", "threads"), WAYS)
def test_prefill_and_decode_equal_the_references_up_to_rounding(make, name, kv_cache_dtype, threads):
    """(1) Prompts of uneven lengths together, all but their last token. (2) That token of all of them: decodes."""
    runner = make(name, kv_cache_dtype=kv_cache_dtype, threads=threads)
    prompts, decodes = steps(runner)
    measure = error_of_rows if name in MIXTURES else error
    found = runner.logits(prompts)
    assert measure(found, torch.cat([rows[:-1] for rows in reference(name)])) < ROUNDING[kv_cache_dtype]
    assert measure(runner.logits(decodes), torch.stack([rows[-1] for rows in reference(name)])) < ROUNDING[kv_cache_dtype]


@COMPILED
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "int4"])
def test_quantised_kv_of_mixed_layers_is_what_torch_stores_and_reads(make, kv_cache_dtype, threads):
    """The reference has no such KV; over five layers its rounding alone is as large as a mistake."""
    exact = make("mixed", dtype="float32", kv_cache_dtype=kv_cache_dtype, threads=1)
    compiled = make("mixed", kv_cache_dtype=kv_cache_dtype, threads=threads)
    assert len(compiled.kv.caches) == 3
    for plan in steps(compiled):
        assert error(compiled.logits(plan), exact.logits(plan)) < ROUNDING[kv_cache_dtype]


QUANTISED = ("all", "mixed", "ties", "latent_all", "latent_moe")
CHANGES = {
    "mixed": [{"rope": RopeSpec(10000.0)}, {"rope": RopeSpec(500.0)}],
    "qwen2": [{"bias": False}],
    "qwen3": [{"qk_norm": None}, {"qk_norm": NormSpec(1e-6)}],
    "mistral": [{"window": 8}, {"window": 2}, {"window": None}],
    "phi": [{"out_bias": False}, {"bias": False}, {"rope": RopeSpec(500.0)}, {"rope": RopeSpec(500.0, dim=24)}],
    "latent": [
        {"norm": NormSpec(1e-6)},
        {"scale": None},
        {"rope": RopeSpec(500.0)},
        {"rope": RopeSpec(10000.0, neighbours=True)},
    ],
    "latent_ranked": [{"norm": NormSpec(1e-6)}, {"rope": RopeSpec(500.0, neighbours=True)}],
    "gemma3": [{"softcap": None}, {"scale": None}, {"qk_norm": NormSpec(1e-6)}, {"window": None}, {"rope": RopeSpec(10000.0)}],
}


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, changes in CHANGES.items() for change in changes])
def test_a_model_without_one_feature_of_attention_has_other_logits(name, change):
    """The comparison above would see it. The window of one layer in three is the smallest of the differences."""
    spec = MODELS[name]
    layers = tuple(replace(layer, attention=replace(layer.attention, **change)) for layer in spec.layers)
    changed = spec_logits(replace(spec, layers=layers), weights_of(spec), ids_of(90)).float()
    assert error(changed, reference(name)[2]) > 2 * ROUNDING["bf16"]


@pytest.mark.parametrize("change", [{"norms": NormSpec(1e-6)}, {"post_norms": False}, {"mlp": DenseSpec(112)}])
def test_layers_without_one_feature_have_other_logits(change):
    spec = MODELS["gemma3"]
    layers = tuple(replace(layer, **change) for layer in spec.layers)
    changed = spec_logits(replace(spec, layers=layers), weights_of(spec), ids_of(90)).float()
    assert error(changed, reference("gemma3")[2]) > 2 * ROUNDING["bf16"]


@pytest.mark.parametrize("change", [{"norm": NormSpec(1e-6)}, {"embedding_scale": 1.0}, {"softcap": None}])
def test_a_model_without_one_feature_has_other_logits(change):
    spec = MODELS["gemma3"]
    changed = spec_logits(replace(spec, **change), weights_of(spec), ids_of(90)).float()
    assert error(changed, reference("gemma3")[2]) > 2 * ROUNDING["bf16"]


MOE_CHANGES = {
    "mixtral": [{"renormalise": False}, {"experts_per_token": 1}, {"scale": 1.5}, {"score": "sigmoid"}],
    "qwen2_moe": [{"renormalise": True}, {"shared_gate": False}],
    "deepseek2": [{"groups": 1, "top_groups": 1}, {"group_score": "best_two"}, {"scale": 1.0}],
    "deepseek3": [{"score": "softmax"}, {"correction_bias": False}, {"group_score": "best"}],
}


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, changes in MOE_CHANGES.items() for change in changes])
def test_a_mixture_without_one_feature_has_other_logits(name, change):
    spec = MODELS[name]
    layers = tuple(replace(layer, mlp=replace(layer.mlp, **change)) for layer in spec.layers)
    changed = spec_logits(replace(spec, layers=layers), weights_of(spec), ids_of(90)).float()
    assert error_of_rows(changed, reference(name)[2]) > 2 * ROUNDING["bf16"]


@COMPILED
@pytest.mark.quick("*-None", "all-int8", "latent_moe-int4")
@pytest.mark.parametrize(
    ("name", "quantization"),
    [*((name, None) for name in MODELS), *((name, bits) for name in QUANTISED for bits in ("int8", "int4"))],
)
def test_company_chunks_and_threads_change_no_bit(make, name, quantization):
    """(1) All sequences whole in one step of two threads, which share rows. (2) Each alone with one thread: token by token at
    its beginning and around 256 positions, in chunks of uneven sizes elsewhere."""
    together, alone = (make(name, quantization=quantization, threads=threads) for threads in (2, 1))
    expected = together.logits(StepPlan(tuple(pieces(together, seed=2))))
    found = []
    for one in pieces(alone, seed=3):
        cuts = sorted({*range(40), 77, 100, *range(240, 262), 290, 333, 599, len(one.token_ids)})
        cuts = [at for at in cuts if at <= len(one.token_ids)]
        for start, end in pairwise(cuts):
            found.append(alone.logits(StepPlan((cut(one, start, end),))))
    assert torch.equal(torch.cat(found), expected)


@COMPILED
def test_tokens_are_counted_at_their_experts(make):
    """Each token of a step counts at as many experts as it chooses, in every layer."""
    runner = make("ties", threads=2)
    before = runner._model.expert_counts()
    runner.logits(StepPlan(tuple(pieces(runner, seed=5))))
    after = runner._model.expert_counts()
    assert [layer for layer, _ in after] == [0, 1]
    for (_, old), (_, new) in zip(before, after, strict=True):
        counts = [b - a for a, b in zip(old, new, strict=True)]
        assert sum(counts) == 3 * sum(LENGTHS)
        assert all(low >= high for low, high in zip(counts[::2], counts[1::2], strict=True))  # a tie goes to the lowest


@COMPILED
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8"])
def test_only_the_blocks_of_the_window_are_read(make, kv_cache_dtype, threads):
    """(1) A prompt is computed. (2) Blocks behind the window become numbers that are none, and leave the tables: the last
    tokens, as a chunk and as decodes, have the same bits."""
    runner = make("mistral", kv_cache_dtype=kv_cache_dtype, threads=threads)
    pools, windows = runner.kv.caches, [group.window for group in runner.kv.spec.groups]
    assert windows == [7, 1, 300]
    whole = pieces(runner, seed=4)[-1]
    tokens = len(whole.token_ids)
    start = tokens - 3
    runner.logits(StepPlan((cut(whole, 0, start),)))
    written = [pool.blocks.clone() for pool in pools]
    tables = []
    for window, table in zip(windows, whole.block_tables, strict=True):
        first = (start - window + 1) // SIZE
        tables.append((*(BlockId(-1) for _ in range(first)), *table[first:]))
    cropped = whole._replace(block_tables=tuple(tables))
    for steps in ([(start, tokens)], [(at, at + 1) for at in range(start, tokens)]):
        for pool, saved in zip(pools, written, strict=True):
            pool.blocks.copy_(saved)
        expected = [runner.logits(StepPlan((cut(whole, *step),))) for step in steps]
        for pool, saved, table in zip(pools, written, tables, strict=True):
            pool.blocks.fill_(0xFF)
            held = [block for block in table if block >= 0]
            pool.blocks[held] = saved[held]
        found = [runner.logits(StepPlan((cut(cropped, *step),))) for step in steps]
        assert torch.equal(torch.cat(found), torch.cat(expected))
    for pool in pools:
        pool.blocks.zero_()


@COMPILED
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8"])
def test_latent_attention_reads_only_what_its_sequences_stored(make, kv_cache_dtype, threads):
    """(1) Prompts and decodes in a pool of zeros, (2) in a pool of numbers that are none."""
    runner = make("latent_all", kv_cache_dtype=kv_cache_dtype, threads=threads)
    whole = pieces(runner, seed=6)
    found = []
    for fill in (0, 0xFF):
        runner.kv.caches[0].blocks.fill_(fill)
        for begin, end in ((0, -2), (-2, -1), (-1, None)):
            cuts = [(one, *slice(begin, end).indices(len(one.token_ids))[:2]) for one in whole if len(one.token_ids) > 2]
            found.append(runner.logits(StepPlan(tuple(cut(*one) for one in cuts))))
    runner.kv.caches[0].blocks.zero_()
    assert all(map(torch.equal, found[:3], found[3:]))
    assert not torch.cat(found).isnan().any()


@COMPILED
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rank_that_weights_of_fewer_bits_do_not_allow_is_refused(tiny_dir, quantization):
    spec = MODELS["latent_all"]
    attention = replace(spec.layers[0].attention, q_rank=96)
    spec = replace(spec, layers=tuple(replace(layer, attention=attention) for layer in spec.layers))
    config = EngineConfig(kv_cache_memory=8 * MIB, max_model_len=640, dtype="bfloat16", quantization=quantization)
    with pytest.raises(ConfigError, match="multiples of 64"):
        ModelRunner.make(replace(ModelCard.load(tiny_dir), spec=spec), config, lambda dtype, _: weights_of(spec))


LATENT = MlaSpec(heads=4, kv_rank=32, nope_dim=16, rope_dim=16, v_dim=16, rope=RopeSpec(10000.0), norm=NormSpec(1e-6))
BASE = heads(4, 2, 32)
FIT = "compiled steps need widths that are multiples of 16"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (model(replace(BASE, rope=RopeSpec(10000.0, neighbours=True))), "compiled steps do not compute rope of neighbours"),
        (model(replace(BASE, v_dim=16)), "compiled steps do not compute a v_dim other than qk_dim"),
        (model(BASE, replace(BASE, heads=2)), f"compiled steps do not compute {UNEQUAL_HEADS}"),
        (model(LATENT, replace(LATENT, kv_rank=16, rope_dim=32)), f"compiled steps do not compute {native.UNEQUAL_LATENTS}"),
        (model(BASE, mlp=MoeSpec(4, 2, 24)), FIT),
        (model(BASE, mlp=MoeSpec(4, 2, 64, shared=8)), FIT),
        (model(heads(4, 2, 24, **GEMMA)), FIT),
        *((model(replace(LATENT, **{width: 24})), FIT) for width in ("kv_rank", "q_rank", "nope_dim", "rope_dim", "v_dim")),
        (model(heads(1, 1, 656)), "compiled steps need heads of at most 640"),
        (model(replace(LATENT, kv_rank=624, rope_dim=32)), "compiled steps need heads of at most 640"),
        (model(BASE, mlp=DenseSpec(104)), FIT),
    ],
)
def test_what_is_not_compiled_is_refused_by_name(spec, name):
    kv = KvPool(model(BASE).kv_spec(SIZE, "bfloat16"), MIB, torch.device("cpu"))
    assert native.obstacle(spec, kv) == name


def test_a_dtype_of_kv_that_compiled_code_does_not_store_is_named(monkeypatch):
    kv = KvPool(model(BASE).kv_spec(SIZE, "int8"), MIB, torch.device("cpu"), torch.bfloat16)
    assert native.obstacle(model(BASE), kv) != "compiled steps do not store KV in int8"
    monkeypatch.delitem(native.KV_FORMATS, "int8")
    assert native.obstacle(model(BASE), kv) == "compiled steps do not store KV in int8"


@COMPILED
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("start", [512, 600])
def test_no_block_behind_a_window_is_read(make, name, start):
    """Their entries are null, and the blocks hold NaN."""
    runner = make(name)
    whole = pieces(runner, seed=4)[-1]
    runner.logits(StepPlan((cut(whole, 0, start),)))
    expected = runner.logits(StepPlan((cut(whole, start, len(whole.token_ids)),)))
    tables = []
    for held, table in zip(runner.kv.caches, whole.block_tables, strict=True):
        dead = held.layout.first_live(start)
        held.blocks[list(table[:dead])] = 0xFF
        tables.append((NULL_BLOCK,) * dead + table[dead:])
    found = runner.logits(StepPlan((cut(whole._replace(block_tables=tuple(tables)), start, len(whole.token_ids)),)))
    for held, table in zip(runner.kv.caches, whole.block_tables, strict=True):
        held.blocks[list(table[: held.layout.first_live(start)])] = 0
    assert torch.equal(found, expected)
