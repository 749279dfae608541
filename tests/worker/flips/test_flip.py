"""Lives of real workers: production engines, NIXL and services, which flip when a scripted router tells them to.

The workers live in this process, so that a test can look at their weights and pools, and count threads and descriptors.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from decode_worker.main import start as start_decode
from kvtransfer.ticket import Ticket
from pdserve.config import MIB, EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.process import Life, RunningWorker
from prefill_worker.main import start as start_prefill
from testkit.scripted_router import ScriptedRouter, Worker

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
BLOCK = 16
ENGINE = EngineConfig(
    model="tiny", dtype="float32", batch_invariant=True, max_num_batched_tokens=48, kv_cache_memory=4 * MIB,
    max_model_len=512, threads=1, max_num_seqs=8,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
FLIPS = 10
WAIT_S = 60.0
LEASE = LeaseConfig(ttl_s=4.0)  # twice as long as a busy machine may stand still


class Cluster:
    """A prefill worker "p", a decode worker "d" and their router. Roles may change, names do not."""

    def __init__(self, router: ScriptedRouter, workers: dict[str, RunningWorker]) -> None:
        self.router = router
        self.running = workers

    def __getitem__(self, name: str) -> Worker:
        return self.router.worker(name)

    def flip(self, name: str, role: common_pb2.Role) -> Worker:
        self.router.flip(before := self[name], role)
        after = self.router.next_life(before)
        assert after.hello.role == role
        return after

    def alone(self, name: str, prompt: list[int]) -> list[int]:
        """The output of a decode worker that computes the prompt itself."""
        handle = self.router.bind(self[name], prompt, GREEDY, local_prefill=True)
        return [row.ids[0] for row in self[name].wait_finished(handle)]

    def hand_off(self, lender: str, reader: str, prompt: list[int]) -> tuple[list[int], Ticket]:
        """The output after token 0 of a prompt that one worker computes and the other one decodes, and the ticket."""
        self[reader].wait("Reserved", bound := self.router.bind(self[reader], prompt, GREEDY))
        lent = self.router.prefill(self[lender], prompt, GREEDY)
        started = self[lender].wait("PrefillStarted", lent)
        self.router.attach(self[reader], bound, started)
        self[reader].wait("KvCommitted", bound)
        return [row.ids[0] for row in self[reader].wait_finished(bound)], Ticket.decode(started.ticket)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Every worker is empty again after the test."""
    with ScriptedRouter() as router:
        configs = {name: WorkerConfig(name, router.address, ENGINE, LEASE, heartbeat_interval_s=0.05) for name in "pd"}
        workers = {"p": start_prefill(configs["p"]), "d": start_decode(configs["d"])}
        try:
            cluster = Cluster(router, workers)
            yield cluster
            for name, worker in workers.items():
                cluster[name].wait_empty()
                assert worker.healthy
        finally:
            for worker in workers.values():
                worker.stop()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(256) for _ in range(length)]


def test_a_flip_keeps_process_weights_and_pool_and_nothing_of_the_old_life(cluster):
    """(1) A prefill worker lends a prompt and flips. (2) It is the same process with the same weights and pool. (3) Its lease
    is gone for a reader that comes late. (4) The prompt's blocks are hits, and the output is the same."""
    prompt, worker = prompt_of(100, seed=1), cluster.running["p"]
    compiler = worker.engine._grammars._compiler
    assert compiler is not None, "the vocabulary is read before the first constraint comes"
    right, _ = cluster.hand_off("p", "d", prompt)
    before, model, pool = cluster["p"], worker.engine.runner._model, worker.engine.kv.caches[0].address
    cluster["d"].wait("Reserved", late := cluster.router.bind(cluster["d"], prompt_of(90, seed=2), GREEDY))
    lent = cluster.router.prefill(before, prompt_of(90, seed=2), GREEDY)
    started = before.wait("PrefillStarted", lent)

    after = cluster.flip("p", DECODE)
    assert (after.hello.pid, after.hello.flips) == (before.hello.pid, 1)
    assert after.hello.address != before.hello.address
    assert worker.engine.runner._model is model
    assert worker.engine.kv.caches[0].address == pool
    assert worker.engine._grammars._compiler is compiler

    cluster.router.attach(cluster["d"], late, started)
    failed = cluster["d"].wait("RequestFailed", late)
    assert common_pb2.ErrorReason.Name(failed.reason) in ("ERROR_REASON_LEASE_GONE", "ERROR_REASON_REPLICA_LOST")
    assert cluster.alone("p", prompt)[1:] == right
    assert after.until(lambda: after.heartbeat.prefix_hit_tokens) >= 100 // BLOCK * BLOCK


