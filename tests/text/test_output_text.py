"""Output as text, a fold over token ids: complete, resumable anywhere, and silent about what a stop may take back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.output import OutputText, TextStep

MODELS = ("tiny", "default")
SAMPLE = "The cat 👩‍👩‍👧‍👦 sat; naïve 日本語, END of it.\n\nUser: no END"
BROKEN = "\ufffd"


def ids_of(data, tokenizer) -> list[int]:
    """Real text, random ids, specials, and single bytes that rarely make characters."""
    tokens = st.integers(0, 260) | st.integers(0, tokenizer.vocab_size + 5)
    text = st.text(st.sampled_from(SAMPLE), max_size=12).map(tokenizer.encode)
    return list(itertools.chain(*data.draw(st.lists(text | st.lists(tokens, max_size=4), max_size=8))))


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_without_a_stop_the_texts_make_up_the_decoded_ids(tokenizer_of, model, data):
    tokenizer = tokenizer_of[model]
    ids = ids_of(data, tokenizer)
    output = OutputText(tokenizer, stop=["@@never@@"])
    steps = [output.push(i) for i in ids]
    assert not any(step.stopped for step in steps)
    assert "".join(step.text for step in steps) + output.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data(), stop=st.lists(st.text(st.sampled_from(SAMPLE + BROKEN), min_size=1, max_size=4), max_size=3))
@settings(max_examples=150, deadline=None)
def test_a_second_worker_fed_the_same_ids_goes_on_alike(tokenizer_of, model, data, stop):
    tokenizer = tokenizer_of[model]
    ids = ids_of(data, tokenizer)
    cut = data.draw(st.integers(0, len(ids)))
    min_tokens = data.draw(st.integers(0, 12))
    first, second = (OutputText(tokenizer, stop=stop, min_tokens=min_tokens) for _ in range(2))
    for token_id in ids[:cut]:
        assert first.push(token_id) == second.push(token_id)
    resumed = OutputText(tokenizer, stop=stop, min_tokens=min_tokens)
    for token_id in ids[:cut]:
        resumed.push(token_id)
    assert [first.push(i) for i in ids[cut:]] == [resumed.push(i) for i in ids[cut:]]
    assert first.flush() == resumed.flush()


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data(), stop=st.text(st.sampled_from("ENDo. \n"), min_size=1, max_size=3), min_tokens=st.integers(0, 20))
@settings(max_examples=150, deadline=None)
def test_a_stop_counts_from_the_first_token_that_may_complete_it(tokenizer_of, model, data, stop, min_tokens):
    """Against the definition: after each token, is there a match that ends within that token's text?"""
    tokenizer = tokenizer_of[model]
    ids = ids_of(data, tokenizer)
    output = OutputText(tokenizer, stop=[stop], min_tokens=min_tokens)
    given_out, whole = "", ""
    characters = tokenizer.stream()
    for count, token_id in enumerate(ids, start=1):
        before = len(whole)
        whole += characters.push(tokenizer.token_bytes(token_id))
        step = output.push(token_id)
        given_out += step.text
        ends = [end for end in range(before + 1, len(whole) + 1) if whole[:end].endswith(stop)]
        assert step.stopped == bool(ends and count >= min_tokens)
        assert whole.startswith(given_out)
        if step.stopped:
            assert given_out == whole[: max(len(given_out), ends[0] - len(stop))]
            assert output.push(token_id) == TextStep("", True)
            assert output.flush() == ""
            return


@pytest.mark.parametrize("model", MODELS)
def test_characters_split_over_tokens_come_out_whole(tokenizer_of, model):
    tokenizer = tokenizer_of[model]
    ids = tokenizer.encode("👩‍👩‍👧‍👦🎉")
    assert len(ids) > 8  # else nothing is split
    output = OutputText(tokenizer)
    texts = [output.push(i).text for i in ids]
    assert BROKEN not in "".join(texts)
    assert "".join(texts) == "👩‍👩‍👧‍👦🎉"
    assert output.flush() == ""


@pytest.mark.parametrize("model", MODELS)
def test_half_a_character_at_the_end_is_a_replacement_character(tokenizer_of, model):
    tokenizer = tokenizer_of[model]
    output = OutputText(tokenizer)
    ids = tokenizer.encode("🎉")[:-1]
    assert "".join(output.push(i).text for i in ids) == ""
    assert output.flush() == BROKEN


def test_a_stop_split_over_many_tokens_never_shows_its_beginning(tokenizer_of):
    tokenizer = tokenizer_of["tiny"]
    ids = [tokenizer.encode(char)[0] for char in "yes### Instruction: more"]
    output = OutputText(tokenizer, stop=["### Instruction:", "### Input:"])
    steps = [output.push(i) for i in ids]
    assert "".join(step.text for step in steps) == "yes"
    assert [step.stopped for step in steps].index(True) == len("yes### Instruction:") - 1


def test_what_was_held_for_a_stop_is_given_out_at_the_end(tokenizer_of):
    tokenizer = tokenizer_of["tiny"]
    output = OutputText(tokenizer, stop=["###"])
    assert "".join(output.push(i).text for i in tokenizer.encode("a##")) == "a"
    assert output.flush() == "##"
    assert output.flush() == ""
