"""Log-probabilities of prompts that a worker must not send, and a request for more than a message holds."""

from __future__ import annotations

import math

import pytest

from pdserve.core.errors import InternalBug, InvalidRequest
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import MAX_PROMPT_LOGPROBS_BYTES, SamplingParams, TokenLogprobs, check_prompt_logprobs
from pdserve.rpc.codec import logprobs_to_wire
from pdserve.rpc.v1 import link_pb2
from router.core.live_request import delta_of

SPEC = RequestSpec((5, 6, 7), SamplingParams(prompt_logprobs=1))
SCORES = tuple(TokenLogprobs(-float(i), ((i, -float(i)),)) for i in (1, 2))


def row(*scores: TokenLogprobs, index: int = 0) -> link_pb2.StepRow:
    return link_pb2.StepRow(handle=1, index=index, ids=(9,), prompt_logprobs=logprobs_to_wire(scores))


def test_the_first_delta_has_the_scores_of_the_prompt() -> None:
    """A row of a later token has none, and a request that asks for none gets none."""
    assert delta_of(row(*SCORES), SPEC).prompt_logprobs == SCORES
    assert delta_of(row(index=1), SPEC).prompt_logprobs == ()
    assert delta_of(row(*SCORES), RequestSpec((5, 6, 7), SamplingParams())).prompt_logprobs == ()


@pytest.mark.parametrize(
    "scores",
    [
        (), SCORES[:1], (*SCORES, SCORES[0]), (SCORES[0], TokenLogprobs(math.nan, ((1, -1.0),))),
        (SCORES[0], TokenLogprobs(-1.0, ((1, math.nan),))), (SCORES[0], TokenLogprobs(-1.0)),
    ],
)  # fmt: skip
def test_scores_that_do_not_fit_the_prompt_fail_the_request(scores: tuple[TokenLogprobs, ...]) -> None:
    with pytest.raises(InternalBug):
        delta_of(row(*scores), SPEC)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_largest_allowed_scores_fit_their_message(count: int) -> None:
    """The limit is of the bytes: a prompt of one token more is refused by name."""
    most = MAX_PROMPT_LOGPROBS_BYTES // (4 + 8 * count)
    check_prompt_logprobs(most, count)
    check_prompt_logprobs(most * 100, None)
    with pytest.raises(InvalidRequest) as caught:
        check_prompt_logprobs(most + 1, count)
    assert caught.value.field == "prompt_logprobs"
    score = TokenLogprobs(-1.5, tuple((200_000 + i, -1.5) for i in range(count)))
    message = logprobs_to_wire([score] * (most - 1))
    assert message is not None
    assert message.ByteSize() <= MAX_PROMPT_LOGPROBS_BYTES + 64
