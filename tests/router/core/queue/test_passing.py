"""Small requests pass a large one that waits for room, and it loses nothing by that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.core.ids import RequestId
from pdserve.core.worker import Role
from router.core import requests as core_requests
from tests.router.core_peers import Peer, Stage

BLOCKS = 64
KV_TOKENS = 4 * BLOCKS
LIGHT_TOKENS = 5


def step(stage: Stage, peer: Peer) -> None:
    peer.progress()
    stage.deliver(peer, 9)
    stage.now_s += 0.1
    stage.heartbeat(peer)
    stage.core.check_invariants()


def one_worker(slots: int) -> tuple[Stage, Peer]:
    stage = Stage(max_queued_requests=1000)
    return stage, stage.join("d", Role.DECODE, num_blocks=BLOCKS, max_model_len=KV_TOKENS, max_num_seqs=slots)


def test_a_large_prompt_that_waits_holds_up_no_chat_that_fits_beside_it() -> None:
    """It had claimed the only decode worker, so chats of a few tokens waited for the answers of others to end."""
    stage, peer = one_worker(slots=8)
    streams = [stage.submit(f"stream{n}", prompt_len=20, max_tokens=40) for n in range(3)]
    large = stage.submit("large", prompt_len=150, max_tokens=10)
    step(stage, peer)
    lights = [stage.submit(f"light{n}", prompt_len=4, max_tokens=LIGHT_TOKENS) for n in range(3)]
    for _ in range(LIGHT_TOKENS):
        step(stage, peer)
    assert [light.ended for light in lights] == [["done"]] * 3
    assert not large.emitted
    assert not any(stream.ended for stream in streams)
    while not large.ended:
        step(stage, peer)
    stage.assert_empty()


@dataclass
class Course:
    """What became of a large request beside light ones that never stop coming."""

    started_step: int
    passes: int
    streams_ended_step: float
    """The step with which the last of the requests ended that ran before it. Infinite: it started before that."""


def course(streams: list[tuple[int, int]], large: tuple[int, int], lights: list[tuple[int, int]], slots: int) -> Course:
    """Requests are pairs of the length of their prompt and that of their output."""
    stage, peer = one_worker(slots)
    before = [
        stage.submit(f"stream{n}", prompt_len=prompt_len, max_tokens=max_tokens)
        for n, (prompt_len, max_tokens) in enumerate(streams)
    ]
    claimant = stage.submit("large", prompt_len=large[0], max_tokens=large[1])
    request = stage.core.requests.get(RequestId("large"))
    assert request is not None
    steps, lights_sent, streams_ended_step = 0, 0, math.inf
    while not claimant.emitted:
        while len(stage.core.waiting) < 4:
            prompt_len, max_tokens = lights[lights_sent % len(lights)]
            stage.submit(f"light{lights_sent}", prompt_len=prompt_len, max_tokens=max_tokens)
            lights_sent += 1
        step(stage, peer)
        steps += 1
        if all(stream.ended for stream in before):
            streams_ended_step = min(streams_ended_step, steps)
        assert steps < 300, "the large request starves"
    return Course(steps, request.passed_by, streams_ended_step)


@settings(max_examples=80, deadline=None)
@given(
    streams=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=6),
    large=st.tuples(st.integers(60, KV_TOKENS - 20), st.integers(1, 20)),
    lights=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=4),
    slots=st.integers(1, 8),
)
@example(streams=[(100, 11), (10, 40)], large=(170, 10), lights=[(3, 3), (3, 5), (2, 4)], slots=8)
def test_a_large_request_starts_at_most_one_light_one_later_and_no_later_than_the_others_end(
    streams: list[tuple[int, int]], large: tuple[int, int], lights: list[tuple[int, int]], slots: int
) -> None:
    """Light requests come faster than they are served. Once the others leave it room, none passes any more; and those that have
    passed leave it enough when all others have ended, however long they take."""
    room = accumulate(sum(stream) for stream in streams)
    running = [stream for stream, tokens in zip(streams[:slots], room, strict=False) if tokens <= KV_TOKENS]
    with patch.object(core_requests, "MAX_PASSES", 0):
        alone = course(running, large, lights, slots)
    beside = course(running, large, lights, slots)
    assert alone.passes == 0
    assert beside.started_step <= alone.started_step + max(output for _, output in lights)
    assert beside.started_step <= beside.streams_ended_step + 1


def test_a_request_is_passed_a_bounded_number_of_times() -> None:
    """Its worker may refuse it again and again, and each claim begins anew."""
    with patch.object(core_requests, "MAX_PASSES", 7):
        assert course([(20, 200)], (220, 10), [(2, 1)], 8).passes == 7
