"""The compiled kernels of each instruction set, by either compiler: which have the same bits. What a CPU lacks is named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from native_builds import NATIVE, ONE_CLASS, build, compiler, installed_set

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.step_plan import StepPlan
from pdserve.engine.loading.load import load_weights
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.weights import ModelWeights
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner

pytestmark = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")

WAYS = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}]


def as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def logits_of(tiny_dir, make_sheets, way, change=as_it_is) -> list[torch.Tensor]:
    """A prompt in two chunks beside another, then a decode of both. `change` is of each weight."""
    config = EngineConfig(kv_cache_memory=8 * MIB, dtype="bfloat16", threads=2, max_model_len=512, **way)
    card = ModelCard.load(tiny_dir)

    def read(dtype: torch.dtype, device: torch.device) -> ModelWeights:
        return load_weights(tiny_dir, card, dtype, device).map(change)

    runner = ModelRunner.make(card, config, read)
    assert isinstance(runner._model, native.NativeDecoder)
    long, short = make_sheets(runner, [300, 41], random.Random(3))
    steps = [
        StepPlan((long.piece(0, 170), short.piece(0, 40))),
        StepPlan((long.piece(170, 299),)),
        StepPlan((long.piece(299, 300), short.piece(40, 41))),
    ]
    return [runner.logits(step) for step in steps]


@pytest.mark.parametrize("isa", ONE_CLASS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_set_gives_the_same_bits(isa, way, tiny_dir, make_sheets, monkeypatch):
    """So workers on a laptop and on a server agree in every token."""
    found = installed_set(isa)
    monkeypatch.setattr(library, "load", lambda: installed_set("avx2").library)
    expected = logits_of(tiny_dir, make_sheets, way)
    monkeypatch.setattr(library, "load", lambda: found.library)
    assert all(map(torch.equal, logits_of(tiny_dir, make_sheets, way), expected))


def with_tiny_rows(weight: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix become so small that they, their products or the sums of these are subnormal numbers."""
    if weight.dim() != 2:
        return weight
    smaller = [1.0, 2.0**-116, 1.0, 2.0**-122, 1.0, 2.0**-128, 2.0**-40]
    return weight * torch.tensor([smaller[row % len(smaller)] for row in range(len(weight))]).to(weight).unsqueeze(1)


@pytest.mark.parametrize("isa", ONE_CLASS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_subnormal_numbers_are_zero_in_every_set(isa, way, tiny_dir, make_sheets, monkeypatch):
    """The dot product of bfloat16 takes them as zero whatever the thread says; multiply-adds do so only when told."""
    found = installed_set(isa)
    monkeypatch.setattr(library, "load", lambda: installed_set("avx2").library)
    expected = logits_of(tiny_dir, make_sheets, way, with_tiny_rows)
    least = torch.finfo(torch.float32).tiny
    sizes = torch.cat([logits.abs().flatten() for logits in expected])
    assert ((least <= sizes) & (sizes < 16 * least)).sum() > 10
    assert not ((sizes > 0) & (sizes < least)).any()
    monkeypatch.setattr(library, "load", lambda: found.library)
    assert all(map(torch.equal, logits_of(tiny_dir, make_sheets, way, with_tiny_rows), expected))


@pytest.mark.parametrize("isa", library.SETS)
def test_a_set_is_forced_by_the_environment(isa, monkeypatch):
    wanted = installed_set(isa)
    monkeypatch.setenv("PDSERVE_ISA", isa)
    found = library.find.__wrapped__()
    assert (found.isa, found.why) == (isa, wanted.why)


def test_the_order_of_sets_is_that_of_a_vendors_cpus(monkeypatch):
    """The faster of two sets with equal bits. It never depends on a measurement, so a restart changes nothing."""
    monkeypatch.delenv("PDSERVE_ISA", raising=False)
    installed_set("avx512_bf16")
    monkeypatch.setattr(
        library, "open_library", lambda path, emulated: library.Found(object(), "", path.name.split(".")[0][9:])
    )
    for vendor, fastest in (
        ("GenuineIntel", ["amx", "avx512"]),
        ("AuthenticAMD", ["amx", "avx512_bf16"]),
        ("", ["amx", "avx512_bf16"]),
    ):
        assert list(library.order(vendor))[:2] == fastest
        assert sorted(library.order(vendor)) == sorted(library.SETS)
        monkeypatch.setattr(library, "_vendor", lambda vendor=vendor: vendor)
        monkeypatch.setattr(library, "installed", lambda name: None if name.endswith("_amx") else Path(f"{name}.so"))
        assert library.find.__wrapped__().isa == fastest[1]
    monkeypatch.undo()
    assert library._vendor() in Path("/proc/cpuinfo").read_text()


def test_no_set_means_torch_and_a_wrong_name_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv("PDSERVE_ISA", "none")
    assert library.find.__wrapped__() == library.Found(None, "PDSERVE_ISA is none")
    monkeypatch.setenv("PDSERVE_ISA", "sse9")
    with pytest.raises(
        ConfigError, match="PDSERVE_ISA must be one of amx, avx512_bf16, avx512, avx2, amx_emulated, none, got 'sse9'"
    ):
        library.find.__wrapped__()


def test_a_forced_set_that_does_not_run_here_is_refused(monkeypatch):
    monkeypatch.setenv("PDSERVE_ISA", "avx2")
    monkeypatch.setattr(library, "open_library", lambda path, emulated: library.Found(None, "this CPU lacks fma"))
    with pytest.raises(ConfigError, match="PDSERVE_ISA is avx2, and this CPU lacks fma"):
        library.find.__wrapped__()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["g++", "clang++"])
