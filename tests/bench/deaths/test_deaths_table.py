"""What the table of deaths says, for what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.deaths.__main__ import CASES, DOCUMENT
from bench.deaths.table import BEGIN, END, Ask, Death, Span, placed, row, served_again_s, table

BEFORE = {"prefill-0": 1, "decode-0": 2, "router": 3}


def death(spans: tuple[Span, ...] = (), asks: tuple[Ask, ...] = (), note: str = "", **after: int) -> Death:
    changed = {name.replace("_", "-"): pid for name, pid in after.items()}
    return Death("a part", spans, asks, BEFORE, BEFORE | changed, 20.0, note)


def test_lost_streams_are_counted_apart_from_the_pauses_of_the_others() -> None:
    spans = (Span(False, 0.05), Span(True, 9.0, "unavailable"), Span(False, 2.0), Span(False, 0.25))
    assert row(death(spans))[1:3] == ("1 of 4 (unavailable)", "250 ms, 2.0 s")


def test_without_a_stream_that_went_on_no_pause_is_told() -> None:
    assert row(death((Span(True, 3.0),)))[1:3] == ("1 of 1", "-")


def test_service_is_back_with_the_first_answer_after_the_last_failure() -> None:
    asks = (Ask(0.1, 0.2, True), Ask(0.5, 4.0, False), Ask(1.0, 3.5, True), Ask(1.2, 3.0, True))
    assert served_again_s(asks) == 3.0
    assert row(death(asks=asks))[3] == "after 3.0 s (1 of 4 failed)"
    assert row(death(asks=(Ask(0.1, 0.15, True),)))[3] == "after 150 ms, none failed"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans()), max_size=8))
def test_service_is_never_back_before_a_request_that_failed_was_sent(seen: list[tuple[int, int, bool]]) -> None:
    asks = [Ask(sent, sent + took, served) for sent, took, served in seen]
    again_s = served_again_s(asks)
    failed = [ask.sent_s for ask in asks if not ask.served]
    if again_s is not None:
        assert not failed or again_s >= max(failed)
        assert again_s in [ask.ended_s for ask in asks if ask.served]


@pytest.mark.parametrize("asks", [(), (Ask(0.1, 9.0, False),)])
def test_a_service_that_does_not_come_back_says_so(asks: tuple[Ask, ...]) -> None:
    assert row(death(asks=asks))[3] == f"not within 20 s ({len(asks)} of {len(asks)} failed)"


def test_new_and_gone_processes_are_named() -> None:
    assert row(death())[4] == "all stayed"
    assert row(death(decode_0=9, note="said"))[4] == "new: decode-0; the others stayed; said"
    gone = Death("up", (), (), BEFORE, {}, 20.0)
    assert row(gone)[4] == "gone: decode-0, prefill-0, router"


def test_the_table_replaces_what_stood_between_the_markers() -> None:
    text = table([death(note="a | b")], "a CPU", "abc", "2026-01-01", "make it")
    assert text.startswith("Measured on a CPU, commit abc, 2026-01-01, with `make it`.")
    assert "a \\| b" in text
    page = placed(f"head\n{BEGIN}\nold\n{END}\ntail\n", text)
    assert page == f"head\n{BEGIN}\n{text}\n{END}\ntail\n"
    assert placed(page, text) == page


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_page_without_its_markers_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        placed(page, "table")


def test_the_page_has_a_place_for_the_table() -> None:
    assert placed(DOCUMENT.read_text(), "x")
    assert all(0 < case.window_s <= 90 for case in CASES.values())  # all rows together take less than ten minutes
