"""GGUF files of our own making: what is converted is what was written, and what cannot be is refused by name."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import ALPHABET, HEAD_DIM, TOKENS, weights, write_gguf
from safetensors.numpy import load_file

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.gguf.convert import convert, model_name
from pdserve.checkpoint.gguf.llama import llama3_factors
from pdserve.checkpoint.resolve import resolve
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import AttentionSpec, LinearScaling, Llama3Scaling, NormSpec, RopeSpec
from pdserve.text.tokenizer import Tokenizer

Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def small(tmp_path) -> Path:
    return write_gguf(tmp_path / "Small-Instruct.Q8_0.gguf")


def converted(source: Path) -> Path:
    return resolve(str(source), cache_dir=source.parent / "cache")


def test_the_tensors_are_those_that_were_written(small):
    directory = converted(small)
    stored = load_file(directory / "model.safetensors")
    written = weights()
    assert len(stored) == len(written)
    for name, ours in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        np.testing.assert_array_equal(stored[name], written[ours], err_msg=name)


def test_quantised_tensors_are_dequantised_and_keep_their_shape(tmp_path):
    stored = load_file(converted(write_gguf(tmp_path / "m.gguf", quantised=Q8_0)) / "model.safetensors")
    gate = weights()["blk.0.ffn_gate.weight"]
    assert stored["model.layers.0.mlp.gate_proj.weight"].dtype == np.float32
    np.testing.assert_allclose(stored["model.layers.0.mlp.gate_proj.weight"], gate, atol=np.abs(gate).max() / 127)


def test_the_card_says_what_the_file_says(small):
    card = ModelCard.load(converted(small))
    assert card.name == "Small-Instruct"
    (layer,) = card.spec.layers
    assert layer.attention == AttentionSpec(4, 2, HEAD_DIM, HEAD_DIM, RopeSpec(500000.0))
    assert (card.vocab_size, card.max_position) == (len(TOKENS), 128)
    assert layer.norms == card.spec.norm == NormSpec(1e-5)
    assert card.spec.tied_head
    assert card.eos_token_ids == (0, 2)  # the end of a turn ends a request too


def test_a_head_of_its_own_is_not_tied(tmp_path):
    head = np.ones((len(TOKENS), 32), np.float32)
    directory = converted(write_gguf(tmp_path / "m.gguf", tensors={"output.weight": head}))
    assert not ModelCard.load(directory).spec.tied_head
    np.testing.assert_array_equal(load_file(directory / "model.safetensors")["lm_head.weight"], head)


def test_the_tokenizer_and_the_template_come_along(small):
    tokenizer = Tokenizer.load(converted(small))
    ids = tokenizer.encode("<s>hello world<tool></s>")
    assert [TOKENS[i] for i in ids] == ["<s>", "hello", "Ġw", "o", "r", "l", "d", "<tool>", "</s>"]
    assert tokenizer.decode(ids) == "hello world<tool>"  # user-defined tokens are text, control tokens are not
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([("user", "x")]) == "<s>x</s>"
    assert not Tokenizer.load(converted(write_gguf(small, metadata={"tokenizer.chat_template": None}))).has_chat_template


@pytest.mark.parametrize(("wanted", "first"), [(None, "h"), (False, "h"), (True, "<s>")])
def test_the_first_token_is_added_where_the_file_wants_it(tmp_path, wanted, first):
    tokenizer = Tokenizer.load(converted(write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.add_bos_token": wanted})))
    assert TOKENS[tokenizer.encode("h")[0]] == first
    assert TOKENS[tokenizer.encode("h", add_special_tokens=False)[0]] == "h"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 12", ["a", "Ġ12"]),
        ("smollm", "a 12", ["a", "Ġ", "1", "2"]),
        ("llama-bpe", "a 1234", ["a", "Ġ", "123", "4"]),
        ("qwen2", "a 12", ["a", "Ġ", "1", "2"]),
    ],
)
def test_the_named_rule_splits_numbers_as_its_models_do(tmp_path, pre, text, pieces):
    """Numbers and their space get merges here: only what the rule splits stays apart."""
    merges = [("1", "2"), ("12", "3"), ("123", "4"), ("Ġ", "12"), ("Ġ", "1")]
    tokens = [*TOKENS, *(left + right for left, right in merges)]
    embedding = np.zeros((len(tokens), 32), np.float32)
    metadata = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
    }
    source = write_gguf(tmp_path / "m.gguf", metadata=metadata, tensors={"token_embd.weight": embedding})
    assert [tokens[i] for i in Tokenizer.load(converted(source)).encode(text)] == pieces


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_again_from_its_factors(tmp_path, factor):
    factors = llama3_factors(500000.0, HEAD_DIM, factor).astype(np.float32)
    source = write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    rope = ModelCard.load(converted(source)).spec.layers[0].attention.rope
    assert rope.scaling == Llama3Scaling(factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize(("kind", "scaling"), [("linear", LinearScaling(4.0)), (None, LinearScaling(4.0)), ("none", None)])
def test_linear_scaling_is_read(tmp_path, kind, scaling):
    """A factor without a kind is linear, as llama.cpp reads it."""
    metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    rope = ModelCard.load(converted(write_gguf(tmp_path / "m.gguf", metadata=metadata))).spec.layers[0].attention.rope
    assert rope.scaling == scaling


def test_shards_are_listed_and_read_back(small, tmp_path, monkeypatch):
    monkeypatch.setattr("pdserve.checkpoint.gguf.convert.write_shards", _in_small_shards)
    directory = converted(small)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert len(ModelCard.load(directory).spec.layers) == 1
    stored = {name: load_file(directory / file)[name] for name, file in index["weight_map"].items()}
    np.testing.assert_array_equal(stored["model.norm.weight"], weights()["output_norm.weight"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())


def _in_small_shards(directory, shapes, read, done):
    from pdserve.checkpoint.shards import write_shards

    write_shards(directory, shapes, read, done, limit=20_000)


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "architecture": ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
    "scaling": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
    "unknown setting": ({"metadata": {"llama.logit_scale": 2.0}}, "llama.logit_scale is 2.0, and this setting"),
    "wide values": ({"metadata": {"llama.attention.value_length": 16}}, "heads of values other than"),
    "parts": ({"metadata": {"split.count": 2}}, "is one of 2 parts"),
    "partial rotation": ({"metadata": {"llama.rope.dimension_count": 4}}, "only part of a head"),
    "tokenizer": ({"metadata": {"tokenizer.ggml.model": "t5"}}, "its tokenizer is 't5'"),
    "rule": ({"metadata": {"tokenizer.ggml.pre": "klingon"}}, "tokenizer.ggml.pre is 'klingon'"),
    "no layers": ({"metadata": {"llama.block_count": None}}, "lacks the metadata llama.block_count"),
    "no tokens": ({"metadata": {"tokenizer.ggml.tokens": None}}, "lacks the metadata tokenizer.ggml.tokens"),
    "bias": ({"tensors": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}}, "unknown tensors .*attn_q.bias"),
    "missing": ({"tensors": {"blk.0.ffn_up.weight": None}}, "missing .*ffn_up"),
    "factors": ({"tensors": {"rope_freqs.weight": np.full(4, 3.0, np.float32)}}, "no known Llama 3"),
    # These once left as the exceptions of whatever stumbled over them.
    "no heads": ({"metadata": {"llama.attention.head_count": 0}}, "m.gguf"),
    "heads a text": ({"metadata": {"llama.attention.head_count": "four"}}, "m.gguf"),
    "heads by layer": ({"metadata": {"llama.attention.head_count_kv": [2, 2]}}, "m.gguf"),
    "merge of no token": ({"metadata": {"tokenizer.ggml.merges": ["z q"]}}, "m.gguf"),
    "first token of no id": ({"metadata": {"tokenizer.ggml.bos_token_id": 9999}}, "m.gguf"),
    "odd factors": ({"tensors": {"rope_freqs.weight": np.full(3, 3.0, np.float32)}}, "m.gguf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_served_is_refused_by_name(tmp_path, name):
    changes, words = REFUSED[name]
    source = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        converted(source)
    assert str(source) in caught.value.message
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half made


def test_a_file_cut_short_anywhere_is_refused(small):
    whole = small.read_bytes()
    for length in [0, 1, 4, 5, 8, 23, 24, 100, *range(200, len(whole), len(whole) // 25), len(whole) - 40]:
        small.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"Small-Instruct.Q8_0.gguf"):
            converted(small)


def test_a_file_with_flipped_bytes_is_converted_or_refused(small):
    """Bytes of the header; those of the weights mean something whatever they are."""
    whole = bytearray(small.read_bytes())
    rng = random.Random(7)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[rng.randrange(4, 2500)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        small.write_bytes(damaged)
        with contextlib.suppress(ConfigError):
            converted(small)


@pytest.mark.timeout(60)
def test_a_count_that_the_file_cannot_hold_is_refused_at_once(small):
    """Numbers past the end have no bytes: reading 2**60 of them once went on until memory ran out."""
    whole = small.read_bytes()
    key = b"tokenizer.ggml.token_type"
    at = whole.index(key) + len(key) + 8  # after the key: the type (array) and that of its members
    assert int.from_bytes(whole[at : at + 8], "little") == len(TOKENS)
    small.write_bytes(whole[:at] + (1 << 60).to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(ConfigError, match="is not a complete GGUF file"):
        converted(small)


def test_something_else_by_that_name_is_refused(tmp_path):
    source = tmp_path / "m.gguf"
    source.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ConfigError, match="is not a GGUF file: it starts with b'PK"):
        converted(source)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("llama-3-8b-q4_k_m.gguf", "llama-3-8b"),
        ("model-BF16.gguf", "model"),
        ("m.IQ3_XXS.gguf", "m"),
        ("plain.gguf", "plain"),
        (".Q8_0.gguf", ".Q8_0"),
        ("qwen.gguf", "qwen"),
    ],
)
def test_a_model_is_called_like_its_file_without_the_quantisation(file, name):
    assert model_name(Path(file)) == name


def test_progress_runs_to_its_end(small, tmp_path):
    seen: list[tuple[str, int, int]] = []
    (tmp_path / "out").mkdir()
    convert(small, tmp_path / "out", lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2] > 0
    assert [done for _, done, _ in seen[1:]] == sorted(done for _, done, _ in seen[1:])
    assert ALPHABET
