"""Beam search on random probabilities: it finds what a plain reference finds, and all there is when it is wide enough."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from router.choices.beams import Beam, BeamSearch

END = 0
Model = Callable[[tuple[int, ...]], list[float]]


def random_model(seed: int, vocab: int, *, likely_end: bool = False, coarse: bool = False) -> Model:
    """The log-probabilities of all tokens after an output. `coarse` makes equal ones likely."""

    def model(ids: tuple[int, ...]) -> list[float]:
        chance = random.Random(repr((seed, ids)))
        logits = [float(chance.randrange(2)) if coarse else chance.uniform(-3, 3) for _ in range(vocab)]
        logits[END] += 3.0 if likely_end else 0.0
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return model


def likeliest(logprobs: list[float], count: int) -> list[tuple[int, float]]:
    return sorted(enumerate(logprobs), key=lambda one: (-one[1], one[0]))[:count]


def search(model: Model, width: int, length: int, penalty: float) -> tuple[list[Beam], int]:
    """The result and the number of steps."""
    beams = BeamSearch(width, length, length_penalty=penalty, end_ids=[END])
    steps = 0
    while beams.live:
        assert len(beams.live) <= width
        assert len({len(beam.ids) for beam in beams.live}) == 1
        assert len(set(beams.live)) == len(beams.live)
        beams.advance([likeliest(model(beam.ids), 2 * width) for beam in beams.live])
        steps += 1
    return beams.result(), steps


def reference(model: Model, width: int, length: int, penalty: float) -> list[Beam]:
    """The steps of vLLM's server, which keeps every finished beam and never stops early."""
    live, done = [Beam((), 0.0)], []
    for _ in range(length):
        grown = []
        for beam in live:
            for token, logprob in likeliest(model(beam.ids), 2 * width):
                new = Beam((*beam.ids, token), beam.logprob + logprob, token == END)
                (done if new.ended else grown).append(new)
        live = sorted(grown, key=lambda beam: beam.logprob, reverse=True)[:width]
    return sorted(done + live, key=lambda beam: beam.logprob / len(beam.ids) ** penalty, reverse=True)[:width]


@given(
    seed=st.integers(0, 1 << 30),
    vocab=st.integers(2, 24),
    width=st.integers(1, 10),
    length=st.integers(1, 8),
    penalty=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0, 2.0]),
    likely_end=st.booleans(),
    coarse=st.booleans(),
)
def test_the_result_is_that_of_a_search_that_never_stops_early(
    seed: int, vocab: int, width: int, length: int, penalty: float, likely_end: bool, coarse: bool
) -> None:
    model = random_model(seed, vocab, likely_end=likely_end, coarse=coarse)
    found, steps = search(model, width, length, penalty)
    assert found == reference(model, width, length, penalty)
    assert steps <= length


@given(seed=st.integers(0, 1 << 30), penalty=st.sampled_from([0.0, 1.0, 1.5]))
def test_a_search_as_wide_as_all_prefixes_finds_the_best_of_all_outputs(seed: int, penalty: float) -> None:
    """Of 3 tokens one ends: there are 1, 2 and 4 prefixes of 0, 1 and 2 tokens that go on, and 15 outputs of up to 3."""
    model, length, width = random_model(seed, 3), 3, 8

    def outputs() -> list[Beam]:
        every = []
        for count in range(1, length + 1):
            for ids in itertools.product(range(3), repeat=count):
                if END in ids[:-1] or (ids[-1] != END and count < length):
                    continue
                logprob = 0.0
                for i, token in enumerate(ids):
                    logprob += model(ids[:i])[token]
                every.append(Beam(ids, logprob, ids[-1] == END))
        return sorted(every, key=lambda beam: beam.logprob / len(beam.ids) ** penalty, reverse=True)

    assert len(outputs()) == 1 + 2 + 4 + 8
    assert search(model, width, length, penalty)[0] == outputs()[:width]


def test_a_search_ends_early_when_its_ends_are_likely() -> None:
    found, steps = search(random_model(1, 16, likely_end=True), 2, 200, 0.0)
    assert steps < 20
    assert len(found) == 2
    assert all(beam.ended for beam in found)


def test_width_one_is_the_greedy_output() -> None:
    model = random_model(3, 10)
    (found,), _ = search(model, 1, 6, 0.0)
    ids: tuple[int, ...] = ()
    while len(ids) < len(found.ids):
        ids += (likeliest(model(ids), 1)[0][0],)
    assert ids == found.ids
