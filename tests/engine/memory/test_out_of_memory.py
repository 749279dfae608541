"""A step that gets no memory, which cannot happen once a worker has settled: planted by a limit on the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError, ErrorCode, OutOfMemory
from pdserve.engine.native import library
from pdserve.engine.warm_up import settle

STARVED = """
import resource, sys
from pathlib import Path
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import PdserveError
from pdserve.engine.warm_up import settle
from pdserve.engine.loading.digest import Adding
from pdserve.engine.memory.largest_steps import StepLimits, largest_steps
from pdserve.engine.runner import ModelRunner

Adding.add = lambda self, name, tensor: None  # else the threads that digest the file would leave memory to the step
directory = resolve("tiny")
config = EngineConfig(
    dtype=sys.argv[1], kv_cache_dtype=sys.argv[2], kv_cache_memory=16 * MIB, device="cpu", threads=2, max_num_seqs=8
)
runner = ModelRunner.load(directory, ModelCard.load(directory), config)
step = settle(runner, config).step_bytes
kept = sys.argv[1] == "bfloat16"  # by the compiled code; torch gives all back
wide = largest_steps(StepLimits(64, 16, 64, 60_000, 1000), gathered=0, decode_batches=())[0]

fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
size = int(fields["VmSize"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + (MIB if kept else step + 32 * MIB), resource.RLIM_INFINITY))
for plan in runner.largest_steps(config) * 3:
    runner.execute(plan)
print("settled steps run")
try:
    runner.execute(wide)
except PdserveError as exc:
    print(type(exc).__name__, exc.message)
for plan in runner.largest_steps(config):
    runner.execute(plan)
print("smaller steps run")
"""


@pytest.mark.quick("bfloat16-auto")
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", "auto"), pytest.param("bfloat16", "int8", marks=pytest.mark.slow), ("float32", "auto")]
)
def test_settled_steps_need_no_more_memory_and_a_larger_one_is_a_typed_failure(dtype: str, kv_dtype: str) -> None:
    if dtype == "bfloat16" and library.load() is None:
        pytest.skip("without the compiled code the same path is float32's")
    done = subprocess.run(
        [sys.executable, "-c", STARVED, dtype, kv_dtype], capture_output=True, text=True, timeout=120, check=False,
        cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "settled steps run", done.stderr
    assert lines[1] == "OutOfMemory a step of 60000 tokens of 64 sequences got no memory"
    assert lines[2:] == ["smaller steps run"], done.stderr
    assert done.returncode == 0


DRAFTED = """
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig, SpeculativeConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.step_plan import GREEDY, SequenceSlice, StepPlan
from pdserve.engine.memory.host import resident_bytes
from pdserve.engine.runner import ModelRunner
from pdserve.engine.warm_up import settle

ROWS = 8192
directory = resolve("tiny")
config = EngineConfig(
    dtype="bfloat16", kv_cache_dtype="int8", kv_cache_memory=16 * MIB, device="cpu", threads=1, max_num_seqs=ROWS,
    max_num_batched_tokens=ROWS, speculative_config=SpeculativeConfig("ngram"),
)
runner = ModelRunner.load(directory, ModelCard.load(directory), config)
settle(runner, config)
assert ROWS * runner.kv.caches[0].layout.block_bytes > 32 * MIB
before = resident_bytes()
tables = [tuple(BlockId(8 * i + j) for j in range(8)) for i in range(ROWS // 128)]
plan = StepPlan(tuple(SequenceSlice(SeqId(i), 0, (7,) * 128, (table,), (GREEDY,) * 128) for i, table in enumerate(tables)))
assert len(runner.execute(plan)) == ROWS
print((resident_bytes() - before) // MIB)
"""


@pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")
def test_settled_memory_holds_the_copies_of_blocks_that_drafts_change() -> None:
    """8,192 rows copy 32 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", DRAFTED], capture_output=True, text=True, timeout=120, check=False,
        cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8


def test_it_is_our_bug_that_a_step_gets_no_memory_and_a_setting_before_the_first() -> None:
    assert OutOfMemory("").code is ErrorCode.INTERNAL_BUG


def test_a_worker_whose_largest_step_fits_nowhere_says_what_to_lower(make_runner, monkeypatch) -> None:
    runner = make_runner()

    def execute(plan: object) -> None:
        raise OutOfMemory("planted")

    monkeypatch.setattr(runner, "execute", execute)
    with pytest.raises(ConfigError, match="lower max_num_batched_tokens"):
        settle(runner, EngineConfig(model="tiny", device="cpu"))
