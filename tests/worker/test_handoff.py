"""Both roles with the production engine and NIXL, commanded by a scripted router.

The two workers live in this process, each with its own three threads and its own NIXL agent, so that a test can look
into both KV pools.
"""

import random
from dataclasses import replace

import pytest
import torch

from decode_worker.main import start as start_decode
from kvtransfer.ticket import Ticket
from pdserve.config import MIB, EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import common_pb2
from prefill_worker.main import start as start_prefill
from testkit.scripted_router import ScriptedRouter, Worker

BLOCK = 16
ENGINE = EngineConfig(
    model="tiny",
    dtype="float32",
    batch_invariant=True,
    max_num_batched_tokens=48,
    kv_cache_memory=4 * MIB,
    max_model_len=512,
    threads=1,
    max_num_seqs=8,
)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LEASE = LeaseConfig(ttl_s=4.0)  # twice as long as a busy machine may stand still


@pytest.fixture(scope="module")
def router():
    with ScriptedRouter() as running:
        yield running


def worker_config(router: ScriptedRouter, worker_id: str, **changes) -> WorkerConfig:
    return WorkerConfig(worker_id, router.address, ENGINE, LEASE, heartbeat_interval_s=0.05, **changes)


@pytest.fixture(scope="module")
def running(router):
    workers = [start_prefill(worker_config(router, "p")), start_decode(worker_config(router, "d"))]
    yield workers
    for worker in workers:
        worker.stop()
        assert worker.wait(0) == 0


@pytest.fixture
def pair(router, running):
    """The prefill and the decode worker; both are empty again after the test."""
    prefill, decode = router.worker("p"), router.worker("d")
    yield prefill, decode
    prefill.wait_empty()
    decode.wait_empty()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(length * 1000 + seed)
    return [rng.randrange(256) for _ in range(length)]


def hand_off(router: ScriptedRouter, pair: tuple[Worker, Worker], prompt: list[int], params: SamplingParams = GREEDY):
    """Steps 1 to 4 of a handoff. Returns the decode handle, the prefill handle, and what PrefillStarted said."""
    prefill, decode = pair
    bound = router.bind(decode, prompt, params)
    decode.wait("Reserved", bound)
    started = prefill.wait("PrefillStarted", lent := router.prefill(prefill, prompt, params))
    router.attach(decode, bound, started)
    return bound, lent, started


SEEDED = SamplingParams(max_tokens=9, temperature=1.0, seed=7, min_tokens=4)
PENALISED = SamplingParams(
    max_tokens=9, temperature=0.8, seed=8, ignore_eos=True, presence_penalty=0.7, frequency_penalty=1.5,
    repetition_penalty=1.4, logit_bias=((65, 3.0), (66, 3.0)), logprobs=3,
)  # fmt: skip


Row = tuple[int, int, bytes, int, bytes]


def undisturbed(router: ScriptedRouter, decode: Worker, prompt: list[int], params: SamplingParams) -> list[Row]:
    return rows_of(decode.wait_finished(router.bind(decode, prompt, params, local_prefill=True)))


def rows_of(rows) -> list[Row]:
    return [(row.index, row.ids[0], row.text, row.finish_reason, row.logprobs.SerializeToString()) for row in rows]


