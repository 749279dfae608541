"""Gangs whose ranks have memory of their own, through real processes: each rank reads and lends its part of every block."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from real_service import APART, AUTO, TOGETHER
from test_gang_real import OUTPUT, Expected, batch, check_tokens, cluster_of, dense, kill_a_rank, ranks_of

from pdserve.client import AdminClient
from pdserve.config import EngineConfig
from pdserve.rpc.v1 import common_pb2
from testkit.client import generate_all, request
from testkit.processes import ProcessCluster
from tests.engine.engine_ways import COMPILED

pytestmark = [pytest.mark.cluster, pytest.mark.slow, COMPILED]
__all__ = ["dense"]

OWN = {"rank_collective": "gloo"}
TWO, FOUR, STAGES = ({**degrees, **OWN} for degrees in (
    {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
))  # fmt: skip


def exact(dense: EngineConfig) -> EngineConfig:
    return replace(dense, dtype="float32", batch_invariant=True)


def test_parts_of_blocks_pass_between_ranks_of_all_degrees(dense: EngineConfig) -> None:
    """Between one process, two and four ranks and stages, with checksums, which both sides compute from their own parts. The
    model has two KV heads, so two of four ranks have none."""
    engine = exact(dense)
    with cluster_of(engine, [TWO, {}, STAGES], [{}, TWO, FOUR]) as cluster:
        check_tokens(cluster, Expected(engine), APART, AUTO, TOGETHER)
        cluster.assert_empty()
        told = {name: "KV pool 16 MiB: " in cluster.processes[name].log() for name in cluster.worker_names}
        assert all(told.values()), told  # of all ranks, also where rank 0 has no part of it


def test_a_rank_that_dies_ends_its_worker_and_no_request(dense: EngineConfig) -> None:
    engine = exact(dense)
    expected = Expected(engine)
    with cluster_of(engine, [TWO, {}], [{}, STAGES]) as cluster:
        for name, number in (("prefill-0", signal.SIGKILL), ("decode-1", signal.SIGTERM), ("decode-1", signal.SIGKILL)):
            if number == signal.SIGTERM:
                for rank in ranks_of(cluster, name):
                    rank.send_signal(number)  # ranks end with their worker alone
                check_tokens(cluster, expected, APART)
            else:
                kill_a_rank(cluster, expected, name, number)
        check_tokens(cluster, expected, APART)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "int8"), ("int8", "int4"), ("int8", "int8")]
)
def test_kv_is_converted_by_each_rank_as_by_one_process(dense: EngineConfig, theirs: str, ours: str) -> None:
    """The tokens are those of a pair of single processes with the same dtypes."""
    engine = replace(dense, dtype="float32", threads=1, batch_invariant=None)

    def tokens(lender: dict[str, Any], reader: dict[str, Any]) -> list[list[int]]:
        prefill, decode = {**lender, "kv_cache_dtype": theirs}, {**reader, "kv_cache_dtype": ours}
        with cluster_of(engine, [prefill], [decode]) as cluster:
            return answers_of(cluster)

    assert len({len(ids) for ids in tokens({}, {})}) == 1
    assert tokens(TWO, STAGES) == tokens({}, {})


def answers_of(cluster: ProcessCluster) -> list[list[int]]:
    """The tokens of requests that run one after the other, since quantised blocks depend on how steps cut them."""
    prompts, ways = batch()
    asked = [request(p, APART, max_tokens=OUTPUT, ignore_eos=True, **way) for p, way in zip(prompts, ways, strict=True)]
    answers = generate_all(cluster.grpc, asked, concurrency=1)
    assert {answer.report.prefill_worker for answer in answers} == {"prefill-0"}
    cluster.assert_empty()
    return [answer.ids for answer in answers]


def test_a_gang_changes_its_pool_and_lends_what_it_read(dense: EngineConfig) -> None:
    """In a new life each rank has another id, under which its transport is made anew, and cached blocks have checksums."""
    engine = replace(exact(dense), **TWO)
    expected = Expected(exact(dense))
    with cluster_of(engine, [{}, {}], [{}, {}]) as cluster, AdminClient(cluster.admin) as admin:
        check_tokens(cluster, expected, APART)
        homes = {"prefill-1": common_pb2.ROLE_PREFILL, "decode-1": common_pb2.ROLE_DECODE}
        away = dict(zip(homes, reversed(homes.values()), strict=True))
        for roles in (away, homes):
            for name, role in roles.items():
                for _ in admin.flip(name, role, timeout_s=60.0):
                    pass
            cluster.wait_whole()
            check_tokens(cluster, expected, APART)
            assert {one.hello.worker_id: one.hello.role for one in cluster.state().workers}.items() >= roles.items()
        cluster.assert_empty()
