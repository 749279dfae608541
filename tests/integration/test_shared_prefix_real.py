"""A system prompt that a hundred requests share is computed once and pulled once, through real processes and NIXL."""

import random

import openai
import pytest

from pdserve import Client, SamplingParams
from pdserve.config import MIB, EngineConfig, RouterConfig
from pdserve.rpc.v1 import common_pb2
from testkit.client import generate_all, request
from testkit.processes import ProcessCluster

pytestmark = pytest.mark.cluster

BLOCK = 16
SYSTEM = [random.Random(1).randrange(256) for _ in range(1000)]
SHARED = len(SYSTEM) // BLOCK * BLOCK  # whole blocks
BOUND_S = 60.0
ROLES = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)


@pytest.fixture(scope="module")
def cluster():
    engine = EngineConfig(model="tiny", batch_invariant=True, block_size=BLOCK, kv_cache_memory=8 * MIB, threads=1)
    router = RouterConfig(probe_workers=False)  # a probe that is repeated hits a block as well
    with ProcessCluster(engine, prefill=1, decode=1, router=router, worker={"heartbeat_interval_s": 0.05}) as running:
        yield running


def question(number, salt=""):
    message = request([*SYSTEM, number, 2, 3], common_pb2.PLACEMENT_DISAGGREGATED, temperature=0.0, max_tokens=4)
    message.cache_salt = salt
    return message


def hits(state):
    """Tokens found so far on prefill and on decode."""
    return [sum(w.load.prefix_hit_tokens for w in state.workers if w.hello.role == role) for role in ROLES]


def test_each_worker_computes_or_pulls_the_shared_part_once_and_the_answers_are_those_of_a_miss(cluster):
    (first,) = generate_all(cluster.grpc, [question(0)], concurrency=1)
    block_bytes = first.report.kv_bytes // (SHARED // BLOCK + 1)
    others = generate_all(cluster.grpc, [question(i) for i in range(1, 100)], concurrency=16)
    assert {other.report.kv_bytes for other in others} == {block_bytes}, "more than the block behind the shared part was read"
    cluster.wait_state(lambda state: hits(state) == [99 * SHARED, 99 * SHARED], BOUND_S)  # told by heartbeats
    assert {other.usage.cached_tokens for other in others} == {SHARED}
    assert first.usage.HasField("cached_tokens")
    assert first.usage.cached_tokens == 0
    again = generate_all(cluster.grpc, [question(i, salt=f"tenant {i}") for i in range(90, 100)], concurrency=4)
    assert [miss.ids for miss in again] == [hit.ids for hit in others[89:]]
    assert {miss.report.kv_bytes for miss in again} == {first.report.kv_bytes}, "KV crossed from one salt to another"
    assert {miss.usage.cached_tokens for miss in again} == {0}


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_every_api_tells_the_cached_tokens_of_a_prompt(cluster, placement):
    prompt = [7, 7, *SYSTEM]
    known = len(prompt) // BLOCK * BLOCK
    own = {"cache_salt": placement, "placement": placement}
    with openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", timeout=BOUND_S) as client:
        same = {"model": "tiny", "temperature": 0, "extra_body": {**own, "ignore_eos": True}}
        asked = {**same, "prompt": prompt, "n": 2, "seed": 1, "max_tokens": 2}
        told = [client.completions.create(**asked).usage for _ in range(2)]
        assert [one.prompt_tokens_details.cached_tokens for one in told] == [0, known]
        parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert parts[-1].usage.prompt_tokens_details.cached_tokens == known
        chat = {"model": "tiny", "input": "a" * 100, "max_output_tokens": 16, "extra_body": own}
        first, again = [client.responses.create(**chat).usage for _ in range(2)]
        assert first.input_tokens_details.cached_tokens == 0
        assert again.input_tokens_details.cached_tokens == (again.input_tokens - 1) // BLOCK * BLOCK > 0
    with Client(cluster.grpc) as client:
        answer = client.generate(prompt, SamplingParams(max_tokens=2, temperature=0.0), **own)
        assert answer.outputs[0].cached_tokens == known
