"""A tiny Llama with seeded random weights, for tests: the real architecture at 1/600 of the size.

Its text is noise, but its tokens depend on the whole prompt, so one wrong KV block changes them. It is the same on every
machine, bit for bit: the weights are raw integers of a PCG64 generator, scaled by single float32 multiplications. A normal
distribution would need logarithms, which differ between C libraries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdserve.checkpoint.origin import write_origin
from pdserve.checkpoint.shards import write_shards

VERSION: Final = 1  # raise it when the written files change; the golden tokens of the tests then change too
NAME: Final = "tiny"
_SEED: Final = 20240229

_VOCAB: Final = 512
_HIDDEN: Final = 64
_LAYERS: Final = 4
_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD_DIM: Final = 16
_FFN: Final = 128

_SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS: Final = 2
_WORDS: Final = (  # noqa: SIM905 - a list of 120 quoted words is not clearer
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one "
    "you were all her she there would their we him been has when who will no more if out so up said what its about than "
    "into them can only other time new some could these two may first then do any like my now over such our man me even "
    "most made after also well years people many must through back before where much good long just should world between "
    "little under never another while house without always place around help through different number away again"
).split()
_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny(directory: Path) -> None:
    """Write the model, 0.6 MB in Hugging Face layout, into the empty `directory`."""
    _write_json(directory / "config.json", _config())
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": _EOS})
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    _tokenizer().save(str(directory / "tokenizer.json"))
    weights = _weights()
    write_shards(directory, {name: w.shape for name, w in weights.items()}, weights.__getitem__, lambda _: None)
    write_origin(directory, name=NAME, source=f"generated, version {VERSION}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,  # a tied random head mostly repeats the last token
        "bos_token_id": 1,
        "eos_token_id": _EOS,
        "torch_dtype": "float32",
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 2048,
        "chat_template": _TEMPLATE,
    }


def _tokenizer() -> Tokenizer:
    """Make the tokenizer. Its ids are 3 special tokens, the 256 bytes, then prefixes of common words, so no id is unused."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(_VOCAB - len(_SPECIALS) - len(alphabet))
    tokens = [*_SPECIALS, *alphabet, *(left + right for left, right in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    assert len(vocab) == _VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    return tokenizer


def _merges(count: int) -> list[tuple[str, str]]:
    """Return the first `count` merges that build the words, with their leading spaces, letter by letter. Each merge occurs
    once."""
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS:
        spaced = "Ġ" + word  # the byte-level alphabet writes a space as Ġ
        for end in range(1, len(spaced)):
            merges[spaced[:end], spaced[end]] = None
    assert len(merges) >= count
    return list(merges)[:count]


def _weights() -> dict[str, NDArray[np.float32]]:
    """Draw the weights. Their scales keep the residual stream and the logits at a few units.

    Attention is then neither flat nor on a single token.
    """
    draw = _Uniform(_SEED)
    weights = {"model.embed_tokens.weight": draw(1.0, _VOCAB, _HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": 1 + draw(0.25, _HIDDEN),
            prefix + "self_attn.q_proj.weight": draw(0.375, _HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.k_proj.weight": draw(0.375, _KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.v_proj.weight": draw(0.25, _KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.o_proj.weight": draw(0.25, _HIDDEN, _HEADS * _HEAD_DIM),
            prefix + "post_attention_layernorm.weight": 1 + draw(0.25, _HIDDEN),
            prefix + "mlp.gate_proj.weight": draw(0.25, _FFN, _HIDDEN),
            prefix + "mlp.up_proj.weight": draw(0.25, _FFN, _HIDDEN),
            prefix + "mlp.down_proj.weight": draw(0.125, _HIDDEN, _FFN),
        }
    weights["model.norm.weight"] = 1 + draw(0.25, _HIDDEN)
    weights["lm_head.weight"] = draw(0.5, _VOCAB, _HIDDEN)
    return weights


class _Uniform:
    """A source of uniform float32 numbers in [-scale, scale), each from 24 random bits. Every step is exact."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def __call__(self, scale: float, *shape: int) -> NDArray[np.float32]:
        raw = self._bits.random_raw(int(np.prod(shape)))
        unit = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
        return (unit * np.float32(scale)).reshape(shape)
