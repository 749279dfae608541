"""A request may not take a longer way than it does: whoever makes it shorter lowers the limits."""

from __future__ import annotations

from tools.hops import measure

MOST_FILES = 91
MOST_CHANGES = 186
MOST_TOKEN_CALLS = {"router": 60, "prefill": 4, "decode": 90}


def test_a_request_takes_no_longer_way_than_before() -> None:
    hops = measure()
    assert len(hops.files) <= MOST_FILES, sorted(hops.files)
    assert hops.command_changes <= MOST_CHANGES, hops.legs
    assert {member: calls for member, calls in hops.token_calls.items() if calls > MOST_TOKEN_CALLS[member]} == {}
    assert hops.command_calls > hops.command_changes > 10, "a trace that saw nothing proves nothing"