@pytest.mark.quick("seeded", "penalised")
@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_an_output_resumed_anywhere_goes_on_as_if_nothing_had_happened(router, pair, params):
    """Prompt and what was emitted are prefilled again, here or on the other worker: indices, ids, text, log-probabilities
    and the end are those of an undisturbed run."""
    prefill, decode = pair
    prompt = prompt_of(40)
    whole = undisturbed(router, decode, prompt, params)
    assert len(whole) > 4
    assert all(bool(row[4]) == (params.logprobs is not None) for row in whole)
    for resumed in range(len(whole)):
        known = prompt + [row[1] for row in whole[:resumed]]
        assert (
            rows_of(decode.wait_finished(router.bind(decode, known, params, local_prefill=True, resumed=resumed)))
            == (whole[resumed:])
        )
        bound = router.bind(decode, known, params, resumed=resumed)
        decode.wait("Reserved", bound)
        started = prefill.wait("PrefillStarted", lent := router.prefill(prefill, known, params, resumed=resumed))
        router.attach(decode, bound, started)
        first = rows_of(prefill.until(lambda lent=lent: prefill.tokens(lent)))
        if first[0][3]:  # the token drawn by prefill ended it: the router would cancel both
            for worker, handle in ((decode, bound), (prefill, lent)):
                router.cancel(worker, handle)
            assert first == whole[resumed:]
        else:
            assert first + rows_of(decode.wait_finished(bound)) == whole[resumed:]


@pytest.mark.parametrize("changes", [{"stop_token_ids": (1 << 31,)}, {"logit_bias": ((1 << 31, 1.0),)}])
def test_a_token_id_that_no_array_holds_costs_its_request_alone(router, pair, changes):
    _, decode = pair
    handle = router.bind(decode, prompt_of(20), replace(GREEDY, min_tokens=2, **changes), local_prefill=True)
    assert "token id" in decode.wait("RequestFailed", handle).message
    assert len(colocated(router, decode, prompt_of(20))) == GREEDY.max_tokens


def test_penalties_and_biases_change_what_is_drawn(router, pair):
    _, decode = pair
    plain = replace(PENALISED, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias=())
    prompt = prompt_of(40)
    whole = colocated(router, decode, prompt, PENALISED)
    assert whole != colocated(router, decode, prompt, plain)
    only = replace(PENALISED, logit_bias=((77, 100.0),))
    assert colocated(router, decode, prompt, only) == [77] * only.max_tokens


def test_an_output_that_is_complete_cannot_be_resumed(router, pair):
    _, decode = pair
    handle = router.bind(decode, prompt_of(20), GREEDY, local_prefill=True, resumed=GREEDY.max_tokens)
    assert "resumed" in decode.wait("RequestFailed", handle).message


