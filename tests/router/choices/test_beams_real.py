"""Beam search and choices through real processes and NIXL, against the same model computed by transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pdserve.config import MIB, EngineConfig
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from testkit.client import request
from testkit.processes import ProcessCluster
from testkit.random_models import reference_logits, write_random

pytestmark = pytest.mark.cluster

APART, TOGETHER = common_pb2.PLACEMENT_DISAGGREGATED, common_pb2.PLACEMENT_COLOCATED
VOCAB = 512
ENDS = tuple(range(0, VOCAB, 9))  # so many that ends of sequence are likely
BOUND_S = 120.0
Beams = list[tuple[list[int], bool]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The model as transformers has it, and a stub of the cluster that serves it."""
    pytest.importorskip("transformers")
    directory: Path = tmp_path_factory.mktemp("model")
    model = write_random(directory, "llama", eos_token_id=list(ENDS))
    engine = EngineConfig(
        model=str(directory),
        dtype="float32",
        batch_invariant=True,
        kv_cache_memory=16 * MIB,
        max_num_batched_tokens=64,
        threads=1,
    )
    with ProcessCluster(engine, worker={"heartbeat_interval_s": 0.05}) as cluster:
        with grpc.insecure_channel(cluster.grpc) as channel:
            yield model, inference_pb2_grpc.InferenceStub(channel)
        cluster.assert_empty()


def prompts() -> list[list[int]]:
    rng = random.Random(58)
    return [rng.choices(range(VOCAB), k=length) for length in (1, 17, 70)]


def asked(stub: Any, ids: list[int], placement: int, **fields: Any) -> Beams:
    """The beams that the cluster returns, and whether each ended by itself."""
    sampling = fields.pop("sampling")
    message = request(ids, placement, **sampling)
    message.MergeFrom(inference_pb2.GenerateRequest(**fields))
    beams = list(stub.Generate(message, timeout=BOUND_S))
    assert [beam.choice for beam in beams] == list(range(len(beams)))
    return [(list(beam.ids), beam.finish_reason == common_pb2.FINISH_REASON_STOP) for beam in beams]


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(reference_logits(model, ids)[-1].float(), dim=-1)


def reference(model: Any, prompt: list[int], width: int, length: int, penalty: float) -> Beams:
    """The steps of vLLM's server on the logits of transformers."""
    score: Callable[[tuple[list[int], float]], float] = lambda beam: beam[1] / len(beam[0]) ** penalty  # noqa: E731
    live: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for _ in range(length):
        grown: list[tuple[list[int], float]] = []
        for ids, logprob in live:
            top = logprobs_of(model, prompt + ids).topk(2 * width)
            for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                (done if token in ENDS else grown).append(([*ids, token], logprob + value))
        live = sorted(grown, key=lambda beam: -beam[1])[:width]
    best = sorted(done + live, key=lambda beam: -score(beam))[:width]
    return [(ids, ids[-1] in ENDS) for ids, _ in best]


@pytest.mark.quick("1.0")
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_in_two_pools_and_in_one_are_those_of_the_reference(served: tuple[Any, Any], penalty: float) -> None:
    model, stub = served
    ended = 0
    for prompt in prompts():
        expected = reference(model, prompt, 4, 8, penalty)
        for placement in (APART, TOGETHER):
            found = asked(stub, prompt, placement, beam_width=4, length_penalty=penalty, sampling={"max_tokens": 8})
            assert found == expected
        ended += sum(stopped for _, stopped in expected)
    assert ended, "no beam met an end, so nothing was shown"


@pytest.mark.slow
def test_beams_without_ends_are_those_of_transformers_own_search(served: tuple[Any, Any]) -> None:
    model, stub = served
    for prompt in prompts():
        found = asked(stub, prompt, APART, beam_width=5, sampling={"max_tokens": 7, "ignore_eos": True, "temperature": 0.0})
        ids = torch.tensor([prompt])
        with torch.no_grad():
            own = model.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=5, num_return_sequences=5, do_sample=False,
                max_new_tokens=7, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert [beam for beam, _ in found] == [row[len(prompt) :].tolist() for row in own]


def test_choice_i_is_the_answer_to_seed_plus_i(served: tuple[Any, Any]) -> None:
    """Whatever shares its KV, a choice is what its seed alone gives; an n of 64 in two pools equals 64 requests in one."""
    _, stub = served
    prompt, sampling = prompts()[2], {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    message = request(prompt, APART, seed=100, **sampling)
    message.n = 64
    choices: dict[int, list[int]] = {}
    for part in stub.Generate(message, timeout=BOUND_S):
        choices.setdefault(part.choice, []).extend(part.ids)
    batch = inference_pb2.GenerateBatchRequest(
        requests=[request(prompt, TOGETHER, seed=100 + i, **sampling) for i in range(64)]
    )
    alone: dict[int, list[int]] = {}
    for one in stub.GenerateBatch(batch, timeout=BOUND_S):
        assert not one.HasField("error")
        alone.setdefault(one.index, []).extend(one.response.ids)
    assert choices == alone
    assert len({tuple(ids) for ids in choices.values()}) > 60
