"""The reader of streams: how the bytes are cut changes nothing."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.load.http_target import SseReader
from pdserve_bench.load.target import LoadAnswer, LoadCall
from tests.bench.load.http_server import event, token

STREAM = b": comment\r\nevent: x\n" + b"".join(
    [
        token("a"),
        token("\u00e9\n"),
        token(""),
        event(choices=[{"text": "z", "finish_reason": "stop"}]).replace(b"\n\n", b"\r\n\r\n"),
        event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}),
        b"data: [DONE]\n\n",
    ]
)


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_cuts_change_nothing(cuts: list[int]) -> None:
    answer = LoadAnswer()
    reader = SseReader(LoadCall(0, "x", 8), answer)
    reader.head(200, {})
    places = [0, *sorted(cuts), len(STREAM)]
    for now_s, (start, stop) in enumerate(pairwise(places)):
        reader.body(STREAM[start:stop], now_s)
    assert reader.done
    assert (answer.error, "".join(answer.texts), len(answer.arrivals)) == ("", "a\u00e9\nz", 3)
    assert (answer.prompt_tokens, answer.output_tokens, answer.served.cached_prompt_tokens) == (9, 4, 2)
    times_s = [time_s for time_s, _ in answer.arrivals]
    assert times_s == sorted(times_s)
