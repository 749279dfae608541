"""Two workers that drive servers of vLLM, commanded by a scripted router: whose KV a request gets, and who frees it.

The stand-ins believe every ticket, as vLLM does. So a ticket that pdserve lets through wrongly gives wrong tokens here.
"""

from __future__ import annotations

import time
from dataclasses import replace

import psutil
import pytest
from stand_ins import BLOCK_SIZE, engine, expected, prompt_of

from decode_worker.main import start as start_decode
from kvtransfer.ticket import EngineTicket
from pdserve.config import LeaseConfig, WorkerConfig
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.vllm import guard
from prefill_worker.main import start as start_prefill
from testkit.scripted_router import ScriptedRouter

pytestmark = pytest.mark.cluster

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LEASE = LeaseConfig(ttl_s=4.0)


@pytest.fixture(scope="module")
def router():
    with ScriptedRouter() as running:
        yield running


@pytest.fixture(scope="module")
def running(router):
    def config(name: str) -> WorkerConfig:
        return WorkerConfig(name, router.address, engine(step_s=0.005), LEASE, heartbeat_interval_s=0.05)

    workers = [start_prefill(config("p")), start_decode(config("d"))]
    yield workers
    for worker in workers:
        worker.stop()
        assert worker.wait(0) == 0


@pytest.fixture
def pair(router, running):
    """The prefill and the decode worker. Both are empty again after the test, long before vLLM's own time of 30 s is over."""
    prefill, decode = router.worker("p"), router.worker("d")
    yield prefill, decode
    prefill.wait_empty()
    decode.wait_empty()
    assert not prefill.heartbeat.foreign_blocks


def reserve_and_lend(router, pair, prompt, params=GREEDY):
    prefill, decode = pair
    bound = router.bind(decode, prompt, params)
    decode.wait("Reserved", bound)
    lent = router.prefill(prefill, prompt, params)
    return bound, lent, prefill.wait("PrefillStarted", lent)


def ids_of(rows):
    return [token_id for row in rows for token_id in row.ids]


def handed_off(router, pair, prompt, params=GREEDY):
    prefill, decode = pair
    bound, lent, started = reserve_and_lend(router, pair, prompt, params)
    router.attach(decode, bound, started)
    decode.wait("KvCommitted", bound)
    return ids_of(prefill.until(lambda: prefill.tokens(lent))) + ids_of(decode.wait_finished(bound))


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 100])
def test_a_handed_off_request_goes_on_as_on_one_server(router, pair, length):
    """At a multiple of the block size the reader needs a block more than was lent, or its process ends."""
    prompt = prompt_of(length)
    assert handed_off(router, pair, prompt) == expected(prompt, 6)
    colocated = router.bind(pair[1], prompt, GREEDY, local_prefill=True)
    assert ids_of(pair[1].wait_finished(colocated)) == expected(prompt, 6)


@pytest.mark.parametrize("resumed", [1, 5])
def test_an_output_is_taken_up_again_from_what_the_client_has(router, pair, resumed):
    prefill, decode = pair
    prompt = prompt_of(40, seed=2)
    whole = expected(prompt, 6)
    bound = router.bind(decode, prompt + whole[:resumed], GREEDY, resumed=resumed)
    decode.wait("Reserved", bound)
    started = prefill.wait("PrefillStarted", lent := router.prefill(prefill, prompt + whole[:resumed], GREEDY, resumed=resumed))
    first = prefill.until(lambda: prefill.tokens(lent))
    assert [row.index for row in first] == [resumed]
    router.attach(decode, bound, started)
    if resumed == 5:  # token 0 of this attempt is the last one: there is nothing to decode
        router.cancel(prefill, lent)
        assert ids_of(first) == whole[5:]
        return
    assert ids_of(first) + ids_of(decode.wait_finished(bound)) == whole[resumed:]


