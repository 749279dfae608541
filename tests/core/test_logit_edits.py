"""Counts grow with the tokens and equal those that are taken anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.sampling import LogitEdits, SamplingParams, edits_of

TOKENS = st.lists(st.integers(0, 6), max_size=30)


def counts(edits: LogitEdits) -> dict[int, int]:
    return dict(zip(edits.seen_ids, edits.output_counts, strict=True))


@given(prompt=TOKENS, output=TOKENS, cuts=st.lists(st.integers(0, 60)), repetition=st.sampled_from([1.0, 1.5]))
def test_counting_as_tokens_come_equals_counting_them_at_once(prompt, output, cuts, repetition):
    params = SamplingParams(presence_penalty=0.5, repetition_penalty=repetition)
    tokens = [*prompt, *output]
    edits = edits_of(params, len(prompt))
    for cut in sorted(cut for cut in cuts if len(prompt) <= cut <= len(tokens)):
        edits.catch_up(tokens[:cut])
    edits.catch_up(tokens)
    seen = {*prompt, *output} if repetition != 1.0 else set(output)
    assert counts(edits) == {token: output.count(token) for token in seen}


def test_parameters_that_change_no_logit_have_no_edits():
    assert edits_of(SamplingParams(top_p=0.5, logprobs=3), 4) is None


def test_biases_lie_as_given():
    edits = edits_of(SamplingParams(logit_bias=((9, -100.0), (2, 0.5))), 4)
    assert (list(edits.bias_ids), list(edits.bias)) == ([9, 2], [-100.0, 0.5])
    edits.catch_up([1, 2, 3, 4])
    assert counts(edits) == {}
