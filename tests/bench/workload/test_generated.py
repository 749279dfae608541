"""Drawn requests: their lengths, that no two begin alike by accident, and that nothing is made before it is asked for."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.request import Alphabet, Arrivals, BenchRequest, Listed, Lognormal, TokenMaker, Uniform, draw, most
from pdserve_bench.workload.spec import read_spec
from pdserve_bench.workload.workload import Workload

AT_ONCE = Arrivals(kind="inf")


class Letters:
    """A tokenizer whose tokens are the characters; those below a blank are special."""

    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [min(ord(one), 255) for one in text]

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(chr(one) for one in ids if one >= 32)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id >= 32 else b""


def first(form: str, count: int, *overrides: str, seed: int = 0, run: int = 0) -> list[BenchRequest]:
    return list(islice(Workload(read_spec(form, overrides), Letters()).requests(AT_ONCE, seed, run), count))


def ids(request: BenchRequest) -> tuple[int, ...]:
    (part,) = request.prompt
    assert isinstance(part, tuple)
    return part


@given(
    st.one_of(
        st.integers(1, 500),
        st.builds(Uniform, mean=st.integers(1, 500), range_ratio=st.floats(0, 0.99)),
        st.builds(Lognormal, mean=st.integers(1, 500), sigma=st.floats(0.1, 5), most=st.integers(1, 500)),
        st.builds(Listed, values=st.lists(st.integers(1, 500), min_size=1).map(tuple)),
    ),
    st.integers(),
)
def test_no_length_leaves_its_bounds(lengths, seed):
    random = Random(seed)
    assert all(1 <= draw(lengths, random) <= most(lengths) for _ in range(20))


def test_a_lognormal_length_has_its_mean_and_a_histogram_its_weights():
    random = Random(1)
    assert fmean(draw(Lognormal(mean=300, sigma=0.8, most=100_000), random) for _ in range(20_000)) == pytest.approx(
        300, rel=0.03
    )
    drawn = Counter(draw(Listed(values=(10, 20, 30), weights=(1, 0, 3)), random) for _ in range(8_000))
    assert set(drawn) == {10, 30}
    assert drawn[30] / drawn[10] == pytest.approx(3, rel=0.15)


@given(st.integers(16, 70_000), st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.integers(1, 1 << 31), st.integers(0, 3))
def test_the_first_tokens_of_two_numbers_differ(vocabulary, seed, number, distance, run):
    alphabet = Alphabet(range(vocabulary))
    tokens = TokenMaker(alphabet, seed, run)
    head = alphabet.head_tokens
    assert tokens.ids(number, 20)[:head] != tokens.ids(number + distance, 20)[:head]
    assert tokens.ids(number, 20) == TokenMaker(alphabet, seed, run).ids(number, 20)
    assert tokens.ids(number, 20)[:5] == tokens.ids(number, 5), "a shorter prompt is the beginning of a longer one"
    assert max(tokens.ids(number, 200)) < vocabulary


def test_random_prompts_share_their_prefix_and_nothing_else():
    requests = first("random:64/8,prefix_tokens=10", 300)
    assert [one.number for one in requests] == list(range(300))
    assert {(len(ids(one)), one.prompt_tokens, one.max_tokens) for one in requests} == {(74, 74, 8)}
    assert len({ids(one)[:10] for one in requests}) == 1
    assert len({ids(one)[10:14] for one in requests}) == 300
    assert len({ids(one)[10] for one in requests[:224]}) == 224, "the first token alone tells as many apart as there are ids"
    assert all(token >= 32 for one in requests for token in ids(one)), "special tokens are no part of a random prompt"


def test_another_run_has_other_tokens_of_the_same_lengths():
    one, other = (
        first("random:64/8", 20, "source.prompt={kind: uniform, mean: 60, range_ratio: 0.5}", run=run) for run in (0, 1)
    )
    assert [(a.prompt_tokens, a.max_tokens) for a in one] == [(a.prompt_tokens, a.max_tokens) for a in other]
    assert not {ids(a)[:16] for a in one} & {ids(a)[:16] for a in other}
    assert len({a.prompt_tokens for a in one}) > 5


def test_another_seed_has_other_lengths():
    shape = "source.prompt={kind: uniform, mean: 600, range_ratio: 0.5}"
    assert [one.prompt_tokens for one in first("random:64/8", 9, shape)] != [
        one.prompt_tokens for one in first("random:64/8", 9, shape, seed=1)
    ]


def test_classes_are_mixed_by_weight_with_their_own_lengths():
    requests = first("random:64/8", 4000, "classes={chat: 3, batch: {weight: 1, prompt: 5, output: 2}}")
    counted = Counter((one.slo_class, one.prompt_tokens, one.max_tokens) for one in requests)
    assert set(counted) == {("chat", 64, 8), ("batch", 5, 2)}
    assert counted["chat", 64, 8] / 4000 == pytest.approx(0.75, abs=0.03)


def test_pieces_of_a_text_begin_at_different_places(tmp_path):
    text = "".join(chr(Random(place).randrange(32, 127)) for place in range(997))
    (tmp_path / "a.txt").write_text(text)
    requests = first(f"text:40/8,file={tmp_path / 'a.txt'}", 997)
    endless = text + text
    places = [endless.index("".join(map(chr, ids(one)))) for one in requests]
    assert sorted(places) == list(range(997)), "every place is used once before any is used again"


def test_a_piece_may_be_longer_than_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    (request,) = first(f"text:8/8,file={tmp_path / 'a.txt'}", 1)
    assert "".join(map(chr, ids(request))) in "abcabcabcabc"


def test_the_text_of_pythons_documentation_is_there():
    (request,) = first("text:50/8", 1)
    assert request.prompt_tokens == 50


@pytest.mark.parametrize(
    ("form", "overrides", "named"),
    [
        (
            "random:1000/24",
            ["max_model_len=1023"],
            "workload.source: prompt and output may take 1024 tokens.*max_model_len 1023",
        ),
        ("random:9/9,prefix_tokens=90", ["max_model_len=100"], "may take 108 tokens"),
        ("sessions:turns=4,prompt=20,output=10", ["max_model_len=119"], "may take 120 tokens, more than max_model_len 119"),
        ("random:1/1", ["classes.b={weight: 1, prompt: 50}", "max_model_len=50"], r"workload.classes.b: .* 51 tokens"),
    ],
)
def test_lengths_over_the_models_limit_are_refused_by_name(form, overrides, named):
    with pytest.raises(ConfigError, match=named):
        read_spec(form, overrides)


def test_random_tokens_need_a_vocabulary():
    with pytest.raises(ConfigError, match=r"workload.vocab_size must be set"):
        Workload(read_spec("random:10/10"), None)
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        Workload(read_spec("text:10/10", ["vocab_size=100"]), None)
