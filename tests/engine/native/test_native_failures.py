"""Compiled code that gets no memory or no thread, and a thread of it that throws: an error, and a model that goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from native_builds import NATIVE, ROOT, compiler

from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError, ErrorCode, OutOfThreads
from pdserve.engine.native import library
from pdserve.engine.warm_up import settle

COMPILED = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")

STARVED = """
import resource, sys
from pathlib import Path
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import OutOfMemory, OutOfThreads
from pdserve.engine.loading.digest import Adding
from pdserve.engine.memory.largest_steps import StepLimits, largest_steps
from pdserve.engine.runner import ModelRunner

Adding.add = lambda self, name, tensor: None  # else the threads that digest the file would leave memory to the step
directory = resolve("tiny")
quantization = None if sys.argv[1] == "none" else sys.argv[1]
config = EngineConfig(dtype="bfloat16", quantization=quantization, kv_cache_memory=16 * MIB, device="cpu", threads=2)
runner = ModelRunner.load(directory, ModelCard.load(directory), config)
plan = largest_steps(StepLimits(64, 16, 64, 6_000, 1000), gathered=0, decode_batches=())[0]

def allow(room):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resource.setrlimit(resource.RLIMIT_AS, (int(fields["VmSize"].split()[0]) * 1024 + room, resource.RLIM_INFINITY))

for room in range(0, 64 * MIB, MIB // 2):
    allow(room)
    try:
        runner.execute(plan)
        print("done")
        break
    except (OutOfMemory, OutOfThreads) as exc:
        print(type(exc).__name__)
runner.execute(plan)
print("again")
"""


@pytest.mark.quick("none")
@COMPILED
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_whatever_a_first_step_lacks_is_an_error_and_the_next_step_runs(quantization: str) -> None:
    """Room for nothing, then a little more each time until a step goes well: memory is short first, and then there is none
    for a thread's stack. Without a word for that the process ended by a signal."""
    done = subprocess.run(
        [sys.executable, "-c", STARVED, quantization], capture_output=True, text=True, timeout=400, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split()
    assert said[-2:] == ["done", "again"]
    assert list(dict.fromkeys(said[:-2])) == ["OutOfMemory", "OutOfThreads"]


@pytest.fixture(scope="module")
def pool_check(tmp_path_factory) -> Path:
    """A program around pool.h that tries out what it is asked to and says what was wrong."""
    program = tmp_path_factory.mktemp("pool") / "pool_check"
    source = Path(__file__).parent / "pool_check.cpp"
    build = [compiler("g++"), "-std=c++20", "-O1", "-pthread", f"-I{NATIVE}", str(source), "-o", str(program)]
    subprocess.run(build, check=True, timeout=400)
    return program


@pytest.mark.parametrize("what", ["throwing", "standing still", "coming late"])
def test_threads_that_throw_stand_still_or_come_late_hold_nobody_up(pool_check: Path, what: str) -> None:
    """What a thread throws reaches the caller, and the pool goes on: it ended the process, or left the others waiting. One
    that stands still holds up the piece that it has and nothing else, one that comes late nothing: each phase had a barrier
    for all."""
    done = subprocess.run([pool_check, what], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"{what}\n"), done.stderr


def test_a_worker_that_gets_no_thread_says_what_to_raise(make_runner, monkeypatch) -> None:
    runner = make_runner()

    def execute(plan: object) -> None:
        raise OutOfThreads("planted")

    monkeypatch.setattr(runner, "execute", execute)
    with pytest.raises(ConfigError, match=r"lower threads \(2\), or raise its limits of processes"):
        settle(runner, EngineConfig(model="tiny", device="cpu", threads=2))
    assert OutOfThreads("").code is ErrorCode.INTERNAL_BUG
