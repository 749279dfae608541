"""No text has fewer tokens than its bound says, whatever the tokenizer does to it before."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pdserve.text.token_bytes import BYTES
from pdserve.text.token_length import NFC_CHARS, TokenBound
from pdserve.text.tokenizer import Tokenizer

MARKS = "e\u0301\u03b1\u0313\u0300\u0345\u212a\u1112\u1161\u11ab"  # characters that NFC composes, or writes shorter
TEXTS = st.text(st.one_of(st.sampled_from("ab  \n<s>\u2581" + MARKS), st.characters(codec="utf-8")), min_size=1)


@functools.cache
def byte_level(normalizer: str = "") -> tokenizers.Tokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["ab", "abab", "\u0120\u0120", "\u0120\u0120\u0120\u0120"]
    merges = [("a", "b"), ("ab", "ab"), ("\u0120", "\u0120"), ("\u0120\u0120", "\u0120\u0120")]
    made = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate([*symbols, *words])}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" +|[^ ]+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizers.NFC()
    made.add_special_tokens([AddedToken("<s>", normalized=False)])
    return made


@functools.cache
def byte_fallback() -> tokenizers.Tokenizer:
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", "b", "\u2581", "ab", "\u2581\u2581"]
    merges = [("a", "b"), ("\u2581", "\u2581")]
    made = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return made


def changed(backend: tokenizers.Tokenizer, **parts: Any) -> tokenizers.Tokenizer:
    """A copy with other parts of tokenizer.json."""
    spec = json.loads(backend.to_str())
    for name, value in parts.items():
        spec[name] = value(spec[name]) if callable(value) else value
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


@functools.lru_cache(maxsize=8)
def bound_of(backend: tokenizers.Tokenizer) -> TokenBound:
    """Made once, since it looks at all words."""
    return TokenBound(backend)


@pytest.mark.parametrize("kind", ["bytes", "nfc", "fallback", "tiny", "default"])
@given(text=TEXTS, copies=st.integers(1, 20))
def test_no_text_has_fewer_tokens_than_it_has_at_least(
    tokenizer_of: dict[str, Tokenizer], kind: str, text: str, copies: int
) -> None:
    made = {"bytes": byte_level(), "nfc": byte_level("nfc"), "fallback": byte_fallback()}
    backend = made.get(kind) or tokenizer_of[kind]._backend
    least = bound_of(backend).least_tokens(text * copies)
    assert least <= len(backend.encode(text * copies, add_special_tokens=False).ids)


def test_the_longest_word_says_how_many_tokens_there_are_at_least(tokenizer_of: dict[str, Tokenizer]) -> None:
    text = "ab" * 500
    assert TokenBound(byte_level()).least_tokens(text) == len(byte_level().encode(text).ids) == 250
    assert TokenBound(byte_level("nfc")).least_tokens(text) == -(-250 // NFC_CHARS)
    assert TokenBound(byte_fallback()).least_tokens(text) == -(-1000 // len("<0x00>"))
    assert tokenizer_of["default"].least_tokens(text) == -(-1000 // 81)
    assert tokenizer_of["default"].least_tokens("\x06" * 500) == len(tokenizer_of["default"].encode("\x06" * 500)) == 0


def stripping(added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "rstrip": True} for one in added]


def without_a_byte(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model that leaves out what stands for the byte 0x80, and with it some characters."""
    return {**model, "vocab": {word: i for word, i in model["vocab"].items() if BYTES.get(word) != 0x80}}


@pytest.mark.parametrize(
    "parts",
    [
        {"added_tokens": stripping},
        {"model": without_a_byte},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": None},
    ],
    ids=[
        "stripping token",
        "a byte less",
        "Strip",
        "Replace, a pattern",
        "Replace, two by one",
        "WhitespaceSplit",
        "Removed",
        "none",
    ],
)
def test_what_may_swallow_characters_has_no_bound(parts: dict[str, Any]) -> None:
    """Any number of spaces, for instance, may be part of a special token that strips them."""
    assert TokenBound(changed(byte_level(), **parts)).least_tokens("ab" * 500) == 0
