"""The choice between the two ways of a prompt by their predicted costs."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.core.events import LinkId
from router.core.live_request import Reason
from router.core.placer import MARGIN_S, weigh
from router.core.policy import Candidate

DECODER = Candidate(LinkId(1), 1000, 0, 4, 0, 4096, suspect=False, refused=False, prompt_tokens_per_s=1000.0)
LENDER = DECODER._replace(link=LinkId(2))

workers = st.builds(
    lambda queued, cached, running, rate: DECODER._replace(
        queued_tokens=queued, cached_tokens=cached, running=running, prompt_tokens_per_s=rate
    ),
    st.integers(0, 100_000),
    st.integers(0, 4096),
    st.integers(0, 100),
    st.floats(1.0, 1e5),
)
PROMPTS = st.integers(1, 4096)
TRANSFERS = st.floats(0.0, 100.0)


def test_a_prompt_goes_to_the_prefill_worker_while_both_are_idle() -> None:
    """However short or long, and wherever it is cached: computing it stops at least one other sequence for as long."""
    for tokens in (1, 10, 1000):
        assert weigh(DECODER, LENDER, tokens, 0.0) is None
        assert weigh(DECODER._replace(running=50), LENDER, tokens, 0.0) is None


@pytest.mark.parametrize(
    ("decoder", "lender", "exposed_s", "reason"),
    [
        ({}, {"queued_tokens": 150}, 0.0, Reason.PREFILL_QUEUE),
        ({}, {}, 0.15, Reason.TRANSFER),
        ({"cached_tokens": 80}, {}, 0.0, Reason.CACHED_SUFFIX),
        ({}, {"prompt_tokens_per_s": 300.0}, 0.0, Reason.PREFILL_SLOW),
    ],
)
def test_a_prompt_is_colocated_for_the_largest_saving(
    decoder: dict[str, float], lender: dict[str, float], exposed_s: float, reason: Reason
) -> None:
    """100 tokens at 1,000 tokens in a second: 0.1 s in either way, and 0.1 s for one other sequence that decodes."""
    here, there = DECODER._replace(**decoder), LENDER._replace(**lender)  # type: ignore[arg-type]
    assert weigh(here, there, 100, exposed_s) is reason
    assert weigh(here._replace(running=20), there, 100, exposed_s) is None


def test_a_gain_within_the_margin_moves_nothing() -> None:
    wait_s = 0.1 + MARGIN_S  # 0.1 s is what the one other sequence loses
    assert weigh(DECODER, LENDER._replace(queued_tokens=round(wait_s * 1000)), 100, 0.0) is None
    assert weigh(DECODER, LENDER._replace(queued_tokens=round(wait_s * 1000) + 1), 100, 0.0) is Reason.PREFILL_QUEUE


def test_unknown_costs_move_nothing() -> None:
    busy = LENDER._replace(queued_tokens=10_000)
    assert weigh(DECODER, busy, 100, 0.0) is not None
    assert weigh(DECODER, busy, 100, None) is None
    assert weigh(DECODER, busy._replace(prompt_tokens_per_s=0.0), 100, 0.0) is None
    assert weigh(DECODER._replace(prompt_tokens_per_s=0.0), busy, 100, 0.0) is None


@given(workers, workers, PROMPTS, TRANSFERS, st.integers(1, 10_000))
def test_a_longer_prefill_queue_or_transfer_never_moves_a_prompt_there(
    decoder: Candidate, lender: Candidate, tokens: int, exposed_s: float, more: int
) -> None:
    if weigh(decoder, lender, tokens, exposed_s) is not None:
        assert weigh(decoder, lender._replace(queued_tokens=lender.queued_tokens + more), tokens, exposed_s) is not None
        assert weigh(decoder, lender, tokens, exposed_s + more) is not None


@given(workers, workers, PROMPTS, TRANSFERS, st.integers(1, 10_000))
def test_more_work_on_the_decode_worker_never_moves_a_prompt_there(
    decoder: Candidate, lender: Candidate, tokens: int, exposed_s: float, more: int
) -> None:
    if weigh(decoder, lender, tokens, exposed_s) is None:
        assert weigh(decoder._replace(running=decoder.running + more), lender, tokens, exposed_s) is None
        assert weigh(decoder._replace(queued_tokens=decoder.queued_tokens + more), lender, tokens, exposed_s) is None
        assert weigh(decoder._replace(cached_tokens=max(0, decoder.cached_tokens - more)), lender, tokens, exposed_s) is None
