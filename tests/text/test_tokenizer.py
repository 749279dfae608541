"""Text to ids and back: as the reference has it, whole or in pieces, for any ids."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.text.tokenizer import Tokenizer, Utf8Stream

MODELS = ("tiny", "default")
EMOJI = "👩‍👩‍👧‍👦🏳️‍🌈🎉 naïve 日本語"


@functools.cache
def _bytes_known(tokenizer: Tokenizer) -> set[bytes]:
    return {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}


def test_ids_equal_the_reference_over_varied_texts(tokenizer_of, default_text):
    for entry in default_text["texts"] + default_text["numeral_texts"]:
        assert tokenizer_of["default"].encode(entry["text"]) == entry["ids"], entry["text"][:60]


@pytest.mark.parametrize("model", MODELS)
@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_text_survives_encode_and_decode(tokenizer_of, model, text):
    """As far as the vocabulary has its bytes: the default model's lacks F1, F2 and some control characters."""
    tokenizer = tokenizer_of[model]
    known = _bytes_known(tokenizer)
    text = text.replace("<", "")  # which begins every special token
    text = "".join(char for char in text if all(bytes([byte]) in known for byte in char.encode()))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_decode_as_the_library_decodes_them(tokenizer_of, reference_of, model, data):
    """Random ids are mostly pieces of characters: each wrong byte sequence must become as many U+FFFD."""
    tokenizer = tokenizer_of[model]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 300), max_size=40))
    assert tokenizer.decode(ids) == reference_of[model].decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("model", MODELS)
def test_special_tokens_written_out_are_one_id_and_no_text(tokenizer_of, model):
    tokenizer = tokenizer_of[model]
    ids = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.token_bytes(ids[0]) == b""


@pytest.mark.parametrize("token_id", [-1, 512, 1 << 40])
def test_ids_of_no_token_add_nothing(tokenizer_of, token_id):
    tokenizer = tokenizer_of["tiny"]
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.decode([token_id, *tokenizer.encode("a")]) == "a"


def test_a_lone_surrogate_is_refused_by_name_and_place(tokenizer_of):
    with pytest.raises(InvalidRequest, match="lone surrogate at character 2") as caught:
        tokenizer_of["tiny"].encode("ab\ud800c")
    assert caught.value.field == "prompt"


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=200, deadline=None)
def test_bytes_in_pieces_are_the_same_text_as_at_once(data, cuts):
    stream = Utf8Stream()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [stream.push(data[start:end]) for start, end in itertools.pairwise(edges)]
    assert "".join(pieces) + stream.flush() == data.decode("utf-8", "replace")


def test_a_character_is_given_out_with_its_last_byte_and_never_in_halves():
    stream = Utf8Stream()
    for char in EMOJI:
        *first, last = char.encode()
        assert [stream.push(bytes([byte])) for byte in first] == [""] * len(first)
        assert stream.push(bytes([last])) == char


# --- Llama 2's kind of tokenizer ---------------------------------------------------------------------------------


def byte_fallback_backend(*, strip: bool = True) -> tokenizers.Tokenizer:
    """ "▁" for spaces, <0x00> to <0xFF> for bytes, a few words; a special and an added token."""
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "cat", "▁▁", "é", "日"]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens(["<tool>"])
    return backend


@pytest.mark.parametrize("strip", [True, False])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_byte_fallback_tokens_decode_as_the_library_decodes_them(strip, data):
    """Whole characters only: for broken runs the library writes U+FFFD a byte, we one a broken character."""
    backend = byte_fallback_backend(strip=strip)
    vocab = backend.get_vocab()
    as_bytes = st.characters(codec="utf-8").map(lambda c: [vocab[f"<0x{byte:02X}>"] for byte in c.encode()])
    words = st.sampled_from(["<s>", "▁", "▁the", "cat", "▁▁", "é", "日", "<tool>"]).map(lambda t: [vocab[t]])
    ids = list(itertools.chain(*data.draw(st.lists(words | as_bytes, max_size=12))))
    ours = Tokenizer(backend, None)
    assert ours.decode(ids) == backend.decode(ids, skip_special_tokens=True)
    stream = ours.stream()
    assert "".join(stream.push(ours.token_bytes(i)) for i in ids) + stream.flush() == ours.decode(ids)


def test_a_decoder_that_is_not_known_is_refused_by_name(tmp_path, tokenizer_of):
    backend = byte_fallback_backend()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer.load(tmp_path)


def test_a_broken_or_absent_file_is_a_config_error_that_names_it(tmp_path):
    """Bytes that are not UTF-8 once left as a UnicodeDecodeError."""
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not"):
        Tokenizer.load(tmp_path)


def test_padding_and_truncation_of_a_training_run_are_not_applied(tokenizer_of):
    backend = byte_fallback_backend()
    backend.enable_padding(length=64)
    backend.enable_truncation(max_length=2)
    assert len(Tokenizer(backend, None).encode("catcatcatcat")) > 2
