"""Random Gemma 3 models in GGUF files: the converted checkpoint is the one that was written, and computes what it computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from family_models import LENGTH, Made, Sheet
from gguf_writer import Change, write_gemma
from safetensors.numpy import load_file

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB
from pdserve.core.errors import ConfigError
from testkit.random_models import reference_logits, write_random

TOLERANCE = 1e-4


def _ropes(theta: float, local: float, **scaling: Any) -> dict[str, Any]:
    return {
        "full_attention": {"rope_type": "default", "rope_theta": theta, **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _every_setting(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_freq_base_swa(1e3)
    writer.add_sliding_window_pattern([False, True, True])
    writer.add_final_logit_softcapping(4.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(512)


PUBLISHED: dict[str, Any] = {
    "num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 32, "final_logit_softcapping": None,
    "rope_parameters": _ropes(1e6, 1e4),
}  # fmt: skip
"""What a file does not say is as in all published models. Layer 5 is the first global one."""
EVERY: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "query_pre_attn_scalar": 32,
    "rope_parameters": _ropes(1e5, 1e3, rope_type="linear", factor=4.0), "tie_word_embeddings": False,
}  # fmt: skip
WIDEST: dict[str, Any] = {**PUBLISHED, "num_hidden_layers": 62, "query_pre_attn_scalar": 16, "intermediate_size": 16}
"""The layers of the 27B model, which alone divides scores by the root of hidden_size / num_attention_heads."""
CASES: dict[str, tuple[dict[str, Any], tuple[Change, ...]]] = {
    "published": (PUBLISHED, ()),
    "every setting": (EVERY, (_every_setting,)),
    "27b": (WIDEST, ()),
    "every second": ({**PUBLISHED, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6},
                     (lambda writer: writer.add_sliding_window_pattern(2),)),
    "no window": ({**PUBLISHED, "layer_types": ["full_attention"] * 7}, (lambda writer: writer.add_sliding_window(0),)),
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A random model of transformers, its checkpoint, and its tensors as they are in the file."""

    directory: Path
    model: Any

    def tensors(self) -> dict[str, Any]:
        return load_file(self.directory / "model.safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Callable[[str], Source]:
    pytest.importorskip("transformers")
    made: dict[str, Source] = {}

    def make(name: str) -> Source:
        if name not in made:
            directory = tmp_path_factory.mktemp("hf")
            model = write_random(directory, "gemma3", **CASES[name][0])
            with torch.no_grad():  # a float32 holds these and one more than these
                for key, tensor in model.named_parameters():
                    if "norm" in key:
                        tensor.copy_((tensor * 1024).round() / 1024)
            model.float().save_pretrained(directory)
            made[name] = Source(directory, model.double())
        return made[name]

    return make


def _converted(tmp_path: Path, source: Source, *changes: Change, leave_out: tuple[str, ...] = ()) -> Path:
    file = write_gemma(tmp_path / "m.gguf", source.model.config, source.tensors(), *changes, leave_out=leave_out)
    return resolve(str(file), cache_dir=tmp_path / "cache")


@pytest.mark.quick("every*", "no window", "published")
@pytest.mark.parametrize("name", CASES)
def test_a_gemma_comes_back_as_it_was_written(tmp_path, source, name):
    """The spec, every tensor, transformers' logits bit for bit in float64, and the engine's logits."""
    import transformers

    hf, (_, changes) = source(name), CASES[name]
    directory = _converted(tmp_path, hf, *changes)
    card = ModelCard.load(directory)
    assert card.spec == ModelCard.load(hf.directory).spec

    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == hf.tensors().keys()
    assert all((stored[key] == tensor).all() for key, tensor in hf.tensors().items())

    ids = random.Random(name).choices(range(512), k=LENGTH)
    reference = reference_logits(hf.model, ids)
    read = transformers.Gemma3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(reference_logits(read.eval().double(), ids), reference)
    made = Made(directory, card, tuple(ids), reference)
    runner = made.runner(kv_cache_memory=32 * MIB)
    assert made.error(runner.logits(Sheet.of(runner, made.ids).whole())) < TOLERANCE


def test_a_window_changes_what_these_models_compute(source):
    """Without that, a converter that forgot windows would pass."""
    hf = source("published")
    ids = random.Random(1).choices(range(512), k=LENGTH)
    reference = reference_logits(hf.model, ids)
    wide = type(hf.model)(type(hf.model.config)(**{**hf.model.config.to_dict(), "sliding_window": 4096}))
    wide.load_state_dict(hf.model.state_dict())
    wide.config._attn_implementation = "eager"
    error = (reference_logits(wide.double().eval(), ids) - reference).abs().max() / reference.abs().max()
    assert error > 100 * TOLERANCE


REFUSED: dict[str, tuple[tuple[Change, ...], tuple[str, ...], str]] = {
    "bounded scores": ((lambda w: w.add_attn_logit_softcapping(50.0),), (), "gemma3.attn_logit_softcapping is 50.0"),
    "scale": ((lambda w: w.add_attention_scale(0.1),), (), "gemma3.attention.scale is 0.1"),
    "not causal": ((lambda w: w.add_causal_attention(False),), (), "gemma3.attention.causal is False"),
    "experts": ((lambda w: w.add_expert_count(4),), (), "gemma3.expert_count is 4"),
    "yarn": ((lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),), (), "rope scaling 'yarn' is not supported"),
    "old scaling": ((lambda w: w.add_float32("gemma3.rope.scale_linear", 8.0),), (), "gemma3.rope.scale_linear is 8.0"),
    "part of a head": ((lambda w: w.add_rope_dimension_count(16),), (), "only part of a head"),
    "values": ((lambda w: w.add_value_length(64),), (), "heads of values"),
    "layers": ((lambda w: w.add_sliding_window_pattern([True, False]),), (), "is of 2 layers, and it has 7"),
    "a part": ((lambda w: w.add_uint16("split.count", 3),), (), "is one of 3 parts"),
    "no theta": ((), ("gemma3.rope.freq_base",), "lacks the metadata gemma3.rope.freq_base"),
    "no norm": ((), ("blk.3.attn_k_norm.weight",), r"missing \['blk.3.attn_k_norm.weight'\]"),
    "no embedding": ((), ("token_embd.weight",), "lacks the tensor token_embd.weight"),
    "tokenizer": ((lambda w: w.add_tokenizer_model("t5"),), (), "its tokenizer is 't5'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_a_gemma_is_refused_by_name(tmp_path, source, name):
    changes, leave_out, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        _converted(tmp_path, source("published"), *changes, leave_out=leave_out)


def test_a_tensor_that_no_gemma_has_is_refused(tmp_path, source):
    def factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", torch.ones(16).numpy())

    with pytest.raises(ConfigError, match=r"unknown tensors \['rope_freqs.weight'\]"):
        _converted(tmp_path, source("published"), factors)