def test_a_ticket_is_used_once(router, pair):
    prefill, decode = pair
    prompt = prompt_of(50, seed=3)
    bound, _, started = reserve_and_lend(router, pair, prompt)
    again = router.bind(decode, prompt, GREEDY)
    decode.wait("Reserved", again)
    router.attach(decode, bound, started)
    assert ids_of(decode.wait_finished(bound)) == expected(prompt, 6)[1:]
    router.attach(decode, again, started)
    assert decode.wait("RequestFailed", again).reason == common_pb2.ERROR_REASON_LEASE_GONE
    prefill.wait_empty()


def test_a_ticket_serves_no_other_prompt(router, pair):
    """The other prompt is as long. vLLM would give its output a normal end."""
    _prefill, decode = pair
    unused, _, started = reserve_and_lend(router, pair, prompt_of(50, seed=4))
    router.cancel(decode, unused)
    other = router.bind(decode, prompt_of(50, seed=5), GREEDY)
    decode.wait("Reserved", other)
    router.attach(decode, other, started)
    failed = decode.wait("RequestFailed", other)
    assert failed.reason == common_pb2.ERROR_REASON_LEASE_GONE
    assert "another prompt" in failed.message
    right = router.bind(decode, prompt_of(50, seed=4), GREEDY)
    decode.wait("Reserved", right)
    router.attach(decode, right, started)
    assert ids_of(decode.wait_finished(right)) == expected(prompt_of(50, seed=4), 6)[1:]


def test_a_changed_ticket_is_refused(router, pair):
    _prefill, decode = pair
    prompt = prompt_of(50, seed=6)
    bound, _, started = reserve_and_lend(router, pair, prompt)
    ticket = EngineTicket.decode(started.ticket)
    params = ticket.params.replace(b'"remote_port"', b'"remote_porT"')
    assert params != ticket.params
    changed = type(started)()
    changed.CopyFrom(started)
    changed.ticket = replace(ticket, params=params).encode()
    router.attach(decode, bound, changed)
    assert decode.wait("RequestFailed", bound).reason == common_pb2.ERROR_REASON_LEASE_GONE
    good = router.bind(decode, prompt, GREEDY)
    decode.wait("Reserved", good)
    router.attach(decode, good, started)
    assert ids_of(decode.wait_finished(good)) == expected(prompt, 6)[1:]


def test_an_expired_ticket_is_refused_and_its_blocks_are_counted(router):
    """Nobody has committed it, so nobody may touch its KV: vLLM frees it at its own time, and until then it counts as
    foreign."""
    configs = [WorkerConfig(name, router.address, engine(), LeaseConfig(ttl_s=0.5), heartbeat_interval_s=0.05) for name in "xy"]
    workers = [start_prefill(configs[0]), start_decode(configs[1])]
    try:
        prefill, decode = router.worker("x"), router.worker("y")
        prompt = prompt_of(50, seed=7)
        bound, _, started = reserve_and_lend(router, (prefill, decode), prompt)
        prefill.until(lambda: prefill.heartbeat and prefill.heartbeat.foreign_blocks == 4)
        router.attach(decode, bound, started)
        assert decode.wait("RequestFailed", bound).reason == common_pb2.ERROR_REASON_LEASE_GONE
        decode.wait_empty()
    finally:
        for worker in workers:
            worker.stop()


def test_a_request_that_is_cancelled_during_its_handoff_frees_the_lender(router, pair):
    prefill, decode = pair
    for seed in range(30):
        bound, lent, started = reserve_and_lend(router, pair, prompt_of(50, seed=seed))
        router.attach(decode, bound, started)
        time.sleep(seed / 3000)  # at any moment of it: before the commit, after it, and before vLLM has read the request
        router.cancel(prefill, lent)
        router.cancel(decode, bound)


def test_a_request_that_is_cancelled_while_it_decodes_frees_both(router, pair):
    _prefill, decode = pair
    long = replace(GREEDY, max_tokens=400)
    bound, _, started = reserve_and_lend(router, pair, prompt_of(50, seed=8), long)
    router.attach(decode, bound, started)
    decode.until(lambda: decode.tokens(bound))
    router.cancel(decode, bound)


