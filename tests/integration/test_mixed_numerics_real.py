"""A cluster whose workers compute other bits says so, for each request by its own workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from real_service import APART, GREEDY

from pdserve.config import MIB, EngineConfig
from testkit.client import generate_all, request
from testkit.processes import Place, ProcessCluster

PROMPTS = [[10 + (7 * i + 3 * j) % 200 for j in range(20 + i)] for i in range(12)]


@pytest.mark.slow
@pytest.mark.cluster
def test_answers_of_workers_with_other_bits_are_not_called_exact() -> None:
    """decode-1 computes in float32, and stores KV as the others do: nothing but the bits that it computes tells."""
    engine = EngineConfig(model="tiny", batch_invariant=True, kv_cache_memory=16 * MIB, threads=1)
    other = Place(worker={"engine": replace(engine, dtype="float32", kv_cache_dtype="bf16")})
    with ProcessCluster(engine, decode=2, places={"decode-1": other}) as cluster:
        assert not cluster.state().exact
        answers = generate_all(cluster.grpc, [request(ids, APART, max_tokens=8, **GREEDY) for ids in PROMPTS], 4)
        exact = {(answer.report.decode_worker, answer.report.exact) for answer in answers}
        assert exact == {("decode-0", True), ("decode-1", False)}
        cluster.processes["decode-1"].kill()
        cluster.wait_state(lambda state: len(state.workers) == 2)
        assert cluster.state().exact


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.skipif("avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="this CPU lacks avx512_bf16")
@pytest.mark.parametrize(("isa", "exact"), [("avx2", True), ("amx_emulated", False)])
def test_another_instruction_set_is_exact_where_its_bits_are_equal(isa: str, exact: bool) -> None:
    engine = EngineConfig(model="tiny", dtype="bfloat16", kv_cache_memory=16 * MIB, threads=1)
    forced = {name: Place(env={"PDSERVE_ISA": "avx512_bf16"}) for name in ("prefill-0", "decode-0")}
    with ProcessCluster(engine, decode=2, places={**forced, "decode-1": Place(env={"PDSERVE_ISA": isa})}) as cluster:
        assert {worker.hello.worker_id: worker.hello.isa for worker in cluster.state().workers}["decode-1"] == isa
        assert cluster.state().exact == exact
        answers = generate_all(cluster.grpc, [request(ids, APART, max_tokens=8, **GREEDY) for ids in PROMPTS], 4)
        assert {(answer.report.decode_worker, answer.report.exact) for answer in answers} == {
            ("decode-0", True),
            ("decode-1", exact),
        }
