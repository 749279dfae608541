"""SmolLM2: disaggregated equals colocated, and in float32 both equal the reference implementation's continuations."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.native import library
from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.client import Answer, generate_all, request
from testkit.processes import ProcessCluster

# Short tests have the same of one engine (test_logits_goldens.py), and of two pools of the tiny model (test_exact_tiny.py).
pytestmark = [pytest.mark.cluster, pytest.mark.slow]
COMPILED = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
BLOCK = 16
CHUNK = 128  # the longest prompt, of 276 tokens, takes three steps
TOKENS = 16  # as many as the goldens hold
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
ENGINE = EngineConfig(
    model="default",
    dtype="float32",
    batch_invariant=True,
    block_size=BLOCK,
    max_num_batched_tokens=CHUNK,
    kv_cache_memory=192 * MIB,
    max_model_len=1024,
    threads=1,
)


@dataclass(frozen=True)
class Case:
    """One prompt; `chat` is its user's message, sent through the model's own template."""

    name: str
    sampling: dict[str, Any]
    text: str = ""
    chat: str = ""

    def message(self, placement: common_pb2.Placement) -> inference_pb2.GenerateRequest:
        message = request(self.text, placement, **self.sampling)
        if self.chat:
            message.chat.messages.add(role="user", content=self.chat)
        return message


def seeded(seed: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": seed, "max_tokens": TOKENS, **more}


GOLDEN_TEXTS: list[str] = json.loads((GOLDENS / "default.json").read_text())["prompts"]
CHAT: dict[str, Any] = json.loads((GOLDENS / "default_text.json").read_text())["chats"][0]  # one user's message
CASES = [
    *(Case(f"golden {i}", GREEDY, text=text) for i, text in enumerate(GOLDEN_TEXTS)),
    Case("chat", {"temperature": 0.0, "max_tokens": TOKENS}, chat=CHAT["messages"][0]["content"]),
    Case("rendered chat", {"temperature": 0.0, "max_tokens": TOKENS}, text=CHAT["prompt"]),
    Case("seeded chat", seeded(7, top_p=0.9), chat="Name three colours."),
    Case("top-k", seeded(8, top_k=20), text="Once upon a time"),
    Case("min-p", seeded(9, min_p=0.05), text="def quicksort(items):\n"),
    Case("hot", seeded(10, temperature=1.5), text="日本語 and emoji 🎉"),
    Case("several chunks, seeded", seeded(11), text="The quick brown fox jumps over 13 lazy dogs. " * 14),
]


@pytest.fixture(
    scope="module",
    params=["float32", *(pytest.param(name, marks=COMPILED) for name in ("bfloat16", "int8"))],
)
def way(request) -> str:
    """The dtype of the weights."""
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(way):
    try:
        resolve("default")
    except ConfigError as exc:
        pytest.skip(f"the model is not installed: {exc.message}")
    quantised = {"dtype": "bfloat16", "quantization": "int8"}
    engine = replace(ENGINE, **(quantised if way == "int8" else {"dtype": way}))
    with ProcessCluster(engine, prefill=1, decode=1) as running:
        yield running


@pytest.fixture(scope="module")
def answers(cluster) -> dict[str, list[Answer]]:
    """Every case by both placements, each time all at once."""
    placements = {"apart": common_pb2.PLACEMENT_DISAGGREGATED, "together": common_pb2.PLACEMENT_COLOCATED}
    return {name: generate_all(cluster.grpc, [case.message(p) for case in CASES]) for name, p in placements.items()}


def test_disaggregated_equals_colocated_on_smollm2(answers):
    for case, apart, together in zip(CASES, answers["apart"], answers["together"], strict=True):
        assert apart.ids == together.ids, case.name
        assert apart.text == together.text, case.name
        assert apart.finish_reason == together.finish_reason, case.name
        assert apart.report.kv_bytes > 0, case.name
        assert together.report.kv_bytes == 0, case.name
    assert max(answer.usage.prompt_tokens for answer in answers["apart"]) > 2 * CHUNK


def test_greedy_answers_equal_the_reference(way, answers):
    """No choice of these continuations is a near tie (the smallest margin is 0.068), so all of them must agree."""
    if way != "float32":
        pytest.skip("the reference computes in float32")
    golden = np.load(GOLDENS / "default.npz")
    for i in range(len(GOLDEN_TEXTS)):
        for name, run in answers.items():
            assert run[i].usage.prompt_tokens == len(golden[f"prompt_{i}"]), f"{name}, golden {i}"
            assert run[i].ids == golden[f"greedy_{i}"].tolist(), f"{name}, golden {i}"


def test_a_chat_is_its_rendered_prompt(answers):
    """The reference's rendering, sent as text, gives what the messages themselves gave."""
    by_name = {case.name: i for i, case in enumerate(CASES)}
    for run in answers.values():
        messages, rendered = run[by_name["chat"]], run[by_name["rendered chat"]]
        assert messages.usage.prompt_tokens == rendered.usage.prompt_tokens
        assert messages.ids == rendered.ids