def test_token_0_that_ends_the_request_leaves_no_kv(router, pair):
    """A stop token is known to vLLM, which then lends nothing. A stop string is not: the reader has its KV freed."""
    prefill, decode = pair
    prompt = prompt_of(50, seed=9)
    first = expected(prompt, 1)[0]
    stopped = replace(GREEDY, stop_token_ids=(first,))
    for params in (stopped, replace(GREEDY, max_tokens=1)):
        bound, lent, started = reserve_and_lend(router, pair, prompt, params)
        assert EngineTicket.decode(started.ticket).params == b""
        (row,) = prefill.until(lambda lent=lent: prefill.tokens(lent))
        assert (list(row.ids), bool(row.finish_reason)) == ([first], True)
        router.attach(decode, bound, started)
    text = prefill.tokens(lent)[0].text.decode()
    assert text
    bound, lent, started = reserve_and_lend(router, pair, prompt, replace(GREEDY, stop=(text,)))
    assert EngineTicket.decode(started.ticket).params
    router.attach(decode, bound, started)
    prefill.until(lambda: prefill.tokens(lent)[0].finish_reason)


def test_what_vllm_cannot_do_is_told(router, pair):
    prefill, decode = pair
    for worker in pair:
        assert worker.hello.engine == "vllm 0.32.0"
        assert list(worker.hello.refuses) == ["prompt_logprobs", "speculation"]
        assert "structured_outputs" in worker.hello.undivided
        assert list(worker.hello.unresumed) == ["structured_outputs"]
        assert worker.hello.max_num_batched_tokens == 0, "`pdserve set-budget` may not set it"
        assert worker.hello.numerics == ""
    assert prefill.hello.model_digest == decode.hello.model_digest != ""


def test_a_server_without_a_slot_is_told_as_no_room(router, pair):
    _, decode = pair
    full = [router.bind(decode, prompt_of(20, seed=s), replace(GREEDY, max_tokens=200), local_prefill=True) for s in range(17)]
    answers = [
        decode.until(lambda h=h: decode.tokens(h) or any(getattr(m, "handle", 0) == h for m in decode.said)) for h in full
    ]
    assert all(answers)
    assert any(type(m).__name__ == "NoRoom" and m.handle == full[-1] for m in decode.said), "16 slots"
    for handle in full:
        router.cancel(decode, handle)


def test_a_flip_starts_the_server_again_and_serves_in_the_other_role(router):
    """The prefill worker becomes the reader of another one. Its server has the part in handoffs that its role needs."""
    configs = {name: WorkerConfig(name, router.address, engine(), LEASE, heartbeat_interval_s=0.05) for name in ("f", "l")}
    workers = [start_prefill(configs["f"]), start_prefill(configs["l"])]
    try:
        server = psutil.Process().children(recursive=True)
        router.flip(before := router.worker("f"), common_pb2.ROLE_DECODE)
        after = router.next_life(before)
        assert (after.hello.role, after.hello.flips) == (common_pb2.ROLE_DECODE, 1)
        prompt = prompt_of(60, seed=11)
        assert handed_off(router, (router.worker("l"), after), prompt) == expected(prompt, 6)
        now = psutil.Process().children(recursive=True)
        assert len(now) == len(server), "the old server has ended"
        assert set(now) != set(server)
        (flipped,) = set(now) - set(server) - {one for one in now if guard.__file__ in one.cmdline()}
        assert any("kv_consumer" in word for word in flipped.cmdline())
        after.wait_empty()
    finally:
        for worker in workers:
            worker.stop()


def test_a_server_may_start_for_longer_than_a_step_may_take(router):
    """During a flip nobody asks for its load: its worker waits for `start_timeout_s`."""
    slow = engine(start_s=3.0, step_timeout_s=0.5)
    worker = start_prefill(WorkerConfig("s", router.address, slow, LEASE, heartbeat_interval_s=0.05))
    try:
        router.flip(before := router.worker("s"), common_pb2.ROLE_DECODE)
        after = router.next_life(before)
        handle = router.bind(after, prompt_of(20), GREEDY, local_prefill=True)
        assert ids_of(after.wait_finished(handle)) == expected(prompt_of(20), 6)
        assert worker.healthy
    finally:
        worker.stop()
