"""KV that was damaged, and tickets that were mixed up, between two real workers: nothing of it is ever decoded from.

Production engines, NIXL and services, commanded by a scripted router. Damage is done to the memory of the two pools.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from decode_worker.main import start as start_decode
from kvtransfer.ticket import Ticket
from pdserve.config import MIB, EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.ids import LeaseId
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.process import RunningWorker
from prefill_worker.main import start as start_prefill
from testkit.scripted_router import ScriptedRouter

BLOCK = 16
ENGINE = EngineConfig(
    model="tiny", dtype="float32", batch_invariant=True, max_num_batched_tokens=48, kv_cache_memory=4 * MIB,
    max_model_len=512, threads=1, max_num_seqs=8,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
WAIT_S = 60.0


class Pair:
    def __init__(self, router: ScriptedRouter, lender: RunningWorker, reader: RunningWorker) -> None:
        self.router = router
        self.lender, self.reader = lender, reader
        self.prefill, self.decode = router.worker("p"), router.worker("d")

    def bind(self, prompt: list[int]) -> int:
        self.decode.wait("Reserved", bound := self.router.bind(self.decode, prompt, GREEDY))
        return bound

    def compute(self, prompt: list[int]):
        """PrefillStarted, once the whole prompt is final and summed."""
        started = self.prefill.wait("PrefillStarted", lent := self.router.prefill(self.prefill, prompt, GREEDY))
        self.prefill.until(lambda: self.prefill.tokens(lent))
        lease_id = LeaseId(started.lease_id.incarnation, started.lease_id.counter)
        table = self.lender._member.role._table
        self.prefill.until(lambda: (lease := table.held(lease_id)) and lease.sums and len(lease.sums[0]) == lease.num_blocks)
        return started

    def failure(self, bound: int) -> str:
        return common_pb2.ErrorReason.Name(self.decode.wait("RequestFailed", bound).reason).removeprefix("ERROR_REASON_")

    def decoded(self, bound: int) -> list[int]:
        self.decode.wait("KvCommitted", bound)
        return [row.ids[0] for row in self.decode.wait_finished(bound)]

    def right(self, prompt: list[int]) -> list[int]:
        """What follows token 0 of an undisturbed run."""
        handle = self.router.bind(self.decode, prompt, GREEDY, local_prefill=True)
        return [row.ids[0] for row in self.decode.wait_finished(handle)][1:]

    def counted(self, corrupt: int, rotted: int) -> None:
        self.prefill.until(
            lambda: (beat := self.prefill.heartbeat) and (beat.kv_corrupt_blocks, beat.kv_rotted_blocks) == (corrupt, rotted)
        )


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture
def pair():
    """Both are empty again after the test."""
    with ScriptedRouter() as router:
        configs = [WorkerConfig(name, router.address, ENGINE, LeaseConfig(), heartbeat_interval_s=0.05) for name in "pd"]
        workers = [start_prefill(configs[0]), start_decode(configs[1])]
        try:
            pair = Pair(router, *workers)
            yield pair
            pair.prefill.wait_empty()
            pair.decode.wait_empty()
        finally:
            for worker in workers:
                worker.stop()


def flip(worker: RunningWorker, block: int) -> None:
    worker.engine.kv.caches[0].blocks[block, 77] ^= 1


def test_kv_that_rots_on_its_lender_is_never_decoded_from_and_not_lent_again(pair):
    """(1) A bit of a lent block flips; (2) the handoff fails as rotted; (3) the same prompt is then computed afresh."""
    prompt = prompt_of(100, seed=1)
    bound, started = pair.bind(prompt), pair.compute(prompt)
    rotted = Ticket.decode(started.ticket).block_tables[0][2]
    flip(pair.lender, rotted)
    pair.router.attach(pair.decode, bound, started)
    assert pair.failure(bound) == "KV_ROTTED"
    pair.counted(1, 1)
    bound, started = pair.bind(prompt), pair.compute(prompt)
    fresh = Ticket.decode(started.ticket).block_tables[0]
    assert rotted not in fresh[:3], "found again, though it is known to be wrong"
    pair.router.attach(pair.decode, bound, started)
    assert pair.decoded(bound) == pair.right(prompt)
    pair.counted(1, 1)


def test_kv_that_changes_on_its_way_is_never_decoded_from(pair):
    """(1) A bit of what was read flips; (2) the handoff fails as corrupt; (3) the lender's blocks may be lent on."""
    prompt = prompt_of(100, seed=2)
    transfer = pair.reader._member._host.transfer
    ((region, real),), damaged = transfer.sum_blocks.items(), []

    def damaging(block_ids):
        if not damaged:
            damaged.append(block_ids[0])
            flip(pair.reader, block_ids[0])
        return real(block_ids)

    transfer.sum_blocks[region] = damaging
    bound, started = pair.bind(prompt), pair.compute(prompt)
    pair.router.attach(pair.decode, bound, started)
    assert pair.failure(bound) == "KV_CORRUPT"
    pair.counted(1, 0)
    bound, again = pair.bind(prompt), pair.compute(prompt)
    hits = 100 // BLOCK
    assert Ticket.decode(again.ticket).block_tables[0][:hits] == Ticket.decode(started.ticket).block_tables[0][:hits]
    pair.router.attach(pair.decode, bound, again)
    assert pair.decoded(bound) == pair.right(prompt)