def test_blocks_that_a_decode_worker_computed_are_lent_after_a_flip_with_checksums(cluster):
    """(1) The decode worker computes a prompt and its output. (2) It flips, and so does its peer. (3) A prompt of all that is
    lent from its cache: its lease has the checksum of every hit, and the reader's agree. (4) The output is that of a miss."""
    prompt = prompt_of(100, seed=3)
    prompt += cluster.alone("d", prompt)
    right, _ = cluster.hand_off("p", "d", prompt_of(50, seed=4) + prompt)
    cluster.flip("d", PREFILL)
    cluster.flip("p", DECODE)
    hit_tokens = cluster["d"].until(lambda: cluster["d"].heartbeat).prefix_hit_tokens
    lent, ticket = cluster.hand_off("d", "p", prompt)
    assert ticket.checksums
    cluster["d"].until(lambda: cluster["d"].heartbeat.prefix_hit_tokens >= hit_tokens + 128)
    assert cluster.hand_off("d", "p", prompt_of(50, seed=4) + prompt)[0] == right
    assert cluster["d"].heartbeat.kv_corrupt_blocks == cluster["d"].heartbeat.kv_rotted_blocks == 0
    cluster.flip("p", PREFILL)
    cluster.flip("d", DECODE)
    assert cluster.alone("d", prompt)[1:] == lent
    assert cluster["d"].hello.flips == 2


def test_a_flip_waits_for_the_readers_of_what_was_lent(cluster):
    """(1) A lease has no reader when its lender is told to flip. (2) A reader comes, reads and commits. (3) The flip ends."""
    prompt = prompt_of(100, seed=5)
    right = cluster.alone("d", prompt)[1:]
    before = cluster["p"]
    cluster["d"].wait("Reserved", bound := cluster.router.bind(cluster["d"], prompt, GREEDY))
    started = before.wait("PrefillStarted", cluster.router.prefill(before, prompt, GREEDY))
    cluster.router.flip(before, DECODE)
    before.until(lambda: before.heartbeat.draining)
    cluster.router.attach(cluster["d"], bound, started)
    assert [row.ids[0] for row in cluster["d"].wait_finished(bound)] == right
    assert cluster.router.next_life(before).hello.role == DECODE


@pytest.fixture
def alone() -> Iterator[tuple[ScriptedRouter, RunningWorker]]:
    """A prefill worker "x" that may end in the test."""
    with ScriptedRouter() as router:
        worker = start_prefill(WorkerConfig("x", router.address, ENGINE, LEASE, heartbeat_interval_s=0.05))
        try:
            yield router, worker
        finally:
            worker.stop()


def test_a_drain_by_signal_ends_a_worker_in_its_flip(alone):
    router, worker = alone
    linked = router.worker("x")
    linked.wait("PrefillStarted", router.prefill(linked, prompt_of(40, seed=6), GREEDY))  # a lease keeps the flip from ending
    router.flip(linked, DECODE)
    linked.until(lambda: linked.heartbeat.draining)
    worker.drain()
    assert worker.wait(WAIT_S) == 0
    assert router.worker("x") is linked, "it has begun another life"


def test_a_life_that_may_still_write_is_the_last_one(alone, monkeypatch):
    """Incarnations fence messages and not reads: what a read of the old life writes would spoil the KV of the new one."""
    router, worker = alone
    close = Life.close

    async def unclean(life: Life) -> bool:
        await close(life)
        return False

    monkeypatch.setattr(Life, "close", unclean)
    linked = router.worker("x")
    router.flip(linked, DECODE)
    assert worker.wait(WAIT_S) == 1
    assert router.worker("x") is linked


@pytest.mark.slow
def test_flips_leak_no_thread_no_descriptor_and_no_memory_of_peers(cluster):
    """Threads and descriptors after some lives of both roles are those after ten more flips."""
    counts = []
    for number in range(FLIPS // 2 + 4):
        cluster.flip("p", (DECODE, PREFILL)[number % 2])
        cluster.flip("d", (PREFILL, DECODE)[number % 2])
        lender, reader = ("d", "p") if number % 2 == 0 else ("p", "d")
        cluster.hand_off(lender, reader, prompt_of(40, seed=number))
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    first, last = counts[3], counts[-1]
    assert last[0] <= first[0] + 2, counts
    assert last[1] <= first[1] + 2, counts


def test_each_role_brings_its_limits_where_none_are_set():
    """A worker has memory for both roles, so its hello tells the larger limits, and heartbeats those of its role."""
    with ScriptedRouter() as router:
        engine = replace(ENGINE, max_num_batched_tokens=None, max_num_seqs=None)
        worker = start_prefill(WorkerConfig("p", router.address, engine, LEASE, heartbeat_interval_s=0.05))
        cluster = Cluster(router, {"p": worker})
        try:
            for role, tokens in ((PREFILL, 512), (DECODE, 128), (PREFILL, 512)):
                now = cluster["p"] if cluster["p"].hello.role == role else cluster.flip("p", role)
                assert (now.hello.max_num_seqs, now.hello.max_num_batched_tokens) == (64, 512)
                now.until(lambda now=now, tokens=tokens: now.heartbeat and now.heartbeat.max_num_batched_tokens == tokens)
                assert now.heartbeat.max_num_seqs == 64
        finally:
            worker.stop()
