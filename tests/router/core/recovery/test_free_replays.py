"""The loss of a worker costs a request nothing but time, whatever is lost at once and however often, with default settings."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.config import RouterConfig
from pdserve.core.worker import Role
from router.core import events as ev
from tests.router.core_peers import Peer, Stage

BLOCKS = 1 << 14


def join(stage: Stage, name: str, seqs: int = 256) -> Peer:
    return stage.join(name, Role.DECODE, max_num_seqs=seqs, num_blocks=BLOCKS)


def step(stage: Stage) -> None:
    for peer in list(stage.peers.values()):
        peer.progress()
        stage.deliver(peer, len(peer.upward))


@pytest.mark.parametrize("batch", [64, 256])
def test_a_full_batch_is_replayed_while_the_cluster_is_young(batch: int) -> None:
    """The budget of retries would hold ten and a tenth of the admitted requests. It stays untouched."""
    stage = Stage()
    lost, other = join(stage, "decode-0", batch), join(stage, "decode-1", 2 * batch)
    outcomes = [stage.submit(f"r{n}", max_tokens=6) for n in range(2 * batch)]
    stage.deliver(lost, 2 * batch)
    stage.deliver(other, 2 * batch)
    step(stage)
    assert lost.jobs
    stage.leave(lost)
    stage.run()
    assert {tuple(o.ended) for o in outcomes} == {("done",)}
    assert stage.core.recovery.bucket.taken == 0
    stage.assert_empty()


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_losses_of_workers_never_fail_a_request_and_never_take_a_retry(data: st.DataObject) -> None:
    """Workers are lost one after the other, far more often than a request has attempts. While each stays at least for a step,
    every request ends as undisturbed."""
    stage = Stage(recovery_wait_s=1000.0)
    workers = data.draw(st.integers(1, 3), label="workers")
    for n in range(workers):
        join(stage, f"decode-{n}")
    if data.draw(st.booleans(), label="prefill"):
        stage.join("prefill-0", Role.PREFILL)
    outcomes = [stage.submit(f"r{n}", max_tokens=12) for n in range(data.draw(st.integers(1, 6), label="requests"))]
    for _ in range(3 * RouterConfig().max_attempts):
        peers = list(stage.peers.values())
        lost = data.draw(st.sampled_from(peers), label="lost")
        for _ in range(data.draw(st.integers(0, 2), label="steps")):
            step(stage)
        # The same process dials again, so that nobody takes the request for the cause.
        stage.leave(lost)
        stage.join(lost.hello.worker_id, lost.hello.role, max_num_seqs=lost.hello.max_num_seqs,
                   num_blocks=lost.hello.num_blocks, incarnation=lost.hello.incarnation)  # fmt: skip
    for _ in range(40):
        stage.run()
        stage.tell(ev.Tick())
    assert {tuple(o.ended) for o in outcomes} == {("done",)}
    assert stage.core.recovery.bucket.taken == 0
    stage.assert_empty()
