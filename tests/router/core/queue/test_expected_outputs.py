"""What requests will probably put out: each client's own past counts, and no other client's."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.slo import SloClass
from router.core import events as ev
from router.core.forecast import MAX_CLIENTS, PRIOR_TOKENS, ExpectedOutputs
from router.core.live_request import LiveRequest

LONG = 8_000
OPEN_END = 8_192


def request(client: str = "light", max_tokens: int | None = None, slo_class: str = "default") -> LiveRequest:
    spec = RequestSpec((1, 2), SamplingParams(max_tokens=max_tokens or OPEN_END, seed=1))
    slo, names = SloClass(slo_class), (client, "connection", "call") if client else ()
    submit = ev.Submit(RequestId("r"), spec, 0.0, 9.0, slo=slo, client=names, open_ended=max_tokens is None)
    return LiveRequest.of(submit, 0)


def seen(outputs: ExpectedOutputs, one: LiveRequest, tokens: int, count: int) -> None:
    for _ in range(count):
        outputs.saw(one, tokens)


def test_long_answers_of_one_client_charge_no_other_chat_for_them() -> None:
    """After 34 of them, each chat without `max_tokens` was charged for 4,064 tokens, so that a worker's KV took one or two."""
    outputs = ExpectedOutputs()
    seen(outputs, request(), 40, 100)
    before = outputs.expect(request())
    assert 40 <= before <= 60
    seen(outputs, request("heavy", LONG), LONG, 34)
    seen(outputs, request("heavy"), LONG, 34)
    assert outputs.expect(request()) == before
    assert outputs.expect(request("new")) <= PRIOR_TOKENS
    assert outputs.expect(request("new", LONG)) == PRIOR_TOKENS
    assert outputs.expect(request("heavy", LONG)) > 5 * PRIOR_TOKENS


def test_other_lengths_and_other_classes_of_the_same_client_are_kept_apart() -> None:
    """Behind a proxy all are one client."""
    outputs = ExpectedOutputs()
    seen(outputs, request(max_tokens=LONG), LONG, 400)
    assert outputs.expect(request(max_tokens=LONG)) > 0.9 * LONG
    assert outputs.expect(request(max_tokens=LONG // 2)) == PRIOR_TOKENS
    assert outputs.expect(request(max_tokens=LONG, slo_class="batch")) == PRIOR_TOKENS
    assert outputs.expect(request()) == PRIOR_TOKENS


def test_the_mean_is_that_of_a_clients_outputs() -> None:
    outputs = ExpectedOutputs()
    for _ in range(300):
        seen(outputs, request(), 30, 3)
        seen(outputs, request(), 230, 1)
    assert 60 <= outputs.expect(request()) <= 100


@given(
    st.lists(
        st.tuples(
            st.builds(request, st.sampled_from(["", "a", "b"]), st.integers(1, 5_000) | st.none(), st.sampled_from(["x", "y"])),
            st.integers(0, 5_000),
        ),
        max_size=80,
    )
)
def test_an_expectation_is_within_what_a_request_may_put_out(finished: list[tuple[LiveRequest, int]]) -> None:
    outputs = ExpectedOutputs()
    for one, tokens in finished:
        outputs.saw(one, min(tokens, one.spec.sampling.max_tokens))
        for emitted in (0, one.spec.sampling.max_tokens - 1):
            one.emitted = [0] * emitted
            assert 1 <= outputs.expect(one) <= one.remaining_tokens


def test_clients_without_end_take_no_memory_without_end() -> None:
    outputs = ExpectedOutputs()
    for i in range(10 * MAX_CLIENTS):
        outputs.saw(request(f"client {i}"), 200)
    assert [len(means.by_client) for means in outputs._kinds.values()] == [MAX_CLIENTS]
    assert outputs.expect(request("client 0")) == outputs.expect(request("client 9999"))
