"""SentencePiece tokenizers in GGUF files: what is written gives the ids of SentencePiece's own rule, and the text back."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_files import Pieces, ids_of

from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.tokenizer import write_tokenizer
from pdserve.core.errors import ConfigError
from pdserve.text.output import OutputText
from pdserve.text.tokenizer import Tokenizer

DEFINED = ("\n", "\n\n", "\n\n\n", "  ", "▁▁▁", "<tool>")  # converters write spaces in both ways
ALPHABET = "ab▁é"


def written(pieces: Pieces, folder: Path) -> Tokenizer:
    write_tokenizer(GgufFile(pieces.write(folder / "m.gguf")), folder, 128)
    return Tokenizer.load(folder)


@st.composite
def trained(draw) -> list[str]:
    """Pieces as training makes them: each new one is made of two that are there."""
    pieces = list(ALPHABET)
    for _ in range(draw(st.integers(0, 24))):
        piece = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if piece not in pieces and len(piece) <= 8 and piece.strip("▁"):
            pieces.append(piece)
    return pieces


TEXTS = st.lists(
    st.sampled_from(["a", "b", " ", "é", "ab", "aba", "\n", "  ", "▁", "日", "🎉", "<tool>", "<0x41>", "x"]), max_size=24
)


@given(normal=trained(), texts=st.lists(TEXTS.map("".join), min_size=1, max_size=6))
@settings(max_examples=120)
def test_ids_are_those_of_the_rule(normal, texts):
    pieces = Pieces(normal, DEFINED)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = written(pieces, Path(folder))
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == ids_of(text, pieces.tokens, pieces.scores), repr(text)
        assert tokenizer.decode(ids) == text.replace("▁", " ")
        output = OutputText(tokenizer)
        assert "".join(output.push(index).text for index in ids) + output.flush() == text.replace("▁", " ")


@given(normal=trained(), text=TEXTS.map("".join))
@settings(max_examples=60)
def test_a_space_is_added_where_the_file_says_so(normal, text):
    """So Llama 2 has it. Decoding takes it away again."""
    pieces = Pieces(normal, prefix=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = written(pieces, Path(folder))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == ids_of(text, pieces.tokens, pieces.scores, prefix=True)
    assert tokenizer.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("normal", "text", "expected"),
    [
        (["a", "b", "ab", "ba"], "aba", ["ab", "a"]),
        (["a", "b", "ba", "ab"], "aba", ["a", "ba"]),
        (["a", "b", "c", "ab", "ba", "abc", "aba", "cab"], "cabaab", ["c", "aba", "ab"]),
    ],
)
def test_the_best_score_is_joined_first(tmp_path, normal, text, expected):
    """The pieces stand in the order of their scores."""
    pieces = Pieces(normal)
    ids = written(pieces, tmp_path).encode(text, add_special_tokens=False)
    assert [pieces.tokens[index][0] for index in ids] == expected
    assert ids == ids_of(text, pieces.tokens, pieces.scores)


LLAMA_RUNS = (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11)
"""The lengths of the runs of spaces in Llama 2's vocabulary and in Mistral's, in their order. All have one score."""


@given(lengths=st.just(LLAMA_RUNS) | st.sets(st.integers(2, 12)), runs=st.lists(st.integers(0, 60), min_size=1, max_size=4))
@settings(max_examples=150)
def test_runs_of_spaces_with_one_score_are_cut_from_the_left(lengths, runs):
    """A pair of the same score that stands further left is joined first, whatever it makes."""
    pieces = Pieces(["a", "▁", "▁a"], alike=["▁" * length for length in lengths], prefix=True)
    text = "a".join(" " * count for count in runs)
    with tempfile.TemporaryDirectory() as folder:
        ids = written(pieces, Path(folder)).encode(text, add_special_tokens=False)
    assert ids == ids_of(text, pieces.tokens, pieces.scores, prefix=True)


def test_prompts_begin_with_a_token_unless_the_file_says_no(tmp_path):
    assert written(Pieces("ab"), tmp_path).encode("a")[0] == 2
    assert written(Pieces("ab", more={"tokenizer.ggml.add_bos_token": False}), tmp_path).encode("a")[0] != 2


def test_control_tokens_can_be_written_in_a_prompt_and_are_no_text(tmp_path):
    tokenizer = written(Pieces("ab", DEFINED), tmp_path)
    ids = tokenizer.encode("<bos>a<unk><tool>\n\n\n\n<eos>", add_special_tokens=False)
    assert [ids[0], ids[2], ids[-1]] == [2, 3, 1]
    assert tokenizer.decode(ids) == "a<tool>\n\n\n\n"


REFUSED = {
    "an end": (Pieces("ab", more={"tokenizer.ggml.add_eos_token": True}), "add_eos_token is not supported"),
    "spaces": (Pieces("ab", more={"tokenizer.ggml.remove_extra_whitespaces": True}), "remove_extra_whitespaces is not"),
    "twice": (Pieces("aba"), "has 1 tokens twice"),
    "spaces of a user": (Pieces("ab", ("  ",), prefix=True), "user-defined token '  ' holds a space"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_would_give_other_ids_is_refused(tmp_path, name):
    pieces, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        written(pieces, tmp_path)


def test_a_vocabulary_without_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sentencepiece_files.BYTES", [])
    with pytest.raises(ConfigError, match="lacks tokens for some bytes"):
        written(Pieces("ab"), tmp_path)