@pytest.mark.parametrize("isa", [*ONE_CLASS, library.EMULATED])
def test_either_compiler_builds_kernels_with_the_same_bits(isa, name, tmp_path, tiny_dir, make_sheets, monkeypatch):
    """clang ignores gcc's target pragma: with it, whoever has clang alone got no kernels."""
    installed = installed_set(isa)
    monkeypatch.setattr(library, "load", lambda: installed.library)
    expected = [logits_of(tiny_dir, make_sheets, way) for way in WAYS]
    built = build(compiler(name), tmp_path / "built.so", isa=isa.removesuffix("_emulated"))
    found = library.open_library(built, emulated=isa == library.EMULATED)
    assert found.library is not None, found.why
    assert {"g++": "gcc", "clang++": "clang"}[name] in found.why
    monkeypatch.setattr(library, "load", lambda: found.library)
    for way, logits in zip(WAYS, expected, strict=True):
        assert all(map(torch.equal, logits_of(tiny_dir, make_sheets, way), logits)), way


STUBS = """
#include "abi.h"
extern "C" {
void *pdserve_model_new(const PdShape *, const uint16_t *) { __builtin_trap(); }
void pdserve_model_free(void *) { __builtin_trap(); }
int pdserve_model_weight(
    void *, int64_t, int, int64_t, const uint16_t *, int64_t, int64_t, int64_t, int64_t, int) { __builtin_trap(); }
int pdserve_model_vector(void *, int64_t, int, const float *, int64_t) { __builtin_trap(); }
void pdserve_model_expert_counts(void *, int64_t, int64_t *) { __builtin_trap(); }
int pdserve_model_forward(void *, const PdStep *) { __builtin_trap(); }
int pdserve_model_sample(void *, int64_t, float *, const PdRow *, int64_t, int32_t *) { __builtin_trap(); }
int pdserve_model_settle(void *, const int32_t *) { __builtin_trap(); }
int pdserve_model_follow(void *, int64_t, PdGroup *) { __builtin_trap(); }
int64_t pdserve_gang_bytes(const PdGang *) { __builtin_trap(); }
float *pdserve_gang_logits(const PdGang *) { __builtin_trap(); }
void pdserve_gang_lose(const PdGang *) { __builtin_trap(); }
int64_t pdserve_products(int, int64_t) { __builtin_trap(); }
}
"""


@pytest.fixture
def of_cpu(tmp_path):
    """of_cpu(name, *flags): what is found in a library of cpu.cpp, compiled so, and of nothing else that may be called."""

    def found(name: str, *flags: str) -> library.Found:
        (tmp_path / "stubs.cpp").write_text(STUBS)
        sources = [str(tmp_path / "stubs.cpp"), str(NATIVE / "cpu.cpp")]
        return library.open_library(build(compiler("g++"), tmp_path / f"{name}.so", f"-I{NATIVE}", *flags, sources=sources))

    return found


def test_a_cpu_that_lacks_an_instruction_is_named_with_it(of_cpu):
    """The lack is planted: no such CPU runs these tests."""
    lacks = '-D__builtin_cpu_supports(name)=(__builtin_strcmp(name,"avx512bf16")!=0)'
    assert of_cpu("lacks", lacks) == library.Found(None, "this CPU lacks avx512_bf16")
    assert of_cpu("has").library is not None


def test_a_library_of_other_sources_is_not_called(of_cpu, monkeypatch):
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    found = of_cpu("other")
    assert found.library is None
    assert "another version" in found.why