def test_two_tickets_that_the_router_mixes_up_activate_nothing(pair):
    """(1) Each bind is given the other's lease and ticket: nothing is read; (2) each is then served by its own."""
    prompts = [prompt_of(100, seed=3), prompt_of(100, seed=4)]
    started = [pair.compute(prompt) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        bound = pair.bind(prompt)
        before = pair.reader.engine.kv.caches[0].blocks.clone()
        pair.router.attach(pair.decode, bound, started[1 - i])
        assert pair.failure(bound) == "LEASE_GONE"
        assert (pair.reader.engine.kv.caches[0].blocks == before).all()
    for i, prompt in enumerate(prompts):
        pair.router.attach(pair.decode, bound := pair.bind(prompt), started[i])
        assert pair.decoded(bound) == pair.right(prompt)


def test_a_ticket_that_was_changed_on_its_way_activates_nothing(pair):
    prompt = prompt_of(100, seed=5)
    started = pair.compute(prompt)
    ticket = Ticket.decode(started.ticket)
    for changed in (replace(ticket, block_tables=(ticket.block_tables[0][::-1],)), ticket.with_mac(b"a guess")):
        wrong = type(started)()
        wrong.CopyFrom(started)
        wrong.ticket = changed.encode()
        pair.router.attach(pair.decode, bound := pair.bind(prompt), wrong)
        assert pair.failure(bound) == "LEASE_GONE"
    pair.router.attach(pair.decode, bound := pair.bind(prompt), started)
    assert pair.decoded(bound) == pair.right(prompt)


def test_without_checksums_nothing_is_summed_and_handoffs_go_on():
    off = LeaseConfig(kv_checksum=False)
    with ScriptedRouter() as router:
        configs = [WorkerConfig(name, router.address, ENGINE, off, heartbeat_interval_s=0.05) for name in "pd"]
        workers = [start_prefill(configs[0]), start_decode(configs[1])]
        try:
            pair = Pair(router, *workers)
            prompt = prompt_of(100, seed=6)
            bound = pair.bind(prompt)
            started = pair.prefill.wait("PrefillStarted", router.prefill(pair.prefill, prompt, GREEDY))
            assert not Ticket.decode(started.ticket).checksums
            router.attach(pair.decode, bound, started)
            assert pair.decoded(bound) == pair.right(prompt)
        finally:
            for worker in workers:
                worker.stop()
