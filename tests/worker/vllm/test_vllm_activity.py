"""The times for which a server has work, against a count of every moment."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.worker.vllm.activity import Activity, Outstanding

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["prompt", "output", "computed", "end"]), st.integers(0, 9)))


@given(EVENTS)
def test_busy_times_are_those_in_which_prompts_or_outputs_were_owed(events: list[tuple[int, str, int]]) -> None:
    activity, open_, now_s, prompt_s, decode_s, tokens = Activity(), [], 0, 0, 0, 0
    for wait_s, event, which in events:
        for _ in range(wait_s):
            prompts = sum(each.prompt for each in open_)
            prompt_s += prompts > 0
            decode_s += prompts == 0 and bool(open_)
        now_s += wait_s
        if event in ("prompt", "output"):
            open_.append(activity.begin(now_s, prompt=event == "prompt"))
        elif open_ and event == "computed" and (chosen := open_[which % len(open_)]).prompt:
            activity.computed(chosen, 10, now_s)
            tokens += 10
        elif open_ and event == "end":
            chosen = open_.pop(which % len(open_))
            activity.end(chosen, now_s)
            activity.end(chosen, now_s)
    activity.advance(now_s)
    assert (activity.prompt_busy_s, activity.decode_busy_s, activity.computed_prompt_tokens) == (prompt_s, decode_s, tokens)


def test_prompts_that_are_computed_together_make_a_high_rate() -> None:
    """Four prompts of 100 tokens that are all there from the start and are computed in two seconds: 200 tokens a second."""
    activity = Activity()
    for start_s in (0.0, 10.0, 20.0):
        asked = [activity.begin(start_s, prompt=True) for _ in range(4)]
        for number, each in enumerate(asked):
            activity.computed(each, 100, start_s + 0.5 * (number + 1))
            activity.end(each, start_s + 5.0)
    assert activity.prompt_tokens_per_s == pytest.approx(200.0)
    assert (activity.prompt_busy_s, activity.decode_busy_s, activity.prompts) == (6.0, 9.0, 12)


def test_the_time_of_a_step_is_that_between_two_answers() -> None:
    activity = Activity()
    asked: list[Outstanding] = [activity.begin(0.0, prompt=False) for _ in range(2)]
    for step in range(1, 40):
        for each in asked:
            activity.answered(each, 1, 3.0 + 0.02 * step)
    assert activity.decode_step_s == pytest.approx(0.02)
    assert activity.output_tokens == 78
