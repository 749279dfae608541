"""Requests go where their prompt's beginning is: 8 system prompts are computed once each by a pool of two prefill workers."""

import random

import pytest

from pdserve.config import MIB, EngineConfig, RouterConfig
from pdserve.rpc.v1 import common_pb2
from testkit.client import generate_all, request
from testkit.processes import ProcessCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BLOCK = 16
RNG = random.Random(1)
SYSTEMS = [[RNG.randrange(256) for _ in range(1000)] for _ in range(8)]
TAIL = 3
SHARED = len(SYSTEMS[0]) // BLOCK * BLOCK  # whole blocks
PROMPT = len(SYSTEMS[0]) + TAIL
BOUND_S = 60.0
EACH = 8
SPARE = 3  # of the eight that a router which looked only at loads would let the other worker compute as well


@pytest.fixture(scope="module")
def cluster():
    engine = EngineConfig(model="tiny", block_size=BLOCK, kv_cache_memory=16 * MIB, threads=1)
    router = RouterConfig(probe_workers=False)
    with ProcessCluster(engine, prefill=2, decode=2, router=router, worker={"heartbeat_interval_s": 0.05}) as running:
        yield running


def question(system, number):
    return request([*SYSTEMS[system], *[number] * TAIL], common_pb2.PLACEMENT_DISAGGREGATED, temperature=0.0, max_tokens=2)


def prefilled(state):
    """Tokens of prompts on prefill workers so far, and those of them that were computed."""
    loads = [w.load for w in state.workers if w.hello.role == common_pb2.ROLE_PREFILL]
    queried, hit = sum(load.prefix_queried_tokens for load in loads), sum(load.prefix_hit_tokens for load in loads)
    return queried, queried - hit


def test_each_system_prompt_is_computed_once_in_the_whole_pool(cluster):
    """A router that looked only at loads would let both workers compute all of them."""
    generate_all(cluster.grpc, [question(system, 0) for system in range(len(SYSTEMS))], concurrency=1)
    cluster.wait_state(lambda state: prefilled(state)[0] == len(SYSTEMS) * PROMPT, BOUND_S)  # the index has heard by then
    others = [question(system, number) for number in range(1, EACH) for system in range(len(SYSTEMS))]
    generate_all(cluster.grpc, others, concurrency=16)
    asked = len(SYSTEMS) * EACH
    state = cluster.wait_state(lambda state: prefilled(state)[0] == asked * PROMPT, BOUND_S)  # told by heartbeats
    once = len(SYSTEMS) * SHARED + asked * (PROMPT - SHARED)
    computed = prefilled(state)[1]
    # A worker that stood still for a moment counts as slow, and then a prompt that it holds may be computed by the other.
    assert once <= computed <= once + SPARE * SHARED
    workers = [w for w in state.workers if w.hello.role == common_pb2.ROLE_PREFILL]
    assert sum(w.load.computed_prompt_tokens for w in workers) == computed, "probes are off, and nothing was preempted"
    assert any(w.since_start.mfu > 0.0 for w in workers)
    assert any(w.since_start.mbu > 0.0 for w in state.workers if w not in workers), "decode workers read weights and KV"
    assert all(0.0 <= w.since_start.busy <= 1.0 for w in state.workers)
    assert (state.demand.requests, state.demand.prompt_tokens) == (asked, asked * PROMPT)
    assert (state.demand.placed_prompt_tokens, state.demand.prefill_prompt_tokens) == (asked * PROMPT, asked * PROMPT)
    decodes = [w.load for w in state.workers if w not in workers]
    assert [load.computed_prompt_tokens for load in decodes] == [0, 0]
    assert all(load.prompt_tokens_per_s > 0.0 for load in decodes), "placement weighs them by the rate of their start"
