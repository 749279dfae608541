"""KV crosses while prefill computes: real processes and NIXL, judged by what was read when, not by a clock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO

import pytest
from real_service import APART, BOUND_S, GREEDY, TOGETHER, long_stream, tiny
from rich.console import Console

from pdserve.client import AdminClient
from pdserve.commands import tables
from pdserve.rpc.v1 import common_pb2
from testkit.client import Answer, generate_all, request
from testkit.processes import ProcessCluster

pytestmark = pytest.mark.cluster

CHUNKS = 8
CHUNK = 192  # tokens a step
BLOCK = 16
STREAMED = 3
MOST_REQUESTS = 60
PULLED = re.compile(r"pulled lease \S+ blocks=(\d+) reads=(\d+) kv_bytes=(\d+) exposed_bytes=(\d+)")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(tiny(max_num_batched_tokens=CHUNK, block_size=BLOCK)) as running:
        yield running


def prompt(number: int) -> list[int]:
    """None begins like another, so that no block is a prefix hit."""
    return [(number * 29 + i * 7 + i // 250) % 250 for i in range(CHUNKS * CHUNK)]


def pulls(cluster: ProcessCluster, count: int) -> list[tuple[int, ...]]:
    """(blocks, reads, kv_bytes, exposed_bytes) of each handoff of eight chunks, as the decode worker logged them."""
    found: list[tuple[int, ...]] = []

    def logged(_: object) -> bool:
        numbers = [tuple(map(int, one)) for one in PULLED.findall(cluster.processes["decode-0"].log())]
        found[:] = [one for one in numbers if one[0] == CHUNKS * CHUNK // BLOCK]
        return len(found) >= count

    cluster.wait_state(logged, BOUND_S)
    return found


def is_streamed(pulled: tuple[int, ...]) -> bool:
    """No more than the last chunk was read after token 0 was known."""
    blocks, _, kv_bytes, exposed = pulled
    return exposed <= kv_bytes // CHUNKS + kv_bytes // blocks


def test_of_eight_chunks_about_one_is_exposed(cluster: ProcessCluster) -> None:
    """(1) Handoffs one by one, until in some of them all but the last chunk was here when token 0 was known. (2) In these,
    reading began before that, and token 0 did not wait for the commit.

    On a machine that is busy a single reader may be late by a chunk or more, whoever reads at the end is late every time.
    """
    answers: list[Answer] = []
    pulled: list[tuple[int, ...]] = []
    while sum(map(is_streamed, pulled)) < STREAMED:
        assert len(answers) < MOST_REQUESTS, pulled
        answers += generate_all(cluster.grpc, [request(prompt(len(answers)), APART, max_tokens=2, **GREEDY)])
        pulled = pulls(cluster, len(answers))
    show(answers, pulled)
    streamed = [(answer.report, one) for answer, one in zip(answers, pulled, strict=True) if is_streamed(one)]
    for report, (_, reads, _, _) in streamed:
        assert reads > 1
        assert report.transfer_s > report.exposed_transfer_s, "the first read was posted after token 0"
    # Two links have no mutual order, so a single request may hear of the commit first; token 0 never waits for it.
    assert any(report.ttft_s < report.kv_committed_s for report, _ in streamed)


@pytest.mark.slow
def test_a_streamed_handoff_changes_no_token(cluster: ProcessCluster) -> None:
    prompts = [prompt(100 + number)[: CHUNK * CHUNKS - 5 * number] for number in range(6)]
    outputs = []
    for placement in (APART, TOGETHER):
        messages = [request(one, placement, max_tokens=8, **GREEDY) for one in prompts]
        outputs.append([answer.ids for answer in generate_all(cluster.grpc, messages)])
    assert outputs[0] == outputs[1]


def test_a_budget_that_an_operator_sets_under_load_changes_no_token(cluster: ProcessCluster) -> None:
    """(1) The router shows the budget that workers have. (2) Prompts beside a stream have the same tokens. (3) It is undone."""
    prompts = [prompt(200 + number)[: CHUNK * 2] for number in range(2)]
    messages = [request(one, where, max_tokens=8, **GREEDY) for one in prompts for where in (APART, TOGETHER)]
    before = [answer.ids for answer in generate_all(cluster.grpc, messages)]
    with long_stream(cluster, TOGETHER) as stream, AdminClient(cluster.admin) as operator:
        stream.read(2)
        for tokens in (80, CHUNK):
            for role in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE):
                operator.set_budget((), role, tokens)
            cluster.wait_state(lambda state: {w.load.max_num_batched_tokens for w in state.workers} == {tokens}, BOUND_S)  # noqa: B023
            shown = Console(width=200, file=StringIO())
            shown.print(tables.status(operator.cluster_state(), 200))
            assert ("80 of 192" in shown.file.getvalue()) == (tokens == 80)
            assert [answer.ids for answer in generate_all(cluster.grpc, messages)] == before
        stream.cancel()


def show(answers: list[Answer], pulled: list[tuple[int, ...]]) -> None:
    for answer, (blocks, reads, kv_bytes, exposed) in zip(answers, pulled, strict=False):
        report = answer.report
        print(
            f"{blocks} blocks in {reads} reads; exposed {exposed / kv_bytes:.0%} of the bytes, "
            f"{1e3 * report.exposed_transfer_s:.1f} ms of {1e3 * report.transfer_s:.1f} ms of transfer; "
            f"prefill {1e3 * report.prefill_s:.1f} ms"
        )