def test_a_prompt_that_begins_like_an_earlier_one_is_neither_computed_nor_pulled_again(router, pair):
    """Blocks that decode has are not pulled; those that only prefill has are; the tokens are those of a cold run."""
    prefill, decode = pair
    begin = prompt_of(100, seed=5)
    first, second = begin + prompt_of(30, seed=6), begin + prompt_of(50, seed=7)
    moved = []
    for prompt in (first, second, second):
        bound, _, _ = hand_off(router, pair, prompt)
        moved.append(decode.wait("KvCommitted", bound).kv_bytes // (BLOCK * decode.hello.kv_bytes_per_token))
        rows = decode.wait_finished(bound)
        assert [row.ids[0] for row in rows] == colocated(router, decode, prompt)[1:]
    assert moved[0] == -(-130 // BLOCK)
    assert moved[1] == -(-150 // BLOCK) - 100 // BLOCK
    assert moved[2] == -(-150 // BLOCK) - 150 // BLOCK, "only the block that is not full"
    prefill.until(lambda: prefill.heartbeat and prefill.heartbeat.prefix_hit_tokens >= 100 // BLOCK * BLOCK)


def colocated(router: ScriptedRouter, decode: Worker, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    handle = router.bind(decode, prompt, params, local_prefill=True)
    return [row.ids[0] for row in decode.wait_finished(handle)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 100, 160])
def test_a_handed_off_request_continues_as_a_colocated_one(router, pair, length):
    prefill, decode = pair
    prompt = prompt_of(length)
    bound, lent, _ = hand_off(router, pair, prompt)
    committed = decode.wait("KvCommitted", bound)
    rows = decode.wait_finished(bound)
    first = prefill.until(lambda: prefill.tokens(lent))  # over a link of its own
    assert [row.index for row in first] == [0]
    assert [row.index for row in rows] == [1, 2, 3, 4, 5]
    assert [row.ids[0] for row in first + rows] == colocated(router, decode, prompt)
    assert committed.kv_bytes == -(-length // BLOCK) * BLOCK * decode.hello.kv_bytes_per_token
    assert committed.transfer_s > 0, "most of it while prefill computed"
    assert 0 < committed.commit_s <= committed.exposed_transfer_s


def test_blocks_after_the_transfer_equal_those_before_bit_for_bit(router, running, pair):
    _, decode = pair
    prompt = prompt_of(160)  # whole blocks: decode writes its tokens into a block of its own
    bound, _, started = hand_off(router, pair, prompt)
    decode.wait_finished(bound)
    theirs = [running[0].engine.kv.caches[0].tensor[b] for b in Ticket.decode(started.ticket).block_tables[0]]
    ours = list(running[1].engine.kv.caches[0].tensor)
    assert all(block.abs().sum() > 0 for block in theirs), "the prompt's KV was written"
    for block in theirs:
        assert any(torch.equal(block.view(torch.uint8), other.view(torch.uint8)) for other in ours)


def test_token_0_that_ends_the_request_hands_nothing_over(router, pair):
    prefill, decode = pair
    one = SamplingParams(max_tokens=1, temperature=0.0)
    bound, lent, _ = hand_off(router, pair, prompt_of(20), one)
    assert prefill.wait_finished(lent)[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    router.cancel(decode, bound)
    router.cancel(prefill, lent)  # its lease would live on


def test_a_stop_string_found_after_the_handoff_ends_the_request(router, pair):
    _, decode = pair
    prompt = prompt_of(33)
    long = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    handle = router.bind(decode, prompt, long, local_prefill=True)
    text = b"".join(row.text for row in decode.wait_finished(handle)).decode()
    stop = text[6:9]
    assert stop
    stopping = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop=(stop,))
    bound, lent, _ = hand_off(router, pair, prompt, stopping)
    rows = pair[0].until(lambda: pair[0].tokens(lent))
    if not any(row.finish_reason for row in rows):
        rows = rows + decode.wait_finished(bound)
    assert rows[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert b"".join(row.text for row in rows).decode() == text[: text.index(stop)]


def test_cancel_at_each_step_leaves_nothing(router, pair):
    """Bound; prefilling; attached; decoding. The fixture checks that both workers end up empty."""
    prefill, decode = pair
    prompt, params = prompt_of(200), SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    handle = router.bind(decode, prompt, params)
    router.cancel(decode, handle)

    router.cancel(prefill, router.prefill(prefill, prompt, params))

    lent = router.prefill(prefill, prompt, params)
    prefill.wait("PrefillStarted", lent)
    router.cancel(prefill, lent)

    bound, lent, _ = hand_off(router, pair, prompt, params)
    router.cancel(decode, bound)
    router.cancel(prefill, lent)

    bound, lent, _ = hand_off(router, pair, prompt, params)
    decode.wait("KvCommitted", bound)
    router.cancel(decode, bound)


def test_a_released_lease_fails_the_handoff_as_gone(router, pair):
    prefill, decode = pair
    prompt = prompt_of(40)
    bound = router.bind(decode, prompt, GREEDY)
    lent = router.prefill(prefill, prompt, GREEDY)
    started = prefill.wait("PrefillStarted", lent)
    router.cancel(prefill, lent)
    prefill.wait_empty()
    router.attach(decode, bound, started)
    assert decode.wait("RequestFailed", bound).reason == common_pb2.ERROR_REASON_LEASE_GONE


def test_a_lease_that_nobody_reads_expires_and_its_blocks_return(router, pair):
    prefill, _ = pair
    prefill.wait("PrefillStarted", router.prefill(prefill, prompt_of(40), GREEDY))
    prefill.until(lambda: prefill.heartbeat is not None and prefill.heartbeat.leases_held == 1)
    prefill.wait_empty()


def test_a_bad_ticket_fails_its_request_alone(router, pair):
    prefill, decode = pair
    prompt = prompt_of(40)
    bound = router.bind(decode, prompt, GREEDY)
    decode.wait("Reserved", bound)
    lent = router.prefill(prefill, prompt, GREEDY)
    started = prefill.wait("PrefillStarted", lent)
    started.ticket = started.ticket[:-3]
    router.attach(decode, bound, started)
    assert decode.wait("RequestFailed", bound).reason == common_pb2.ERROR_REASON_TRANSFER_FAILED
    router.cancel(prefill, lent)
    assert len(colocated(router, decode, prompt)) == 6


@pytest.mark.parametrize("prompt", [[], [0] * 512, [1 << 20]])
def test_a_prompt_that_would_break_the_engine_is_refused(router, pair, prompt):
    prefill, decode = pair
    for worker, handle in ((prefill, router.prefill(prefill, prompt, GREEDY)), (decode, router.bind(decode, prompt, GREEDY))):
        assert worker.wait("RequestFailed", handle).reason == common_pb2.ERROR_REASON_INVALID_REQUEST


def test_no_room_is_said_at_once_and_holds_nothing(router, pair):
    _, decode = pair
    params = SamplingParams(max_tokens=2, temperature=0.0)
    handles = [router.bind(decode, prompt_of(500, seed), params) for seed in range(9)]
    said = [decode.until(lambda h=h: _reserved_or_not(decode, h)) for h in handles]
    assert "NoRoom" in said
    assert said[0] == "Reserved"
    refused = next(m for m in decode.said if type(m).__name__ == "NoRoom")
    assert refused.shortage.blocks_needed > refused.shortage.blocks_free, "its only KV group binds"
    for handle in handles:
        router.cancel(decode, handle)


def _reserved_or_not(worker: Worker, handle: int) -> str | None:
    kinds = ("Reserved", "NoRoom")
    return next((type(m).__name__ for m in worker.said if type(m).__name__ in kinds and m.handle == handle), None)


def test_losing_the_router_cancels_its_work_and_the_worker_dials_again():
    with ScriptedRouter() as router:
        worker = start_decode(worker_config(router, "d2"))
        try:
            decode = router.worker("d2")
            router.bind(decode, prompt_of(100), GREEDY)
            handle = router.bind(
                decode, prompt_of(50), SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True), local_prefill=True
            )
            decode.until(lambda: decode.tokens(handle))
            router.drop(decode)
            again = router.worker("d2")
            assert again.hello.incarnation == decode.hello.incarnation
            again.wait_empty()
        finally:
            worker.stop()


def test_kv_that_is_no_number_fails_its_request_is_counted_and_is_found_by_nobody(router):
    """(1) A request decodes. (2) The worker's whole pool is overwritten. (3) The request fails by name, and a heartbeat counts
    it. (4) The same prompt is computed anew, though its blocks had been shared."""
    worker = start_decode(worker_config(router, "n"))
    try:
        decode = router.worker("n")
        prompt, long = prompt_of(40), replace(GREEDY, max_tokens=400)
        whole = undisturbed(router, decode, prompt, GREEDY)
        handle = router.bind(decode, prompt, long, local_prefill=True)
        decode.until(lambda: decode.tokens(handle))
        worker.engine.kv.caches[0].tensor.fill_(float("nan"))
        failed = decode.wait("RequestFailed", handle)
        assert failed.reason == common_pb2.ERROR_REASON_NUMERICAL_ERROR
        assert "not finite numbers on worker n" in failed.message
        decode.wait_empty()
        assert decode.heartbeat.numerical_errors == 1
        assert undisturbed(router, decode, prompt, GREEDY) == whole
    finally:
        worker.stop()
    assert worker.wait(0) == 0
