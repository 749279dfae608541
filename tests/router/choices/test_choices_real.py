"""Choices of one prompt between real processes: each equals the request with its seed alone, whatever dies on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.config import MIB, EngineConfig, WorkerConfig
from pdserve.core.report import Report
from pdserve.core.sampling import Placement, TokenLogprobs
from pdserve.core.worker import Role
from router.api.request import GenerateInput
from testkit.processes import Process

from ..local_cluster import TOKEN, LocalCluster, local_cluster

pytestmark = pytest.mark.cluster

N, SEED, BLOCK = 4, 40, 16
PROMPT = tuple(random.Random(57).randrange(250) for _ in range(100))
SHARED = len(PROMPT) // BLOCK * BLOCK
BOUND_S = 60.0  # only what hangs should fail
ENGINE = EngineConfig(
    model="tiny",
    dtype="float32",
    batch_invariant=True,
    block_size=BLOCK,
    max_model_len=256,
    kv_cache_memory=16 * MIB,
    threads=1,
)
WORKERS = ("prefill-0", "decode-0", "decode-1")


@dataclass
class Choice:
    """All that one request gave."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    report: Report | None = None

    @property
    def output(self) -> tuple[list[int], str, list[TokenLogprobs]]:
        return self.ids, self.text, self.logprobs


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[LocalCluster, dict[str, Process]]]:
    """A router in this process, and one prefill and two decode workers in theirs."""
    async with local_cluster((), heartbeat_interval_s=0.05, heartbeat_lost_s=2.0) as cluster:
        made = {
            name: Process(
                f"{name.partition('-')[0]}_worker",
                WorkerConfig(
                    name, cluster.link_address, cluster_token=TOKEN, engine=ENGINE, heartbeat_interval_s=0.05, router_lost_s=5.0
                ),
                folder,
                name,
            )
            for name in WORKERS
        }
        try:
            for process in made.values():
                await asyncio.to_thread(process.wait_ready)
            await until(lambda: sum(w.load.blocks.total > 0 for w in cluster.service.snapshot().workers) == len(WORKERS))
            await until(lambda: cluster.service._core.prefix_index.block_size is not None)
            yield cluster, made
        finally:
            for process in made.values():
                await asyncio.to_thread(process.stop)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not done():  # noqa: ASYNC110 - what workers tell raises no event here
            await asyncio.sleep(0.02)


async def ask(cluster: LocalCluster, index: int, into: Choice, *, tokens: int, leader: str = "", salt: str = "") -> str:
    """Submit choice `index`, read it in the background, and return its id."""
    generation = await cluster.service.submit(
        GenerateInput(
            PROMPT,
            {"seed": SEED + index, "max_tokens": tokens, "logprobs": 2, "ignore_eos": True},
            options={"cache_salt": salt},
            placement=Placement.DISAGGREGATED,
            leader=leader,
        )
    )

    async def read() -> None:
        try:
            async for delta in generation:
                into.ids += delta.ids
                into.text += delta.text
                into.logprobs += delta.logprobs
            into.report = generation.report
        finally:
            generation.close()

    reading.append(asyncio.create_task(read()))
    return generation.request_id


reading: list[asyncio.Task[None]] = []


async def finish() -> None:
    tasks, reading[:] = list(reading), []
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*tasks)


async def alone(cluster: LocalCluster, tokens: int) -> list[Choice]:
    """The same requests one after the other, each under a salt of its own, so that they share nothing."""
    choices = [Choice() for _ in range(N)]
    for i, choice in enumerate(choices):
        await ask(cluster, i, choice, tokens=tokens, salt=f"alone {i}")
        await finish()
    return choices


async def group(cluster: LocalCluster, tokens: int) -> list[Choice]:
    choices = [Choice() for _ in range(N)]
    leader = await ask(cluster, 0, choices[0], tokens=tokens)
    for i in range(1, N):
        await ask(cluster, i, choices[i], tokens=tokens, leader=leader)
    return choices


def hits(cluster: LocalCluster) -> int:
    return sum(w.load.prefix_hit_tokens for w in cluster.service.snapshot().workers if w.hello.role is Role.DECODE)


async def wait_empty(cluster: LocalCluster, workers: int) -> None:
    """Nothing is left in the router, and every block of every worker that lives is free or cached."""

    def is_empty() -> bool:
        state = cluster.service.snapshot()
        blocks = [w.load.blocks for w in state.workers]
        return len(blocks) == workers and all(b.free + b.cached == b.total for b in blocks) and not state.running_requests

    await until(is_empty)
    core = cluster.service._core
    core.check_invariants()
    assert (core.num_requests, len(core.ledger), len(core.waiting)) == (0, 0, 0)
    assert not cluster.service._admitted


@pytest.mark.slow  # short: test_beams_real.py has real choices, test_siblings.py has what they share
def test_choices_share_the_prompt_and_equal_single_requests_also_when_their_worker_dies(tmp_path: Path) -> None:
    """(1) Four choices equal the requests alone, and three of them compute no full block. (2) Four longer ones decode on one
    worker, which dies: each is replayed, and equal."""

    async def story() -> None:
        async with served(tmp_path) as (cluster, processes):
            await share(cluster)
            await survive(cluster, processes)

    asyncio.run(story())


async def share(cluster: LocalCluster) -> None:
    single = await alone(cluster, 24)
    before = hits(cluster)
    choices = await group(cluster, 24)
    await finish()
    assert [choice.output for choice in choices] == [one.output for one in single]
    leader, *siblings = [choice.report for choice in choices]
    assert leader is not None
    assert leader.placement is Placement.DISAGGREGATED
    assert leader.kv_bytes > 0
    for report in siblings:
        assert report is not None
        assert (report.placement, report.placement_reason, report.kv_bytes) == (Placement.COLOCATED, "sibling", 0)
        assert report.decode_worker == leader.decode_worker
    await until(lambda: hits(cluster) - before == (N - 1) * SHARED)
    await wait_empty(cluster, len(WORKERS))


async def survive(cluster: LocalCluster, processes: dict[str, Process]) -> None:
    single = await alone(cluster, 150)
    choices = await group(cluster, 150)
    await until(lambda: all(len(choice.ids) > 3 for choice in choices))
    (victim,) = {w.hello.worker_id for w in cluster.service._core.registry if len(w.work) == N}
    processes[victim].kill()
    await finish()
    assert [choice.output for choice in choices] == [one.output for one in single]
    assert all(choice.report is not None and choice.report.attempts == 2 for choice in choices)
    await wait_empty(cluster, len(WORKERS) - 1)
