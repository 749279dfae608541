"""A request may not take a longer way than it does: whoever makes it shorter lowers the limits."""

from __future__ import annotations

from tools.hops import Hops, measure

MOST_FILES = 91
MOST_CHANGES = 178
MOST_TOKEN_CALLS = {"router": 60, "prefill": 4, "decode": 86}
TRIES = 4
"""Measurements, of which the shortest way counts: messages in pieces make a way longer, by up to 11 changes of file."""


def within(hops: Hops) -> bool:
    calls = hops.token_calls.items()
    return (
        len(hops.files) <= MOST_FILES
        and hops.command_changes <= MOST_CHANGES
        and all(count <= MOST_TOKEN_CALLS[member] for member, count in calls)
    )


def test_a_request_takes_no_longer_way_than_before() -> None:
    tried: list[Hops] = []
    while len(tried) < TRIES and not any(map(within, tried)):
        tried.append(measure())
        assert tried[-1].command_calls > tried[-1].command_changes > 10, "a trace that saw nothing proves nothing"
    ways = [(len(hops.files), hops.command_changes, hops.token_calls) for hops in tried]
    assert any(map(within, tried)), (ways, min(tried, key=lambda hops: hops.command_changes).legs)
