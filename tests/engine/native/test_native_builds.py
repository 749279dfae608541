"""The compiled kernels by either compiler: the same bits; and on a CPU that lacks an instruction: it is named."""

from __future__ import annotations

import random

import pytest
import torch
from native_builds import NATIVE, build, compiler

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.step_plan import StepPlan
from pdserve.engine.models import native_decoder as native
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner

pytestmark = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX-512 bf16")

WAYS = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}]


def logits_of(tiny_dir, make_sheets, way) -> list[torch.Tensor]:
    """A prompt in two chunks beside another, then a decode of both."""
    config = EngineConfig(kv_cache_memory=8 * MIB, dtype="bfloat16", threads=2, max_model_len=512, **way)
    runner = ModelRunner.load(tiny_dir, ModelCard.load(tiny_dir), config)
    assert isinstance(runner._model, native.NativeDecoder)
    long, short = make_sheets(runner, [300, 41], random.Random(3))
    steps = [
        StepPlan((long.piece(0, 170), short.piece(0, 40))),
        StepPlan((long.piece(170, 299),)),
        StepPlan((long.piece(299, 300), short.piece(40, 41))),
    ]
    return [runner.logits(step) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_either_compiler_builds_kernels_with_the_same_bits(name, tmp_path, tiny_dir, make_sheets, monkeypatch):
    """clang ignores gcc's target pragma: with it, whoever has clang alone got no kernels."""
    expected = [logits_of(tiny_dir, make_sheets, way) for way in WAYS]
    found = library.open_library(build(compiler(name), tmp_path / "built.so"))
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
int pdserve_model_weight(void *, int64_t, int, int64_t, const uint16_t *, int64_t, int64_t, int) { __builtin_trap(); }
int pdserve_model_vector(void *, int64_t, int, const float *, int64_t) { __builtin_trap(); }
void pdserve_model_expert_counts(void *, int64_t, int64_t *) { __builtin_trap(); }
int pdserve_model_forward(void *, const PdStep *) { __builtin_trap(); }
int pdserve_model_sample(void *, int64_t, float *, const PdRow *, int64_t, int32_t *) { __builtin_trap(); }
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
