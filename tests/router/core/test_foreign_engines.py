"""The router heeds what a foreign engine cannot do, by the names in the hellos: what must not move, be divided or be set."""

from __future__ import annotations

import pytest

from pdserve.core.errors import IncompatiblePeer, InvalidRequest, ReplicaLost
from pdserve.core.ids import WorkerId
from pdserve.core.sampling import Placement
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.core.worker import Role
from router.core import events as ev
from tests.router.core.recovery.test_migration import LONG, drain, finish, named, step
from tests.router.core_peers import Peer, Stage

JSON = Constraint(ConstraintKind.JSON_OBJECT, "")
LACKS = {"engine": "other 1.0", "numerics": "", "undivided": ("structured_outputs",), "unresumed": ("structured_outputs",)}


def join(stage: Stage, name: str, role: Role = Role.DECODE, **changes: object) -> Peer:
    facts = {"max_num_seqs": 8, "num_blocks": 1 << 14, "max_model_len": 1024, **LACKS, **changes}
    return stage.join(name, role, **facts)


def stage_of(decode: int, **config: object) -> Stage:
    stage = Stage(**config)
    join(stage, "prefill-0", Role.PREFILL)
    for n in range(decode):
        join(stage, f"decode-{n}")
    return stage


@pytest.mark.parametrize("flip", [False, True])
def test_an_output_that_nobody_can_take_up_ends_on_the_draining_worker(flip: bool) -> None:
    stage = stage_of(1, max_attempts=1, retry_burst=0, retry_share=0.0)
    stuck = stage.submit("stuck", max_tokens=LONG, deadline_s=1e6, constraint=JSON)
    free = stage.submit("free", max_tokens=LONG, deadline_s=1e6)
    for _ in range(6):
        step(stage)
    join(stage, "decode-1")
    peer = drain(stage, flip=flip)
    for _ in range(20):
        step(stage)
    assert len(peer.jobs) == 1, "the other one has moved"
    finish(stage, [stuck, free])
    assert [one.report.migrations for one in (stuck, free) if one.report] == [0, 1]


def test_it_moves_before_its_client_has_a_token() -> None:
    stage = stage_of(2)
    outcome = stage.submit("r", max_tokens=LONG, constraint=JSON)
    (peer,) = [p for p in stage.peers.values() if p.jobs]
    stage.deliver(peer)
    stage.tell(ev.DrainAsked(peer.hello.worker_id))
    step(stage)
    assert not peer.jobs
    finish(stage, [outcome])


@pytest.mark.parametrize("decode", [1, 2])
def test_its_loss_is_told_at_once(decode: int) -> None:
    """Also where the worker was the only one, so that none is left to say what engines can do."""
    stage = Stage()
    for n in range(decode):
        join(stage, f"decode-{n}")
    outcome = stage.submit("r", max_tokens=LONG, constraint=JSON)
    for _ in range(6):
        step(stage)
    (peer,) = [p for p in stage.peers.values() if p.jobs]
    stage.leave(peer)
    assert outcome.ended == ["replica_lost"]
    assert isinstance(outcome.error, ReplicaLost)
    assert "after 1 attempt (the engines cannot take up an output again under structured_outputs)" in str(outcome.error)
    stage.assert_empty()


def test_its_loss_before_a_token_costs_a_replay() -> None:
    stage = stage_of(2)
    outcome = stage.submit("r", max_tokens=6, constraint=JSON)
    (peer,) = [p for p in stage.peers.values() if p.jobs]
    stage.deliver(peer)
    stage.leave(peer)
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    assert outcome.report.attempts == 2


def test_it_gives_its_slot_to_nobody() -> None:
    stage = Stage()
    join(stage, "decode-0", max_num_seqs=8)
    heavy = ("heavy", "c", "call")
    burst = [stage.submit(f"r{n}", max_tokens=LONG, deadline_s=1e6, client=heavy, constraint=JSON) for n in range(8)]
    for _ in range(4):
        step(stage)
    light = stage.submit("light", max_tokens=LONG, deadline_s=1e6, client=("light", "c", "call"))
    for _ in range(5):
        step(stage)
    assert not light.emitted
    finish(stage, [*burst, light])


def test_two_workers_for_an_undivided_request_are_the_mistake_of_who_asks_for_them() -> None:
    """It is no use to wait, so the error is none that clients retry."""
    stage = stage_of(1)
    with pytest.raises(InvalidRequest, match=r"^placement: .* serve structured_outputs only where one worker") as wrong:
        stage.submit("r", constraint=JSON, placement=Placement.DISAGGREGATED)
    assert wrong.value.field == "placement"
    stage = stage_of(1, placement="disaggregated")
    with pytest.raises(InvalidRequest, match=r"^structured_outputs: router\.placement is disaggregated") as wrong:
        stage.submit("r", constraint=JSON)
    assert wrong.value.field == "structured_outputs"
    outcomes = [stage.submit("auto", constraint=JSON, placement=Placement.AUTO), stage.submit("plain")]
    stage.run()
    assert [one.ended for one in outcomes] == [["done"], ["done"]]
    assert [one.report.placement for one in outcomes if one.report] == [Placement.COLOCATED, Placement.DISAGGREGATED]
    stage.assert_empty()


def test_digests_of_foreign_engines_are_said_to_cover_more_than_files() -> None:
    stage = Stage()
    join(stage, "decode-0", model_digest="a")
    said = refusal(stage, model_digest="b", engine="other 1.1")
    assert "the engine's release, its block size and its dtypes" in said
    assert "(other 1.1, 4 tokens, KV in bfloat16) and (other 1.0, 4 tokens, KV in bfloat16)" in said
    stage = Stage()
    join(stage, "decode-0", model_digest="a", engine="")
    assert "the files of the two differ, although they look alike" in refusal(stage, model_digest="b", engine="")


def refusal(stage: Stage, **changes: object) -> str:
    """Return why a worker of this hello is refused."""
    join(stage, "decode-1", **changes)
    close = stage.effects[-1]
    assert isinstance(close, ev.CloseLink)
    assert isinstance(close.error, IncompatiblePeer)
    return str(close.error)


def test_a_budget_of_tokens_that_an_engine_does_not_take_is_refused_with_what_it_takes() -> None:
    stage = stage_of(1)
    join(stage, "decode-1", max_num_batched_tokens=0)
    for seqs in (0, 4):
        with pytest.raises(InvalidRequest, match=r"engine\.max_num_batched_tokens .* \(--max-num-seqs\)") as refused:
            stage.tell(ev.BudgetAsked(WorkerId("decode-1"), 256, seqs))
        assert refused.value.field == "max_num_batched_tokens"
    stage.tell(ev.BudgetAsked(WorkerId("decode-1"), 0, 4))
    assert named(stage, "decode-1").slots == 4
