"""Speculative decoding in a cluster of processes: every answer is the one without drafts, also when workers are killed."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from real_service import APART, AUTO, tiny

from pdserve.config import EngineConfig, SpeculativeConfig
from pdserve.engine.native import library
from pdserve.rpc.v1 import inference_pb2
from testkit.client import Answer, generate_all, request
from testkit.processes import ProcessCluster

pytestmark = pytest.mark.cluster
COMPILED = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")
BF16: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": None}
ENGINES = [
    pytest.param(tiny(speculative_config=SpeculativeConfig("ngram")), id="float32-ngram", marks=pytest.mark.slow),
    pytest.param(
        tiny(speculative_config=SpeculativeConfig("suffix"), enable_prefix_caching=True, **BF16),
        id="bfloat16-suffix", marks=COMPILED,
    ),
    pytest.param(
        tiny(speculative_config=SpeculativeConfig("self"), quantization="int8", **BF16),
        id="int8-self", marks=[COMPILED, pytest.mark.slow],
    ),
    pytest.param(
        tiny(speculative_config=SpeculativeConfig("draft_model", model="tiny", quantization="int4"), **BF16),
        id="bfloat16-model", marks=[COMPILED, pytest.mark.slow],
    ),
]  # fmt: skip
OUTPUT = 60
SCHEMA = (
    '{"type": "object", "properties": {"name": {"enum": ["anna", "bert"]}, "many": {"type": "integer"}}, "required": ["name"]}'
)
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3, "ignore_eos": True},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 0.5, "logit_bias": {7: 3.0}},
    {"temperature": 0.0, "repetition_penalty": 1.1, "min_tokens": 9},
    {"temperature": 0.3, "seed": 6, "stop": ["a", "e"]},
]


def requests(speculation: str, seed: int, apart: Any = APART) -> list[inference_pb2.GenerateRequest]:
    """Requests of all kinds: n, grammars, log-probabilities, penalties, biases, stop strings. Half of the prompts repeat."""
    rng = random.Random(seed)
    messages = []
    for i, way in enumerate(WAYS * 2):
        part = [rng.randrange(3, 256) for _ in range(rng.choice([5, 16, 23]))]
        message = request(part * (1 + i % 3), apart if i % 2 else AUTO, max_tokens=OUTPUT, **way)
        message.speculation = speculation
        if i % 4 == 1:
            message.n = 2
        if i % 5 == 4 and not way.get("min_tokens"):
            message.structured_outputs.json = SCHEMA
        messages.append(message)
    return messages


def told(answer: Answer) -> list[Any]:
    """What a client sees of an answer."""
    return [
        (one.ids, one.text, one.logprobs, one.finish_reason)
        for one in (answer, *[one for _, one in sorted(answer.others.items())])
    ]


def accepted(answers: list[Answer]) -> int:
    return sum(one.report.speculation.num_accepted_tokens for answer in answers for one in (answer, *answer.others.values()))


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_are_those_without_drafts_also_when_workers_are_killed(engine: EngineConfig) -> None:
    with ProcessCluster(engine, prefill=1, decode=2) as cluster:
        plain = generate_all(cluster.grpc, requests("off", 1), concurrency=6)
        assert not accepted(plain)
        drafted = generate_all(cluster.grpc, requests("auto", 1), concurrency=6)
        assert list(map(told, drafted)) == list(map(told, plain))
        assert accepted(drafted)  # how many depends on the speed of this machine

        def kill() -> None:
            time.sleep(0.15)  # in the middle of the load, which takes seconds; any moment must do
            for name in ("decode-0", "prefill-0"):
                cluster.processes[name].popen.kill()
                cluster.processes[name].popen.wait()
            cluster.heal()

        killer = threading.Thread(target=kill)
        killer.start()
        try:  # no request insists on a prefill worker, since there may be none for a while
            disturbed = generate_all(cluster.grpc, requests("auto", 1, AUTO) * 3, concurrency=12)
        finally:
            killer.join()
        assert list(map(told, disturbed)) == list(map(told, plain)) * 3
        cluster.assert_empty()
