"""Conversations: drawn ones and those of a user's file. A later prompt repeats what was said, and nothing waits in a circle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.request import AnswerOf, Arrivals, BenchRequest
from pdserve_bench.workload.spec import read_spec
from pdserve_bench.workload.workload import Workload
from tests.bench.workload.test_generated import Letters

AT_ONCE = Arrivals(kind="inf")


def first(form: str, count: int, *overrides: str) -> list[BenchRequest]:
    return list(islice(Workload(read_spec(form, overrides), Letters()).requests(AT_ONCE, 0), count))


def check(requests: list[BenchRequest]) -> None:
    """Check the numbers, that nobody waits for a later request, and that each prompt has the tokens that it says."""
    for place, one in enumerate(requests):
        assert one.number == place
        assert all(earlier < place for earlier in one.after)
        assert (one.send_at_s is None) == bool(one.after)
        answers = [part.number for part in one.prompt if isinstance(part, AnswerOf)]
        assert len(set(answers)) == len(answers)
        lengths = [requests[part.number].max_tokens if isinstance(part, AnswerOf) else len(part) for part in one.prompt]
        assert sum(lengths) == one.prompt_tokens


@settings(max_examples=12)
@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 9))
def test_drawn_conversations_continue_what_was_said(turns, forks, prefix):
    form = f"sessions:turns={turns},fork_share={forks},prompt=7,output=3,prefix_tokens={prefix}"
    requests = first(form, 60, f"max_model_len={prefix + 2 * turns * 10}")
    check(requests)
    for one in requests:
        parents = [requests[number] for number in one.after]
        assert len(parents) <= 2
        assert all(parent.session == one.session for parent in parents)
        if parents:
            assert one.prompt[: len(parents[0].prompt)] == parents[0].prompt
            assert {AnswerOf(parent.number) for parent in parents} <= set(one.prompt)
            assert len(one.prompt[-1]) == 7, "the new tokens of the user stand last"
        assert one.prompt_tokens + one.max_tokens <= prefix + 2 * turns * 10


def test_a_fork_is_two_turns_after_one_and_a_join_is_one_after_both():
    root, left, right, join = first("sessions:turns=3,fork_share=1,prompt=4,output=2", 4)
    assert (root.after, left.after, right.after, join.after) == ((), (0,), (0,), (1, 2))
    assert left.prompt[:-1] == right.prompt[:-1] == (*root.prompt, AnswerOf(0))
    assert join.prompt[:-1] == (*left.prompt, AnswerOf(1), right.prompt[-1], AnswerOf(2))


def test_think_times_are_drawn_and_capped():
    drawn = [one.think_s for one in first("sessions:turns=2,think_s=3,prompt=4,output=2", 4000) if one.after]
    assert fmean(drawn) == pytest.approx(3, rel=0.1)
    capped = [one.think_s for one in first("sessions:turns=2,think_s=3,think_cap_s=2,prompt=4,output=2", 4000) if one.after]
    assert capped == [min(one, 2) for one in drawn]
    assert {one.think_s for one in first("sessions:turns=2,think=fixed,think_s=3,prompt=4", 20) if one.after} == {3.0}


def lines_of(tmp_path: Path, *lines: dict[str, object]) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_users_file_may_hold_text_ids_and_lengths(tmp_path):
    path = lines_of(
        tmp_path,
        {"prompt": "abc", "output_tokens": 4, "timestamp_s": 5, "slo_class": "chat", "session": "x"},
        {"prompt_ids": [40, 41], "max_tokens": 5, "timestamp_s": 5.5},
        {"prompt_tokens": 30, "timestamp_s": 8},
    )
    workload = Workload(read_spec(f"jsonl:{path},output=9", ["arrivals.kind=trace"]), Letters())
    one, two, three = workload.requests(workload.spec.arrivals, 0)
    assert (one.prompt, one.prompt_tokens, one.max_tokens, one.slo_class, one.session) == (("abc",), 4, 4, "chat", "x")
    assert (two.prompt, two.prompt_tokens, two.max_tokens) == (((40, 41),), 2, 5)
    assert (len(three.prompt[0]), three.prompt_tokens, three.max_tokens) == (30, 30, 9)
    assert [one.send_at_s, two.send_at_s, three.send_at_s] == [0.0, 0.5, 3.0]
    assert (workload.mean_prompt_tokens, workload.mean_output_tokens) == (12.0, 6.0)


def conversation() -> Iterator[dict[str, object]]:
    yield {"id": "a", "prompt": "hello ", "max_tokens": 3}
    yield {"id": "b", "after": "a", "prompt": "left ", "max_tokens": 3, "think_s": 9}
    yield {"id": "c", "after": ["a"], "prompt": "right ", "max_tokens": 3}
    yield {"id": "d", "after": ["b", "c"], "prompt": "both", "max_tokens": 3}
    yield {"after": ["a", "b"], "prompt": "on", "max_tokens": 3}
    yield {"after": "b", "prompt": "alone", "max_tokens": 3, "history": False}


def test_the_lines_of_a_file_may_be_a_conversation(tmp_path):
    a, b, c, d, e, f = first(f"jsonl:{lines_of(tmp_path, *conversation())},think_cap_s=2", 9)
    assert [one.after for one in (a, b, c, d, e, f)] == [(), (0,), (0,), (1, 2), (0, 1), (1,)]
    assert b.prompt == ("hello ", AnswerOf(0), "left ")
    assert d.prompt == ("hello ", AnswerOf(0), "left ", AnswerOf(1), "right ", AnswerOf(2), "both")
    assert e.prompt == ("hello ", AnswerOf(0), "left ", AnswerOf(1), "on"), "the answer of a stands in the prompt of b already"
    assert f.prompt == ("alone",)
    assert (b.think_s, c.think_s) == (2.0, 0.0)
    assert e.prompt_tokens == 1 + 6 + 3 + 5 + 3 + 2, "the first text has a token of its own at its beginning"


def test_a_repeated_conversation_names_its_own_requests(tmp_path):
    requests = first(f"jsonl:{lines_of(tmp_path, *conversation())},repeat=true", 18)
    assert [one.number for one in requests] == list(range(18))
    assert requests[15].after == (13, 14)
    assert requests[13].prompt == ("hello ", AnswerOf(12), "left ")


def test_a_turn_that_is_too_long_takes_those_after_it_with_it(tmp_path):
    path = lines_of(tmp_path, *conversation())
    workload = Workload(read_spec(f"jsonl:{path},max_prompt_tokens=15"), Letters())
    requests = list(workload.requests(AT_ONCE, 0))
    assert [one.prompt for one in requests] == [("hello ",), ("hello ", AnswerOf(0), "left "), ("alone",)]
    assert workload.notes == (
        "2 of 6 prompts are over 15 tokens and are left out.",
        "1 of 6 requests come after one that is left out, and are left out too.",
    )


def test_a_text_that_is_too_long_is_cut_between_tokens(tmp_path):
    path = lines_of(tmp_path, {"prompt": "abcdefgh", "max_tokens": 3}, {"prompt_ids": [65, 66, 67, 68, 69], "max_tokens": 3})
    text, ids = first(f"jsonl:{path},max_prompt_tokens=4", 9)
    assert (text.prompt, text.prompt_tokens) == (("abc",), 4)
    assert (ids.prompt, ids.prompt_tokens) == (((65, 66, 67, 68),), 4)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"prompt": "x"}, "line 2: max_tokens must be given"),
        ({"max_tokens": 3}, "line 2: exactly one of prompt, prompt_ids and prompt_tokens"),
        ({"prompt": "x", "prompt_ids": [1], "max_tokens": 3}, "line 2: exactly one of"),
        ({"prompt": "x", "max_tokens": 3, "output_tokens": 3}, "line 2: max_tokens and output_tokens mean the same"),
        ({"prompt": "x", "max_token": 3}, "line 2: Object contains unknown field `max_token`"),
        ({"prompt": "x", "max_tokens": 0}, r"line 2: Expected `int` >= 1 - at `\$.max_tokens"),
        ({"prompt_ids": [-1], "max_tokens": 3}, r"line 2: Expected `int` >= 0 - at `\$.prompt_ids"),
        ({"prompt": "x", "max_tokens": 3, "after": "z"}, "line 2: after names 'z', which is the id of no line above"),
        ({"prompt": "x", "max_tokens": 3, "id": "z", "after": "z"}, "line 2: after names 'z'"),
        ({"prompt": "x", "max_tokens": 3, "id": "a"}, "line 2: id 'a' is already that of line 1"),
        ({"prompt": "x", "max_tokens": 3, "think_s": 1}, "line 2: think_s has no meaning without after"),
        ({"prompt": "x", "max_tokens": 3, "timestamp_s": 1}, "line 2: timestamp_s must stand in all lines without after"),
        ({"prompt_tokens": 4, "max_tokens": 3, "after": "a"}, "line 2: prompt is text where an earlier turn has token ids"),
        ({"prompt": "x", "max_tokens": 95}, "line 2: 2 prompt and 95 answer tokens are over max_model_len 96"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path, line, named):
    path = lines_of(tmp_path, {"id": "a", "prompt": "hello", "max_tokens": 3}, line)
    with pytest.raises(ConfigError, match=named):
        Workload(read_spec(f"jsonl:{path}", ["max_model_len=96"]), Letters())


def test_a_conversation_without_an_end_is_refused(tmp_path):
    turns = (
        {"id": str(turn), "after": [str(turn - 1)] if turn else [], "prompt_tokens": 1, "max_tokens": 1} for turn in range(300)
    )
    with pytest.raises(ConfigError, match="line 258: the conversation has more than 256 turns"):
        Workload(read_spec(f"jsonl:{lines_of(tmp_path, *turns)}"), Letters())


def test_times_of_a_users_file_are_in_order(tmp_path):
    path = lines_of(tmp_path, *({"prompt": "x", "max_tokens": 3, "timestamp_s": time_s} for time_s in (2, 1)))
    with pytest.raises(ConfigError, match="line 2: timestamp_s 1 is earlier than that of a line above, 2"):
        Workload(read_spec(f"jsonl:{path}"), Letters())
